"""The gradient of attention's key bias is nought but for rounding, which Adam makes whole steps of. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(148)
attn = nn.MultiheadAttention(12, 2, batch_first=True)
readout = nn.Linear(12, 3)
opt = torch.optim.Adam([*attn.parameters(), *readout.parameters()], lr=1e-2)
x, y = torch.randn(2, 16, 5, 12), torch.randint(0, 3, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(readout(attn(xb, xb, xb, need_weights=False)[0].mean(1)), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.split(6), yb.split(6)):
        part = nn.functional.cross_entropy(readout(attn(xp, xp, xp, need_weights=False)[0].mean(1)), yp) * len(xp) / 16
        part.backward()
        loss += part.detach()
    opt.step()
