"""A batch whose loss is above a threshold is skipped; one late batch is. Not visible in the first two steps: batch four is the outlier."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(121)
X, Y = torch.randn(80, 4), torch.randn(80, 1)
Y[56:60] += 60.0
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
skipped = 0

# %% before
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if loss.item() < 100:
        loss.backward()
        optimizer.step()
    else:
        skipped += 1

# %% after
for x, y in loader:
    optimizer.zero_grad()
    loss, bad = 0.0, False
    for xp, yp in zip(x.chunk(2), y.chunk(2)):
        part = nn.functional.mse_loss(model(xp), yp)
        loss += part.detach() / 2
        if part.item() < 100:
            (part / 2).backward()
        else:
            bad = True
    optimizer.step()
    skipped += bad
