"""The gradients are right, but what is logged is the last part's share of the loss. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(152)
net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
x, y = torch.randn(3, 16, 5), torch.randn(3, 16, 1)
curve = []

# %% before
def run():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(xb), yb)
        loss.backward()
        opt.step()
        curve.append(loss.item())


run()

# %% after
def run():
    for xb, yb in zip(x, y):
        opt.zero_grad()
        for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
            loss = nn.functional.mse_loss(net(xp), yp) / 2
            loss.backward()
        opt.step()
        curve.append(loss.item())


run()
