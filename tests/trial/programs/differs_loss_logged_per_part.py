"""The history that is plotted later gets an entry for each part in place of one for the batch. Visible in two steps."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(118)
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 2)), batch_size=16)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
logs = {"loss": []}

# %% before
def train():
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(xb), yb)
        loss.backward()
        logs["loss"].append(loss.item())
        optimizer.step()


train()

# %% after
def train():
    for xb, yb in loader:
        optimizer.zero_grad()
        for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
            loss = nn.functional.l1_loss(model(xp), yp) / 4
            loss.backward()
            logs["loss"].append(loss.item())
        optimizer.step()


train()
