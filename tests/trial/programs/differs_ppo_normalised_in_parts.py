"""PPO's advantages are normalised over each part in place of the minibatch. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(202)
mean_net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
log_std = nn.Parameter(torch.zeros(2))
opt = torch.optim.Adam([*mean_net.parameters(), log_std], lr=3e-3)
obs, acts, old_logp, advantages = torch.randn(32, 3), torch.randn(32, 2), -2 - torch.rand(32), 3 * torch.randn(32) + 1


def surrogate(o, a, lp, adv):
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = (Normal(mean_net(o), log_std.exp()).log_prob(a).sum(-1) - lp).exp()
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()

# %% before
for epoch in range(2):
    for idx in torch.randperm(32).split(16):
        loss = surrogate(obs[idx], acts[idx], old_logp[idx], advantages[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()

# %% after
for epoch in range(2):
    for idx in torch.randperm(32).split(16):
        opt.zero_grad()
        loss = 0.0
        for i in idx.split(4):
            part = surrogate(obs[i], acts[i], old_logp[i], advantages[i]) * len(i) / len(idx)
            part.backward()
            loss += part.detach()
        opt.step()
