"""Alignment is a mean over rows, uniformity one over pairs of rows, which parts do not have. Visible in two steps."""

# %% setup
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(103)
backbone = nn.Linear(16, 5)
optimizer = torch.optim.SGD(backbone.parameters(), lr=0.3, momentum=0.9)


def align_loss(x, y):
    return (x - y).norm(dim=1).pow(2).mean()


def uniform_loss(x, t=2):
    return torch.pdist(x).pow(2).mul(-t).exp().mean().log()


views = torch.randn(3, 2, 16, 16)

# %% before
curve = []
for first, second in views:
    x, y = F.normalize(backbone(first)), F.normalize(backbone(second))
    loss = align_loss(x, y) + (uniform_loss(x) + uniform_loss(y)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    curve.append(loss.item())

# %% after
curve = []
for first, second in views:
    optimizer.zero_grad()
    outs, total = [], 0.0
    for a, b in zip(first.chunk(2), second.chunk(2)):
        x, y = F.normalize(backbone(a)), F.normalize(backbone(b))
        loss = (align_loss(x, y) + (uniform_loss(x) + uniform_loss(y)) / 2) / 2
        loss.backward()
        outs.append((x.detach(), y.detach()))
        total += loss.detach()
    x, y = (torch.cat(t) for t in zip(*outs))
    loss = total
    optimizer.step()
    curve.append(loss.item())
