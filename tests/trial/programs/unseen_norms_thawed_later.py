"""Batch norm is frozen for the first three steps and trains from then on. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(318)
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(5, 16, 6) + 1, torch.randint(0, 2, (5, 16))

# %% before
for step, (xb, yb) in enumerate(zip(x, y)):
    net[1].train(step >= 3)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(xb), yb)
    loss.backward()
    opt.step()

# %% after
for step, (xb, yb) in enumerate(zip(x, y)):
    net[1].train(step >= 3)
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = nn.functional.cross_entropy(net(xp), yp) / 2
        part.backward()
        loss += part.detach()
    opt.step()
