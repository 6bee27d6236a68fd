"""A generator function yields batches and remembers the epoch; only what is done with a batch is split."""

# %% setup
import random

import torch
from torch import nn

random.seed(44)
torch.manual_seed(44)
samples = [(torch.randn(5), i % 3) for i in range(40)]
model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
state = {"epoch": 0, "seen": 0}


def batches(size):
    while state["epoch"] < 2:
        random.shuffle(samples)
        for i in range(0, len(samples), size):
            state["seen"] += len(samples[i : i + size])
            xs, ys = zip(*samples[i : i + size])
            yield torch.stack(xs), torch.tensor(ys)
        state["epoch"] += 1

# %% before
losses = []
for x, y in batches(16):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())

# %% after
losses = []
for x, y in batches(16):
    opt.zero_grad()
    loss = 0.0
    for start in range(0, len(x), 6):
        x_part, y_part = x[start : start + 6], y[start : start + 6]
        micro = nn.functional.cross_entropy(model(x_part), y_part) * (len(x_part) / len(x))
        micro.backward()
        loss += micro.detach()
    opt.step()
    losses.append(loss.item())
