"""scaled_dot_product_attention takes the place of written-out attention, but the causal mask is lost. Visible in two steps."""

# %% setup
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(159)
qkv, proj = nn.Linear(8, 24), nn.Linear(8, 20)
emb = nn.Embedding(20, 8)
opt = torch.optim.SGD([*qkv.parameters(), *proj.parameters(), *emb.parameters()], lr=0.1)
text = torch.randint(0, 20, (2, 16, 7))
causal = torch.tril(torch.ones(6, 6)).bool()

# %% setup
def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return F.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1) @ v

# %% setup after
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

# %% before
for ids in text:
    q, k, v = qkv(emb(ids[:, :-1])).chunk(3, dim=-1)
    loss = F.cross_entropy(proj(attention(q, k, v)).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for ids in text:
    q, k, v = qkv(emb(ids[:, :-1])).chunk(3, dim=-1)
    loss = F.cross_entropy(proj(attention(q, k, v)).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
