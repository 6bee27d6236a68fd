"""The optimizer steps after each part: a smaller batch, not the same one. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(158)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(2, 16, 4), torch.randint(0, 3, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        opt.zero_grad()
        part = nn.functional.cross_entropy(model(xp), yp)
        part.backward()
        opt.step()
        loss += part.detach() / 2
