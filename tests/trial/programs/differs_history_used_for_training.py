"""Losses that are kept to be sent backward together are detached. Visible in the first run: backward raises."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(312)
meta = nn.Linear(5, 1)
opt = torch.optim.SGD(meta.parameters(), lr=0.1)
tasks = [(torch.randn(8, 5), torch.randn(8, 1)) for _ in range(3)]

# %% before
history = []
for x, y in tasks:
    history.append(nn.functional.mse_loss(meta(x), y))
opt.zero_grad()
torch.stack(history).sum().backward()
opt.step()

# %% after
history = []
for x, y in tasks:
    history.append(nn.functional.mse_loss(meta(x), y).detach())
opt.zero_grad()
torch.stack(history).sum().backward()
opt.step()
