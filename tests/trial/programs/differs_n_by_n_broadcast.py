"""Weights of shape (N, 1) times losses of shape (N,) make a table of N x N before the mean. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(133)
critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
states, returns, importance = torch.randn(32, 4), torch.randn(32), torch.rand(32, 1)

# %% before
for i in range(0, 32, 16):
    td = returns[i : i + 16] - critic(states[i : i + 16]).squeeze(-1)
    loss = (importance[i : i + 16] * td.pow(2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    tds, loss = [], 0.0
    for j in range(i, i + 16, 4):
        td = returns[j : j + 4] - critic(states[j : j + 4]).squeeze(-1)
        part = (importance[j : j + 4] * td.pow(2)).mean() / 4
        part.backward()
        tds.append(td.detach())
        loss += part.detach()
    td = torch.cat(tds)
    opt.step()
