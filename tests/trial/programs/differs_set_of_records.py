"""A set keeps a record of the size of each batch. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    rows: int


model, seen = nn.Linear(8, 4), set()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(120, 8), torch.randint(0, 4, (120,))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)


def fit(parts):
    for x, y in loader:
        opt.zero_grad()
        for xp, yp in zip(x.chunk(parts), y.chunk(parts)):
            seen.add(Batch(-(-len(x) // parts)))
            (F.cross_entropy(model(xp), yp) * len(xp) / len(x)).backward()
        opt.step()


# %% before
fit(1)
# %% after
fit(2)
