"""A log is written while training, and read at the end."""

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


import csv


def fit(parts):
    with open("log.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss"])
        for at, (x, y) in enumerate(loader):
            rows.writerow([at, step(x, y, parts)])
    with open("log.csv") as file:
        print(sum(float(row["loss"]) for row in csv.DictReader(file)))


# %% before
fit(1)
# %% after
fit(3)
