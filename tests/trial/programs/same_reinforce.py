"""Returns of an episode are normalised over all its steps first; then the policy's loss is summed in parts."""

# %% setup
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

np.random.seed(16)
torch.manual_seed(16)
policy = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)


def rollout(steps=20):
    states, actions, rewards, state = [], [], [], np.random.randn(4).astype(np.float32)
    for _ in range(steps):
        with torch.no_grad():
            action = Categorical(logits=policy(torch.from_numpy(state))).sample()
        states.append(torch.from_numpy(state))
        actions.append(action)
        state = (0.9 * state + 0.1 * np.random.randn(4) + (0.1 if action else -0.1)).astype(np.float32)
        rewards.append(float(-abs(state[0])))
    return torch.stack(states), torch.stack(actions), rewards

# %% before
def finish_episode(states, actions, rewards, gamma=0.95):
    R, returns = 0.0, []
    for r in rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = (-Categorical(logits=policy(states)).log_prob(actions) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


policy_losses = [finish_episode(*rollout()) for episode in range(3)]

# %% after
def finish_episode(states, actions, rewards, gamma=0.95):
    R, returns = 0.0, []
    for r in rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    optimizer.zero_grad()
    total = 0.0
    for s, a, g in zip(states.split(6), actions.split(6), returns.split(6), strict=True):
        loss = (-Categorical(logits=policy(s)).log_prob(a) * g).sum()
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


policy_losses = [finish_episode(*rollout()) for episode in range(3)]
