"""From the third epoch on features are decorrelated over the batch. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(404)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,))), batch_size=16)


def objective(out, target, epoch):
    loss = F.cross_entropy(out, target)
    if epoch < 2:
        return loss
    centred = out - out.mean(0)
    return loss + (centred.T @ centred / len(out)).square().mean()

# %% before
for epoch in range(4):
    for xb, yb in loader:
        opt.zero_grad()
        loss = objective(model(xb), yb, epoch)
        loss.backward()
        opt.step()

# %% after
for epoch in range(4):
    for xb, yb in loader:
        opt.zero_grad()
        loss = 0.0
        for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
            part = objective(model(xp), yp, epoch) * len(xp) / len(xb)
            part.backward()
            loss += part.detach()
        opt.step()
