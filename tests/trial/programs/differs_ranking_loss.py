"""A pairwise ranking loss orders all rows of the batch against each other. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(134)
ranker = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 1))
opt = torch.optim.SGD(ranker.parameters(), lr=0.1)
docs, relevance = torch.randn(2, 16, 9), torch.randint(0, 5, (2, 16)).float()


def ranknet(scores, rel):
    higher = rel[:, None] > rel[None, :]
    gaps = scores[:, None] - scores[None, :]
    return F.softplus(-gaps[higher]).mean()

# %% before
for d, r in zip(docs, relevance):
    opt.zero_grad()
    loss = ranknet(ranker(d).squeeze(1), r)
    loss.backward()
    opt.step()

# %% after
for d, r in zip(docs, relevance):
    opt.zero_grad()
    loss = 0.0
    for dp, rp in zip(d.chunk(2), r.chunk(2)):
        part = ranknet(ranker(dp).squeeze(1), rp) / 2
        part.backward()
        loss += part.detach()
    opt.step()
