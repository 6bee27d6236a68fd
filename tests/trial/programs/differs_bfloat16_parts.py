"""Under autocast each part's gradient is rounded to bfloat16 before the parts are added, well above 1e-4. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(147)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(2, 32, 16), torch.randint(0, 4, (2, 32))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(net(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            part = F.cross_entropy(net(xp), yp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
