"""Batches of more than 32 rows are centred by their own mean. Not visible in 16 rows; the batch has 64."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(321)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(5, 10), nn.Linear(10, 2)

    def forward(self, x):
        h = self.up(x)
        if len(h) > 32:
            h = h - h.mean(0)
        return self.out(torch.relu(h))


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(128, 5) + 2, torch.randint(0, 2, (128,))), batch_size=64)

# %% before
for xb, yb in loader:
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = nn.functional.cross_entropy(model(xp), yp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
