"""The loss object anneals the KL term by how often it was called, which parts raise. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(217)


class AnnealedELBO:
    def __init__(self, warmup=10):
        self.calls, self.warmup = 0, warmup

    def __call__(self, recon, x, mu, logvar):
        self.calls += 1
        beta = min(1.0, self.calls / self.warmup)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return F.mse_loss(recon, x) + beta * kl


encoder, decoder = nn.Linear(14, 6), nn.Linear(3, 14)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
criterion = AnnealedELBO()
x = torch.randn(2, 16, 14)

# %% before
for batch in x:
    eps = torch.randn(16, 3)
    opt.zero_grad()
    mu, logvar = encoder(batch).chunk(2, 1)
    loss = criterion(decoder(mu + eps * (0.5 * logvar).exp()), batch, mu, logvar)
    loss.backward()
    opt.step()

# %% after
for batch in x:
    eps = torch.randn(16, 3)
    opt.zero_grad()
    codes, total = [], 0.0
    for b, e in zip(batch.chunk(2), eps.chunk(2)):
        mu, logvar = encoder(b).chunk(2, 1)
        loss = criterion(decoder(mu + e * (0.5 * logvar).exp()), b, mu, logvar) / 2
        loss.backward()
        codes.append((mu.detach(), logvar.detach()))
        total += loss.detach()
    mu, logvar = (torch.cat(t) for t in zip(*codes))
    loss = total
    opt.step()
