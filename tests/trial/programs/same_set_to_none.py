"""Gradients are dropped in place of being zeroed; every parameter gets one in each step, so it makes no difference."""

# %% setup
import torch
from torch import nn

torch.manual_seed(26)
model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(40, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
ids, y = torch.randint(0, 30, (3, 16, 5)), torch.randint(0, 4, (3, 16))

# %% before
for i, t in zip(ids, y):
    opt.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(model(i), t)
    loss.backward()
    opt.step()

# %% after
for i, t in zip(ids, y):
    opt.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(i), t)
    loss.backward()
    opt.step()
