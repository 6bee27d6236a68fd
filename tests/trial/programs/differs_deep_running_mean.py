"""A module six levels deep keeps running means of its own. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(n))

    def forward(self, x):
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(1, keepdim=True)


def wrapped(module, times):
    for _ in range(times):
        module = nn.Sequential(module)
    return module


model = nn.Sequential(wrapped(nn.Sequential(nn.Linear(8, 16), Norm(16)), 4), nn.Linear(16, 4))
norm = None
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(120, 8) + 1, torch.randint(0, 4, (120,))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)


def fit(parts):
    global norm
    for x, y in loader:
        opt.zero_grad()
        for xp, yp in zip(x.chunk(parts), y.chunk(parts)):
            (F.cross_entropy(model(xp), yp) * len(xp) / len(x)).backward()
        opt.step()


# %% before
fit(1)
# %% after
fit(4)
