"""Spectral normalisation makes a power iteration each time its layer runs in training: once a part. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(146)
D = nn.Sequential(spectral_norm(nn.Linear(10, 20)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(20, 1)))
opt = torch.optim.SGD(D.parameters(), lr=0.05)
real, fake = torch.randn(2, 16, 10), torch.randn(2, 16, 10) - 1

# %% before
def hinge_step(r, f):
    opt.zero_grad()
    loss = nn.functional.relu(1 - D(torch.cat([r, -f]))).mean()
    loss.backward()
    opt.step()
    return loss.item()


d_losses = [hinge_step(r, f) for r, f in zip(real, fake)]

# %% after
def hinge_step(r, f):
    opt.zero_grad()
    total = 0.0
    for rp, fp in zip(r.chunk(2), f.chunk(2)):
        loss = nn.functional.relu(1 - D(torch.cat([rp, -fp]))).mean() / 2
        loss.backward()
        total += loss.item()
    opt.step()
    return total


d_losses = [hinge_step(r, f) for r, f in zip(real, fake)]
