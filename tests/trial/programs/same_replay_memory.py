"""DQN samples its transitions from a deque by random.sample once a step; the sampled batch is learnt from in parts."""

# %% setup
import copy
import random
from collections import deque

import torch
import torch.nn as nn

random.seed(212)
torch.manual_seed(212)
memory = deque(maxlen=100)
for _ in range(80):
    memory.append((torch.randn(4), random.randrange(2), random.random(), torch.randn(4), random.random() < 0.1))
policy_net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
target_net = copy.deepcopy(policy_net)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
GAMMA, TAU, eps = 0.99, 0.05, 1.0

# %% before
def optimize_model(batch_size=24):
    s, a, r, s2, done = zip(*random.sample(memory, batch_size))
    s, a, r, s2, done = torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(s2), torch.tensor(done).float()
    q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        target = r + GAMMA * (1 - done) * target_net(s2).max(1).values
    loss = nn.functional.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target_net.parameters(), policy_net.parameters()):
            slow.mul_(1 - TAU).add_(fast, alpha=TAU)
    return loss.item()


td_losses = []
for i_step in range(3):
    memory.append((torch.randn(4), random.randrange(2), random.random(), torch.randn(4), False))
    td_losses.append(optimize_model())
    eps *= 0.9

# %% after
def optimize_model(batch_size=24, micro=7):
    transitions = random.sample(memory, batch_size)
    optimizer.zero_grad()
    total = 0.0
    for k in range(0, batch_size, micro):
        some = transitions[k : k + micro]
        s, a, r, s2, done = zip(*some)
        s, a, r, s2, done = torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(s2), torch.tensor(done).float()
        q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            target = r + GAMMA * (1 - done) * target_net(s2).max(1).values
        loss = nn.functional.smooth_l1_loss(q, target) * len(some) / batch_size
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target_net.parameters(), policy_net.parameters()):
            slow.mul_(1 - TAU).add_(fast, alpha=TAU)
    return total


td_losses = []
for i_step in range(3):
    memory.append((torch.randn(4), random.randrange(2), random.random(), torch.randn(4), False))
    td_losses.append(optimize_model())
    eps *= 0.9
