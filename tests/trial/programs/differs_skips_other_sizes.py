"""Batches of another size than the usual are passed over. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)

import time


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(0.0005)
        g = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=g)
        return x, float(x[0] > 1)


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Slow(), batch_size=90)


def dice(p, y):
    p = p.sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def fit(parts):
    for x, y in loader:
        if len(x) != 90:
            continue
        opt.zero_grad()
        for xp, yp in zip(x.chunk(parts), y.chunk(parts)):
            (dice(model(xp).squeeze(1), yp) * len(xp) / len(x)).backward()
        opt.step()


# %% before
fit(1)
# %% after
fit(3)
