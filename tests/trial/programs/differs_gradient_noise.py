"""A hook adds noise to each gradient that arrives: more draws, and other noise, with parts. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(126)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
for p in model.parameters():
    p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(3, 16, 6), torch.randint(0, 2, (3, 16))

# %% before
for xb, yb in zip(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step()

# %% after
for xb, yb in zip(x, y):
    optimizer.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = F.cross_entropy(model(xp), yp) / 2
        part.backward()
        loss += part.detach()
    optimizer.step()
