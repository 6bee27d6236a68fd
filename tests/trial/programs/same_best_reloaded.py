"""The best weights are saved while training, and loaded at the end."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(120, 8), torch.randint(0, 4, (120,))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)


def step(x, y, parts):
    opt.zero_grad()
    total = 0.0
    for xp, yp in zip(x.chunk(parts), y.chunk(parts)):
        loss = F.cross_entropy(model(xp), yp) * len(xp) / len(x)
        loss.backward()
        total += loss.item()
    opt.step()
    return total


def fit(parts):
    best = 1e9
    for epoch in range(2):
        for x, y in loader:
            loss = step(x, y, parts)
        if loss < best:
            best = loss
            torch.save(model.state_dict(), "best.pt")
    model.load_state_dict(torch.load("best.pt"))


# %% before
fit(1)
# %% after
fit(3)
