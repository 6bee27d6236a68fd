"""MoCo's queue of keys gets each part's keys before the next part is compared with it. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(154)


class MoCo(nn.Module):
    def __init__(self, dim=6, K=32):
        super().__init__()
        self.q, self.k = nn.Linear(14, dim), nn.Linear(14, dim).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.ptr = 0

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], dim=1) / 0.2
        self.queue[:, self.ptr : self.ptr + len(k)] = k.T
        self.ptr = (self.ptr + len(k)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


moco = MoCo()
opt = torch.optim.SGD(moco.q.parameters(), lr=0.5)
crops = torch.randn(2, 2, 16, 14)

# %% before
for a, b in crops:
    opt.zero_grad()
    loss = moco(a, b)
    loss.backward()
    opt.step()

# %% after
for a, b in crops:
    opt.zero_grad()
    loss = 0.0
    for ap, bp in zip(a.chunk(4), b.chunk(4)):
        part = moco(ap, bp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
