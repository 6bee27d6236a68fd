"""SimCLR's encoder runs in recomputed parts while the loss sees the embeddings of the whole batch."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(15)
encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
photos = torch.randn(3, 16, 20)


def nt_xent(z1, z2, temperature=0.5):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    sim = (z @ z.T / temperature).masked_fill(torch.eye(len(z)).bool(), -1e9)
    n = len(z1)
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

# %% before
for batch in photos:
    a, b = batch + 0.1 * torch.randn_like(batch), batch * (torch.rand_like(batch) > 0.2)
    loss = nt_xent(encoder(a), encoder(b))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")

# %% after
def in_parts(x):
    return torch.cat([checkpoint(encoder, part, use_reentrant=False) for part in x.split(4)])


for batch in photos:
    a, b = batch + 0.1 * torch.randn_like(batch), batch * (torch.rand_like(batch) > 0.2)
    loss = nt_xent(in_parts(a), in_parts(b))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
