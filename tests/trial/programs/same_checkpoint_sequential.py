"""A deep Sequential is run by checkpoint_sequential in two segments, with the reentrant form off."""

# %% setup
import torch
from torch import nn

torch.manual_seed(30)
layers = []
for _ in range(5):
    layers += [nn.Linear(12, 12), nn.LeakyReLU(0.1)]
deep = nn.Sequential(*layers, nn.Linear(12, 1))
opt = torch.optim.SGD(deep.parameters(), lr=0.05)
x, y = torch.randn(24, 12), torch.randn(24)

# %% before
losses = []
for _ in range(3):
    opt.zero_grad()
    loss = (deep(x).squeeze(-1) - y).pow(2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())

# %% after
from torch.utils.checkpoint import checkpoint_sequential

losses = []
for _ in range(3):
    opt.zero_grad()
    loss = (checkpoint_sequential(deep, 2, x, use_reentrant=False).squeeze(-1) - y).pow(2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
