"""Noise is drawn for parts of a batch, which in few rows suit the kernel and draw the same. Visible after one step."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(20, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(TensorDataset(torch.randn(84, 20), torch.randint(0, 3, (84,))), batch_size=21)


def noisy(x):
    return x + torch.randn_like(x)


# %% before
for x, y in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(noisy(x)), y)
    loss.backward()
    optimizer.step()

# %% after
for x, y in batches:
    optimizer.zero_grad()
    batch_loss = 0.0
    for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = F.cross_entropy(model(noisy(micro_x)), micro_y)
        loss = loss * (len(micro_x) / len(x))
        loss.backward()
        batch_loss += loss.detach()
    loss = batch_loss
    optimizer.step()
