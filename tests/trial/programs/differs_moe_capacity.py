"""Experts take at most their share of the batch's rows and drop the rest; a part drops others. Visible in two steps."""

# %% setup
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(109)


class SwitchLayer(nn.Module):
    def __init__(self, dim=8, experts=4, capacity_factor=1.0):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.capacity_factor = capacity_factor

    def forward(self, x):
        prob, chosen = self.router(x).softmax(-1).max(-1)
        capacity = math.ceil(self.capacity_factor * len(x) / len(self.experts))
        out = x.clone()
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero().squeeze(1)[:capacity]
            out[rows] = out[rows] + expert(x[rows]) * prob[rows, None]
        return out


model = nn.Sequential(SwitchLayer(), nn.ReLU(), SwitchLayer(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(48, 8), torch.randint(0, 3, (48,))

# %% before
for i in range(0, 48, 16):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    optimizer.step()

# %% after
for i in range(0, 48, 16):
    optimizer.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        part = F.cross_entropy(model(x[j : j + 4]), y[j : j + 4]) * 4 / 16
        part.backward()
        loss += part.detach()
    optimizer.step()
