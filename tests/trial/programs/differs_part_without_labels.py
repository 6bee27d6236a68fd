"""A part whose labels are all ignored has a mean of nothing, NaN, which weight nought does not mend. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(313)
ids = torch.randint(0, 12, (32, 5))
labels = ids.clone()
labels[torch.arange(32) % 16 < 4] = -100
lm = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12))
opt = torch.optim.SGD(lm.parameters(), lr=0.1)

# %% before
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = F.cross_entropy(lm(ids[i : i + 16]).transpose(1, 2), labels[i : i + 16])
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    counted = (labels[i : i + 16] != -100).sum()
    loss = torch.tensor(0.0)
    for j in range(i, i + 16, 4):
        part = F.cross_entropy(lm(ids[j : j + 4]).transpose(1, 2), labels[j : j + 4])
        part = part * (labels[j : j + 4] != -100).sum() / counted
        part.backward()
        loss = loss + part.detach()
    opt.step()
