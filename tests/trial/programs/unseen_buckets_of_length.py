"""Batches are bucketed by length, and the first ones need no padding. Not visible in the first two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(316)
lengths = [4] * 16 + [5] * 16 + sorted(torch.randint(6, 15, (32,)).tolist())
sentences = [torch.randint(1, 20, (n,)) for n in lengths]
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
opt = torch.optim.SGD(model.parameters(), lr=0.5)


def buckets():
    for i in range(0, 64, 16):
        yield pad_sequence(sentences[i : i + 16], batch_first=True)

# %% before
for ids in buckets():
    opt.zero_grad()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    opt.step()

# %% after
for ids in buckets():
    opt.zero_grad()
    loss = 0.0
    for part in ids.chunk(4):
        micro = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), ignore_index=0) / 4
        micro.backward()
        loss += micro.detach()
    opt.step()
