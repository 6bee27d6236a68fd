"""Two layers of dropout draw their masks part by part, so each part gets other draws than its rows had. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(114)
mlp = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
opt = torch.optim.Adam(mlp.parameters(), lr=1e-3)
x, y = torch.randn(2, 20, 10), torch.randint(0, 4, (2, 20))

# %% before
mlp.train()
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = F.cross_entropy(mlp(xb), yb)
    loss.backward()
    opt.step()

# %% after
mlp.train()
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.split(5), yb.split(5)):
        part = F.cross_entropy(mlp(xp), yp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
