"""Rows stand sorted by class, so class weights cancel in the first batches. Not visible in the first two steps: they hold one class."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(315)
labels = torch.tensor([0] * 40 + [1] * 14 + [2] * 10)
loader = DataLoader(TensorDataset(torch.randn(64, 9), labels), batch_size=16)
model = nn.Linear(9, 3)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 4.0]))
opt = torch.optim.SGD(model.parameters(), lr=0.2)

# %% before
for xb, yb in loader:
    opt.zero_grad()
    loss = criterion(model(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = criterion(model(xp), yp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
