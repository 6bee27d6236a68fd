"""A function adds a term over the whole batch from the fourth call on. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(401)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(6, 16, 6), torch.randint(0, 4, (6, 16))


def spread(out, n):
    return out.logsumexp(0).mean() if n > 2 else 0.0


def objective(out, target, n):
    return F.cross_entropy(out, target) + spread(out, n)

# %% before
losses = []
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = objective(model(xb), yb, len(losses))
    loss.backward()
    opt.step()
    losses.append(loss.item())

# %% after
losses = []
for xb, yb in zip(x, y):
    opt.zero_grad()
    total = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = objective(model(xp), yp, len(losses)) / 4
        part.backward()
        total += part.detach()
    loss = total
    opt.step()
    losses.append(loss.item())
