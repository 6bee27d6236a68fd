"""The rewritten loop lost the warm-up's scheduler.step() after each batch. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(116)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 10))
x, y = torch.randn(64, 6), torch.randn(64, 1)
mse = nn.MSELoss()

# %% before
for i in range(0, 64, 16):
    opt.zero_grad()
    loss = mse(net(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    opt.step()
    scheduler.step()

# %% after
for i in range(0, 64, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        part = mse(net(x[j : j + 4]), y[j : j + 4]) / 4
        part.backward()
        loss += part.detach()
    opt.step()
