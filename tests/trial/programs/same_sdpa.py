"""Attention that is written out in an earlier cell (scaled, causal, no dropout) becomes scaled_dot_product_attention."""

# %% setup
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
data = torch.randint(0, 30, (3, 16, 10))

# %% setup
class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd=16, n_head=4, block_size=10):
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


model = nn.Sequential(nn.Embedding(30, 16), CausalSelfAttention(), nn.LayerNorm(16), nn.Linear(16, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% setup after
class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd=16, n_head=4, block_size=10):
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


model = nn.Sequential(nn.Embedding(30, 16), CausalSelfAttention(), nn.LayerNorm(16), nn.Linear(16, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% before
for ids in data:
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% after
for ids in data:
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
