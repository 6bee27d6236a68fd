"""A loss is checked to be finite, and from the fifth step on has a term over the batch. Not visible in the first two steps."""

# %% setup
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(406)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(7, 16, 6), torch.randint(0, 4, (7, 16))
weights = np.concatenate([np.zeros(4), np.linspace(0.5, 1.0, 3)])


def objective(out, target, step):
    loss = F.cross_entropy(out, target)
    if step >= 4:
        loss = loss + weights[step] * out.mean(0).square().sum()
    if not torch.isfinite(loss):
        raise FloatingPointError("the loss is not finite")
    return loss

# %% before
for step, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad()
    loss = objective(model(xb), yb, step)
    loss.backward()
    opt.step()

# %% after
for step, (xb, yb) in enumerate(zip(x, y)):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = objective(model(xp), yp, step) / 4
        part.backward()
        loss += part.detach()
    opt.step()
