"""Rows with NaN make the whole batch be passed over, in parts only their part. Not visible in the first two steps: batch three has them."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(122)
sensor = torch.randn(64, 6)
sensor[45, 2] = float("nan")
kind = torch.randint(0, 3, (64,))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
nan_batches = 0

# %% before
for i in range(0, 64, 16):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(sensor[i : i + 16]), kind[i : i + 16])
    if torch.isnan(loss):
        nan_batches += 1
        continue
    loss.backward()
    optimizer.step()
final_loss = loss.item()

# %% after
for i in range(0, 64, 16):
    optimizer.zero_grad()
    loss = torch.tensor(0.0)
    seen_nan = False
    for j in range(i, i + 16, 8):
        part = F.cross_entropy(model(sensor[j : j + 8]), kind[j : j + 8]) / 2
        if torch.isnan(part):
            seen_nan = True
            continue
        part.backward()
        loss = loss + part.detach()
    nan_batches += seen_nan
    optimizer.step()
final_loss = loss.item()
