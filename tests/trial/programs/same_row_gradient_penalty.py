"""WGAN-GP's penalty is a mean over each row's own gradient norm; the mixing weights are drawn for all rows first."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(41)
critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
real, fake = torch.randn(2, 20, 8), torch.randn(2, 20, 8) * 2
d_history = []


def wgan_gp(real, fake, alpha, lam=10.0):
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_()
    scores = critic(mixed)
    (grad,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
    return critic(fake).mean() - critic(real).mean() + lam * ((grad.norm(2, dim=1) - 1) ** 2).mean()

# %% before
for r, f in zip(real, fake):
    alpha = torch.rand(len(r), 1)
    optimizer.zero_grad()
    loss = wgan_gp(r, f, alpha)
    loss.backward()
    optimizer.step()
    d_history.append(loss.item())

# %% after
for r, f in zip(real, fake):
    alpha = torch.rand(len(r), 1)
    optimizer.zero_grad()
    loss = 0.0
    for rp, fp, ap in zip(r.split(6), f.split(6), alpha.split(6)):
        part = wgan_gp(rp, fp, ap) * (len(rp) / len(r))
        part.backward()
        loss += part.detach()
    optimizer.step()
    d_history.append(loss.item())
