"""A forward hook that gathers activations also runs when its block is recomputed. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(145)
encoder = nn.Sequential(nn.Linear(7, 14), nn.GELU(), nn.Linear(14, 7))
probe = nn.Linear(7, 1)
activations = {"mean": []}
encoder[1].register_forward_hook(lambda module, args, out: activations["mean"].append(out.mean().item()))
opt = torch.optim.Adam([*encoder.parameters(), *probe.parameters()], lr=1e-3)
x, y = torch.randn(2, 16, 7), torch.randn(2, 16, 1)

# %% before
for xb, yb in zip(x, y):
    loss = nn.functional.mse_loss(probe(encoder(xb)), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    loss = nn.functional.mse_loss(probe(checkpoint(encoder, xb, use_reentrant=False)), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
