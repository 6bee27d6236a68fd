"""A regression whose shapes match, by slices x[i:i + bs] over shuffled indices, in parts down to one row."""

# %% setup
import numpy as np
import torch
from torch import nn

np.random.seed(8)
torch.manual_seed(8)
x = torch.randn(50, 5)
y = x @ torch.randn(5, 1) + 0.1 * torch.randn(50, 1)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
mse = nn.MSELoss()
bs = 16

# %% before
perm = np.random.permutation(len(x))
losses = []
for i in range(0, len(x), bs):
    idx = perm[i : i + bs]
    xb, yb = x[idx], y[idx]
    loss = mse(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %% after
perm = np.random.permutation(len(x))
losses = []
for i in range(0, len(x), bs):
    idx = perm[i : i + bs]
    xb, yb = x[idx], y[idx]
    optimizer.zero_grad()
    loss = torch.zeros(())
    for j in range(0, len(xb), 5):
        part = mse(model(xb[j : j + 5]), yb[j : j + 5]) * len(xb[j : j + 5]) / len(xb)
        part.backward()
        loss += part.detach()
    optimizer.step()
    losses.append(loss.item())
