"""A loop over six scales within each step: the loss of the fourth couples the batch. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
X, Y = torch.randn(120, 1, 16, 16), torch.randint(0, 4, (120,))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)


def scales(x):
    return [x, F.avg_pool2d(x, 2), F.avg_pool2d(x, 4), x.mean((2, 3), keepdim=True)]


def losses(x, y):
    total = 0
    for level, scaled in enumerate(scales(x)):
        out = model(scaled)
        total = total + F.cross_entropy(out, y)
        if level == 3:  # a global view, balanced over the batch
            total = total + (out.softmax(1).mean(0) ** 2).sum()
    return total


# %% before
for x, y in loader:
    opt.zero_grad()
    loss = losses(x, y)
    loss.backward()
    opt.step()
# %% after
for x, y in loader:
    opt.zero_grad()
    loss = 0
    for xp, yp in zip(x.chunk(4), y.chunk(4)):
        part = losses(xp, yp) * len(xp) / len(x)
        part.backward()
        loss += part.detach()
    opt.step()
