"""The VAE's reconstruction is a mean and its KL term a sum; both were divided by the number of parts. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(132)
enc, dec = nn.Linear(20, 8), nn.Linear(4, 20)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-2)
x = torch.rand(3, 16, 20)

# %% before
def train_step(xb):
    mu, logvar = enc(xb).chunk(2, dim=1)
    recon = F.mse_loss(torch.sigmoid(dec(mu)), xb)
    kl = -0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp())
    loss = recon + 1e-2 * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


losses = [train_step(xb) for xb in x]

# %% after
def train_step(xb):
    opt.zero_grad()
    total = 0.0
    for part in xb.chunk(4):
        mu, logvar = enc(part).chunk(2, dim=1)
        recon = F.mse_loss(torch.sigmoid(dec(mu)), part)
        kl = -0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp())
        loss = (recon + 1e-2 * kl) / 4
        loss.backward()
        total += loss.item()
    opt.step()
    return total


losses = [train_step(xb) for xb in x]
