"""Centres are the class means of the batch, and the loss is the distance (cdist) to them. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(137)
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
x, y = torch.randn(48, 10), torch.arange(48) % 2


def proto_loss(z, y):
    centers = torch.stack([z[y == c].mean(0) for c in (0, 1)])
    return nn.functional.cross_entropy(-torch.cdist(z, centers), y)

# %% before
for i in range(0, 48, 24):
    opt.zero_grad()
    loss = proto_loss(net(x[i : i + 24]), y[i : i + 24])
    loss.backward()
    opt.step()
    print(f"{loss.item():.5f}")

# %% after
for i in range(0, 48, 24):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 24, 8):
        part = proto_loss(net(x[j : j + 8]), y[j : j + 8]) / 3
        part.backward()
        loss += part.detach()
    opt.step()
    print(f"{loss.item():.5f}")
