"""MSELoss of (N, 1) against (N,) compares every row with every other, and parts leave most of the pairs out. Visible in two steps."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(100)
X = torch.randn(64, 6)
y = X @ torch.randn(6) + 0.1 * torch.randn(64)
loader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

# %% before
import warnings

warnings.simplefilter("ignore")
losses = []
for xb, yb in loader:
    optimizer.zero_grad()
    loss = criterion(model(xb), yb)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %% after
import warnings

warnings.simplefilter("ignore")
losses = []
for xb, yb in loader:
    optimizer.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = criterion(model(xp), yp) * len(xp) / len(xb)
        part.backward()
        loss += part.detach()
    optimizer.step()
    losses.append(loss.item())
