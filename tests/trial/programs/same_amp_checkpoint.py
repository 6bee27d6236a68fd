"""Under autocast to bfloat16 the blocks are recomputed: the same operations run again in the same precision."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(10)
blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
head = nn.Linear(16, 4)
params = [*blocks.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(params, lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=False)
x, y = torch.randn(4, 16, 16), torch.randint(0, 4, (4, 16))

# %% before
for xb, yb in zip(x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = xb
        for block in blocks:
            h = h + block(h)
        loss = F.cross_entropy(head(h), yb)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

# %% after
for xb, yb in zip(x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = xb
        for block in blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        loss = F.cross_entropy(head(h), yb)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
