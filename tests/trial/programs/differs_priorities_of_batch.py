"""Prioritised replay scales its weights by the largest of the batch, which each part takes of its own rows. Visible in two steps."""

# %% setup
import numpy as np
import torch
import torch.nn as nn

np.random.seed(213)
torch.manual_seed(213)
states, targets = torch.randn(64, 5), torch.randn(64)
priorities = np.random.rand(64) + 0.01
q_net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(q_net.parameters(), lr=1e-3)


def td_loss(idx, beta=0.4):
    p = priorities[idx] / priorities.sum()
    w = torch.from_numpy((64 * p) ** -beta).float()
    return ((w / w.max()) * (q_net(states[idx]).squeeze(1) - targets[idx]) ** 2).mean()

# %% before
for step in range(2):
    idx = np.random.choice(64, 16, replace=False, p=priorities / priorities.sum())
    loss = td_loss(idx)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for step in range(2):
    idx = np.random.choice(64, 16, replace=False, p=priorities / priorities.sum())
    opt.zero_grad()
    loss = 0.0
    for some in np.array_split(idx, 4):
        part = td_loss(some) * len(some) / len(idx)
        part.backward()
        loss += part.detach()
    opt.step()
