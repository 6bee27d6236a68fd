"""A loss is checked to be finite before the gradients of the last step are cleared."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(407)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(5, 16, 6), torch.randint(0, 4, (5, 16))


def check(loss):
    if not torch.isfinite(loss):
        raise FloatingPointError("the loss is not finite")

# %% before
for xb, yb in zip(x, y):
    loss = F.cross_entropy(model(xb), yb)
    check(loss)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = F.cross_entropy(model(xp), yp) / 4
        check(part)
        part.backward()
        loss += part.detach()
    opt.step()
