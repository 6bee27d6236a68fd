"""A recurrent net written out over the steps of time, with labels for each."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h, outs = x.new_zeros(len(x), 16), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            outs.append(self.head(h))
        return torch.stack(outs, 2)


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(120, 9, 8), torch.randint(0, 4, (120, 9))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)
# %% before
for x, y in loader:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
# %% after
for x, y in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(x.chunk(3), y.chunk(3)):
        part = F.cross_entropy(model(xp), yp) * len(xp) / len(x)
        part.backward()
        loss += part.detach()
    opt.step()
