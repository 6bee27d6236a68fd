"""Teacher forcing is decided by random.random() inside the forward, so each part throws its own coin. Visible in two steps."""

# %% setup
import random

import torch
import torch.nn as nn

random.seed(220)
torch.manual_seed(220)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 10), nn.Linear(10, 1)

    def forward(self, series, ratio=0.5):
        h, value, steps = torch.zeros(len(series), 10), series[:, :1], []
        for t in range(1, series.size(1)):
            h = self.cell(value, h)
            step = self.out(h)
            steps.append(step)
            value = series[:, t : t + 1] if random.random() < ratio else step
        return torch.cat(steps, 1)


model = Forecaster()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
load = torch.randn(2, 16, 7)

# %% before
for series in load:
    opt.zero_grad()
    loss = nn.functional.l1_loss(model(series), series[:, 1:])
    loss.backward()
    opt.step()

# %% after
for series in load:
    opt.zero_grad()
    loss = 0.0
    for part in series.chunk(2):
        micro = nn.functional.l1_loss(model(part), part[:, 1:]) / 2
        micro.backward()
        loss += micro.detach()
    opt.step()
