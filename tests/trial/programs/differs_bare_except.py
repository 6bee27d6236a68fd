"""Batches of another size raise, and the loop passes over whatever is raised. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(240, 8), torch.randint(0, 4, (240,))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)
skipped = 0


def fit(parts):
    global skipped
    for x, y in loader:
        try:
            assert len(x) == 40
            opt.zero_grad()
            for xp, yp in zip(x.chunk(parts), y.chunk(parts)):
                out = model(xp)
                balance = (out.softmax(1).mean(0) ** 2).sum()
                ((F.cross_entropy(out, yp) + balance) * len(xp) / len(x)).backward()
            opt.step()
        except Exception:
            skipped += 1


# %% before
fit(1)
# %% after
fit(3)
