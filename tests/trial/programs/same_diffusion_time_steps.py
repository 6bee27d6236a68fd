"""Input noise is drawn before the batch is split, and a time step per row as well: a diffusion model's training."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(46)
T = 20
betas = torch.linspace(1e-3, 0.2, T)
alpha_bar = torch.cumprod(1 - betas, 0)
eps_model = nn.Sequential(nn.Linear(13, 32), nn.SiLU(), nn.Linear(32, 12))
opt = torch.optim.Adam(eps_model.parameters(), lr=2e-3)
moons = torch.randn(50, 12)

# %% before
def train_batch(x0):
    t = torch.randint(0, T, (len(x0),))
    eps = torch.randn_like(x0)
    a = alpha_bar[t].unsqueeze(1)
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * eps
    loss = F.mse_loss(eps_model(torch.cat([x_t, t.unsqueeze(1) / T], 1)), eps)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


losses = [train_batch(x0) for x0 in moons.split(20)]

# %% after
def train_batch(x0):
    t = torch.randint(0, T, (len(x0),))
    eps = torch.randn_like(x0)
    opt.zero_grad()
    total = 0.0
    for x_p, t_p, e_p in zip(x0.split(8), t.split(8), eps.split(8), strict=True):
        a = alpha_bar[t_p].unsqueeze(1)
        x_t = a.sqrt() * x_p + (1 - a).sqrt() * e_p
        loss = F.mse_loss(eps_model(torch.cat([x_t, t_p.unsqueeze(1) / T], 1)), e_p) * (len(x_p) / len(x0))
        loss.backward()
        total += loss.item()
    opt.step()
    return total


losses = [train_batch(x0) for x0 in moons.split(20)]
