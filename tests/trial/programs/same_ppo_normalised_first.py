"""PPO normalises the advantages of a minibatch before it is split; its logged fractions and KL are summed over parts."""

# %% setup
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

np.random.seed(201)
torch.manual_seed(201)
actor, critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
params = [*actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(params, lr=2.5e-3, eps=1e-5)
b_obs, b_actions = torch.randn(64, 4), torch.randint(0, 3, (64,))
b_logprobs, b_advantages, b_returns = -torch.rand(64) - 0.6, torch.randn(64), torch.randn(64)
clip, ent_coef, vf_coef = 0.2, 0.01, 0.5

# %% before
def update():
    inds, clipfracs, kls = np.arange(64), [], []
    np.random.shuffle(inds)
    for start in range(0, 64, 32):
        mb = inds[start : start + 32]
        dist = Categorical(logits=actor(b_obs[mb]))
        logratio = dist.log_prob(b_actions[mb]) - b_logprobs[mb]
        ratio = logratio.exp()
        with torch.no_grad():
            kls.append(((ratio - 1) - logratio).mean().item())
            clipfracs.append(((ratio - 1).abs() > clip).float().mean().item())
        adv = b_advantages[mb]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
        v_loss = 0.5 * ((critic(b_obs[mb]).view(-1) - b_returns[mb]) ** 2).mean()
        loss = pg_loss - ent_coef * dist.entropy().mean() + vf_coef * v_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    return clipfracs, kls


clipfracs, kls = update()
print(f"clipfrac {np.mean(clipfracs):.4f} kl {np.mean(kls):.5f}")

# %% after
def update(micro=12):
    inds, clipfracs, kls = np.arange(64), [], []
    np.random.shuffle(inds)
    for start in range(0, 64, 32):
        mb = inds[start : start + 32]
        adv_mb = b_advantages[mb]
        adv_mb = (adv_mb - adv_mb.mean()) / (adv_mb.std() + 1e-8)
        optimizer.zero_grad()
        kl, clipped = 0.0, 0
        for k in range(0, 32, micro):
            some, adv = mb[k : k + micro], adv_mb[k : k + micro]
            dist = Categorical(logits=actor(b_obs[some]))
            logratio = dist.log_prob(b_actions[some]) - b_logprobs[some]
            ratio = logratio.exp()
            with torch.no_grad():
                kl += ((ratio - 1) - logratio).sum().item() / len(mb)
                clipped += ((ratio - 1).abs() > clip).sum().item()
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
            v_loss = 0.5 * ((critic(b_obs[some]).view(-1) - b_returns[some]) ** 2).mean()
            loss = pg_loss - ent_coef * dist.entropy().mean() + vf_coef * v_loss
            (loss * len(some) / len(mb)).backward()
        kls.append(kl)
        clipfracs.append(clipped / len(mb))
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    return clipfracs, kls


clipfracs, kls = update()
print(f"clipfrac {np.mean(clipfracs):.4f} kl {np.mean(kls):.5f}")
