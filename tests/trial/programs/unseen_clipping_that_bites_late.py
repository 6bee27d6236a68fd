"""Each part is clipped to a norm that only a late batch exceeds. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(317)
X, Y = torch.randn(64, 5), torch.randn(64, 1)
Y[50:] *= 40
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model = nn.Linear(5, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)

# %% before
for xb, yb in loader:
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    opt.step()

# %% after
for xb, yb in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = nn.functional.mse_loss(model(xp), yp) / 4
        part.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        loss += part.detach()
    opt.step()
