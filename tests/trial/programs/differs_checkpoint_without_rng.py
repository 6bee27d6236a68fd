"""With preserve_rng_state=False the recomputed dropout draws another mask than the forward did. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(144)
block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8))
head = nn.Linear(8, 2)
opt = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)
x, y = torch.randn(2, 16, 8), torch.randint(0, 2, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(head(xb + block(xb)), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(head(xb + checkpoint(block, xb, use_reentrant=False, preserve_rng_state=False)), yb)
    loss.backward()
    opt.step()
