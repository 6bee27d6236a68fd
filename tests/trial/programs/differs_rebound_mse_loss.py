"""The notebook has put its own function in the place of F.mse_loss, scaled by the batch's spread. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(110)


def mine(input, target, reduction="mean"):
    return ((input - target) ** 2).mean() / (target.var() + 1e-3)


F.mse_loss = mine
net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
points, values = torch.randn(32, 3), torch.randn(32, 2)

# %% before
for i in range(0, 32, 16):
    pred = net(points[i : i + 16])
    loss = F.mse_loss(pred, values[i : i + 16])
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    preds, total = [], 0.0
    for j in range(i, i + 16, 8):
        pred = net(points[j : j + 8])
        loss = F.mse_loss(pred, values[j : j + 8]) / 2
        loss.backward()
        preds.append(pred.detach())
        total += loss.detach()
    pred, loss = torch.cat(preds), total
    opt.step()
