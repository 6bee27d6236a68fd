"""The target network follows once a part in place of once a batch. Visible in two steps."""

# %% setup
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(130)
online = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
target = copy.deepcopy(online).requires_grad_(False)
predictor = nn.Linear(6, 6)
optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1)
views = torch.randn(3, 2, 16, 12)


@torch.no_grad()
def momentum_update(m=0.9):
    for t, o in zip(target.parameters(), online.parameters()):
        t.mul_(m).add_(o, alpha=1 - m)

# %% before
for a, b in views:
    loss = 2 - 2 * F.cosine_similarity(predictor(online(a)), target(b)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    momentum_update()

# %% after
for a, b in views:
    optimizer.zero_grad()
    loss = 0.0
    for ap, bp in zip(a.chunk(2), b.chunk(2)):
        part = (2 - 2 * F.cosine_similarity(predictor(online(ap)), target(bp)).mean()) / 2
        part.backward()
        loss += part.detach()
        momentum_update()
    optimizer.step()
