"""A hook that halves a parameter's gradient is linear, so it does the same to the parts as to their sum."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)
net = nn.Sequential(nn.Linear(6, 18), nn.ELU(), nn.Linear(18, 3))
net[0].weight.register_hook(lambda grad: grad * 0.5)
mask = (torch.rand(3, 18) > 0.5).float()
net[2].weight.register_hook(lambda grad: grad * mask)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-4)
features, classes = torch.randn(64, 6), torch.randint(0, 3, (64,))

# %% before
for epoch in range(2):
    for i in range(0, 64, 32):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(features[i : i + 32]), classes[i : i + 32])
        loss.backward()
        optimizer.step()

# %% after
for epoch in range(2):
    for i in range(0, 64, 32):
        optimizer.zero_grad()
        loss = 0.0
        for j in range(i, i + 32, 8):
            part = F.cross_entropy(net(features[j : j + 8]), classes[j : j + 8]) / 4
            part.backward()
            loss += part.detach()
        optimizer.step()
