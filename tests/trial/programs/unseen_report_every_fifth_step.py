"""The line that each fifth step prints stands inside the loop over parts. Not visible in the first two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(161)
net = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(6, 16, 7), torch.randint(0, 2, (6, 16))

# %% before
for step, (xb, yb) in enumerate(zip(x, y), start=1):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(xb), yb)
    loss.backward()
    if step % 5 == 0:
        print(f"step {step} done")
    opt.step()

# %% after
for step, (xb, yb) in enumerate(zip(x, y), start=1):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(2), yb.chunk(2)):
        part = nn.functional.cross_entropy(net(xp), yp) / 2
        part.backward()
        loss += part.detach()
        if step % 5 == 0:
            print(f"step {step} done")
    opt.step()
