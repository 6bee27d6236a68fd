"""A model standardises over the batch once it has a history. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(402)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(6, 12), nn.Linear(12, 4), []

    def observe(self, loss):
        self.seen.append(loss)

    def forward(self, x):
        h = self.up(x)
        if len(self.seen) > 2:
            h = h / (h.std(0) + 1e-3)
        return self.down(torch.relu(h))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(6, 16, 6), torch.randint(0, 4, (6, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = F.cross_entropy(net(xb), yb)
    loss.backward()
    opt.step()
    net.observe(loss.item())

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    total = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        part = F.cross_entropy(net(xp), yp) / 4
        part.backward()
        total += part.detach()
    loss = total
    opt.step()
    net.observe(loss.item())
