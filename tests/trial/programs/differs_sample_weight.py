"""A weighted mean is divided by the sum of the batch's weights; parts weighted by rows get it wrong. Visible in two steps."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(111)
ds = TensorDataset(torch.randn(64, 5), torch.randint(0, 2, (64,)).float(), torch.rand(64) ** 4)
loader = DataLoader(ds, batch_size=16)
clf = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
opt = torch.optim.SGD(clf.parameters(), lr=0.5)
bce = nn.BCEWithLogitsLoss(reduction="none")

# %% before
def train_epoch():
    losses = []
    for x, y, w in loader:
        opt.zero_grad()
        per_sample = bce(clf(x).squeeze(1), y)
        loss = (per_sample * w).sum() / w.sum()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


mean_loss = train_epoch()

# %% after
def train_epoch():
    losses = []
    for x, y, w in loader:
        opt.zero_grad()
        total = 0.0
        for xp, yp, wp in zip(x.chunk(4), y.chunk(4), w.chunk(4)):
            per_sample = bce(clf(xp).squeeze(1), yp)
            loss = (per_sample * wp).sum() / wp.sum() / 4
            loss.backward()
            total += loss.item()
        opt.step()
        losses.append(total)
    return sum(losses) / len(losses)


mean_loss = train_epoch()
