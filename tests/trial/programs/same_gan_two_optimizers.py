"""Both players of a GAN take their batch in parts; the latent vectors are drawn once for all rows."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(4)
G = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10), nn.Tanh())
D = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
g_opt = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCELoss()
real_data = torch.randn(48, 10).clamp(-1, 1)
d_losses, g_losses = [], []

# %% before
def fit(batch_size=16):
    for real in real_data.split(batch_size):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        z = torch.randn(len(real), 6)
        fake = G(z)
        d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = bce(D(fake), ones)
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        d_losses.append(d_loss.item())
        g_losses.append(g_loss.item())


fit()

# %% after
def fit(batch_size=16, parts=4):
    for real in real_data.split(batch_size):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        z = torch.randn(len(real), 6)
        d_opt.zero_grad()
        d_total = 0.0
        for r, n, one, zero in zip(*(t.chunk(parts) for t in (real, z, ones, zeros)), strict=True):
            with torch.no_grad():
                fake = G(n)
            d_loss = (bce(D(r), one) + bce(D(fake), zero)) / parts
            d_loss.backward()
            d_total += d_loss.item()
        d_opt.step()
        g_opt.zero_grad()
        g_total = 0.0
        for n, one in zip(z.chunk(parts), ones.chunk(parts), strict=True):
            g_loss = bce(D(G(n)), one) / parts
            g_loss.backward()
            g_total += g_loss.item()
        g_opt.step()
        d_losses.append(d_total)
        g_losses.append(g_total)


fit()
