"""The penalty takes the norm of the gradient over all rows of the batch, not of each row. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(136)
D = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
opt = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.0, 0.9))
real, fake = torch.randn(2, 16, 6), torch.randn(2, 16, 6) + 1


def critic_loss(r, f):
    mid = ((r + f) / 2).requires_grad_()
    (g,) = torch.autograd.grad(D(mid).sum(), mid, create_graph=True)
    return D(f).mean() - D(r).mean() + 10 * (g.norm() - 1) ** 2

# %% before
for r, f in zip(real, fake):
    d_loss = critic_loss(r, f)
    opt.zero_grad()
    d_loss.backward()
    opt.step()

# %% after
for r, f in zip(real, fake):
    opt.zero_grad()
    d_loss = 0.0
    for rp, fp in zip(r.chunk(4), f.chunk(4)):
        part = critic_loss(rp, fp) / 4
        part.backward()
        d_loss += part.detach()
    opt.step()
