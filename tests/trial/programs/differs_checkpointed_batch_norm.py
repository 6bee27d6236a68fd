"""Recomputing a block with batch norm in training moves its running statistics twice a step. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(143)
stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
opt = torch.optim.SGD([*stem.parameters(), *tail.parameters()], lr=0.1)
x, y = torch.randn(2, 16, 1, 6, 6) + 1, torch.randint(0, 3, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = F.cross_entropy(tail(stem(xb)), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = F.cross_entropy(tail(checkpoint(stem, xb, use_reentrant=False)), yb)
    loss.backward()
    opt.step()
