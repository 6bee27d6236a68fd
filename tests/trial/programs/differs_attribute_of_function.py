"""A forward function keeps its call count as an attribute of itself. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(302)
w = nn.Parameter(torch.randn(4, 2) * 0.1)
opt = torch.optim.Adam([w], lr=0.01)


def forward(x):
    forward.calls += 1
    return x @ w


forward.calls = 0
x, y = torch.randn(2, 16, 4), torch.randn(2, 16, 2)

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = (forward(xb) - yb).abs().mean()
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        half = (forward(xp) - yp).abs().mean() / 2
        half.backward()
        loss += half.detach()
    opt.step()
