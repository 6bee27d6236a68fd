"""zero_grad stands in the loop over parts, so only the last part's gradients are stepped with. Visible in two steps."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(129)
dl = DataLoader(TensorDataset(torch.randn(48, 5), torch.randn(48, 1)), batch_size=16)
reg = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
optim = torch.optim.SGD(reg.parameters(), lr=0.1)

# %% before
total = 0.0
for xb, yb in dl:
    optim.zero_grad()
    loss = nn.functional.mse_loss(reg(xb), yb)
    loss.backward()
    optim.step()
    total += loss.item()

# %% after
total = 0.0
for xb, yb in dl:
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        optim.zero_grad()
        part = nn.functional.mse_loss(reg(xp), yp) / 2
        part.backward()
        loss += part.detach()
    optim.step()
    total += loss.item()
