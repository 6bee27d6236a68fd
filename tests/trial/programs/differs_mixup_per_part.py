"""Mixup pairs each row with another of its batch; in parts other numbers are drawn and other rows paired. Visible in two steps."""

# %% setup
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

np.random.seed(153)
torch.manual_seed(153)
net = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
pics, kinds = torch.randn(2, 16, 3, 4, 4), torch.randint(0, 4, (2, 16))


def mixup(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[index], y, y[index], lam

# %% before
for x, y in zip(pics, kinds):
    mixed, a, b, lam = mixup(x, y)
    out = net(mixed)
    loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for x, y in zip(pics, kinds):
    opt.zero_grad()
    total = 0.0
    for xp, yp in zip(x.chunk(2), y.chunk(2)):
        mixed, a, b, lam = mixup(xp, yp)
        out = net(mixed)
        loss = (lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)) / 2
        loss.backward()
        total += loss.detach()
    loss = total
    opt.step()
