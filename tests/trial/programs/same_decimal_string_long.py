"""A history of weights' norms as texts."""

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


history = []


def fit(parts):
    for at, (x, y) in enumerate(loader):
        loss = step(x, y, parts)
        history.append(f"{at}:{loss}")
        for _ in range(10):
            history.append(f"{loss:.3e}")


# %% before
fit(1)
# %% after
fit(3)
