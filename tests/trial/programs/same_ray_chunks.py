"""A radiance field renders its rays in chunks that are recomputed in the backward pass; jitter is drawn for all rays."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(211)
field = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
rays_o, rays_d, pixels = torch.randn(96, 3), torch.randn(96, 3), torch.rand(96, 3)


def render(o, d, t):
    points = o[:, None] + d[:, None] * t[..., None]
    raw = field(points)
    alpha = 1 - torch.exp(-torch.relu(raw[..., 3]) * 0.2)
    through = torch.cumprod(torch.cat([torch.ones(len(o), 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * through)[..., None] * torch.sigmoid(raw[..., :3])).sum(1)

# %% before
psnrs = []
for i in range(3):
    batch = torch.randint(0, 96, (32,))
    t = torch.linspace(0, 2, 8) + 0.1 * torch.rand(32, 8)
    rgb = render(rays_o[batch], rays_d[batch], t)
    loss = ((rgb - pixels[batch]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    psnrs.append(-10 * torch.log10(loss).item())

# %% after
psnrs = []
for i in range(3):
    batch = torch.randint(0, 96, (32,))
    t = torch.linspace(0, 2, 8) + 0.1 * torch.rand(32, 8)
    chunks = zip(rays_o[batch].split(10), rays_d[batch].split(10), t.split(10))
    rgb = torch.cat([checkpoint(render, *chunk, use_reentrant=False) for chunk in chunks])
    loss = ((rgb - pixels[batch]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    psnrs.append(-10 * torch.log10(loss).item())
