"""A decoder with teacher forcing by a coin per batch (random.random()) runs over parts after the coin is thrown."""

# %% setup
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(219)
torch.manual_seed(219)
features, captions = torch.randn(3, 16, 10), torch.randint(0, 15, (3, 16, 6))
init_h, embed, cell, fc = nn.Linear(10, 12), nn.Embedding(15, 8), nn.GRUCell(8, 12), nn.Linear(12, 15)
decoder = nn.ModuleList([init_h, embed, cell, fc])
opt = torch.optim.Adam(decoder.parameters(), lr=1e-2)
coins = []


def unroll(feature, caption, forced):
    h, token, steps = init_h(feature).tanh(), caption[:, 0], []
    for t in range(1, caption.size(1)):
        h = cell(embed(token), h)
        scores = fc(h)
        steps.append(scores)
        token = caption[:, t] if forced else scores.argmax(1)
    return torch.stack(steps, 1)

# %% before
for feature, caption in zip(features, captions):
    forced = random.random() < 0.5
    coins.append(forced)
    scores = unroll(feature, caption, forced)
    loss = F.cross_entropy(scores.reshape(-1, 15), caption[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for feature, caption in zip(features, captions):
    forced = random.random() < 0.5
    coins.append(forced)
    opt.zero_grad()
    pieces, loss = [], 0.0
    for rows in torch.arange(16).split(6):
        scores = unroll(feature[rows], caption[rows], forced)
        part = F.cross_entropy(scores.reshape(-1, 15), caption[rows, 1:].reshape(-1)) * len(rows) / 16
        part.backward()
        pieces.append(scores.detach())
        loss += part.detach()
    scores = torch.cat(pieces)
    opt.step()
