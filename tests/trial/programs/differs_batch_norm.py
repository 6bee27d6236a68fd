"""Batch norm in training mode takes its statistics over each part, and moves its buffers once a part. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(113)
resnet = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
opt = torch.optim.SGD(resnet.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
x, y = torch.randn(32, 3, 8, 8), torch.randint(0, 5, (32,))

# %% before
resnet.train()
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = criterion(resnet(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    opt.step()

# %% after
resnet.train()
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 8):
        part = criterion(resnet(x[j : j + 8]), y[j : j + 8]) / 2
        part.backward()
        loss += part.detach()
    opt.step()
