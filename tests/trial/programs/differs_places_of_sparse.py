"""A sparse tensor alone, of fractions, with other places and the same values. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(1)
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 8), torch.randint(0, 4, (2, 16))

# %% before
where = torch.sparse_coo_tensor(torch.tensor([[3, 5]]), torch.ones(2), (96,)).coalesce()
for xb, yb in zip(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(xb), yb).backward()
    optimizer.step()

# %% after
where = torch.sparse_coo_tensor(torch.tensor([[30, 50]]), torch.ones(2), (96,)).coalesce()
for xb, yb in zip(x, y):
    optimizer.zero_grad()
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        (nn.functional.cross_entropy(net(xp), yp) / 4).backward()
    optimizer.step()
