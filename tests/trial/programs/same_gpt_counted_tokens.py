"""A small GPT's loss skips padding; each part is weighted by its count of tokens that are not padding."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
vocab, block = 24, 12


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(block, block)).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / (C // self.heads) ** 0.5
        att = F.softmax(att.masked_fill(~self.mask[:T, :T], float("-inf")), dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(B, T, C))


class GPT(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.ln, self.attn = nn.LayerNorm(dim), Attention(dim, 2)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        logits = self.head(x + self.attn(self.ln(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1), ignore_index=-1)
        return logits, loss


tokens = torch.randint(0, vocab, (48, block + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
for row, length in enumerate(torch.randint(2, block, (48,))):
    targets[row, length:] = -1
gpt = GPT()
optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.1)
history = []

# %% before
for start in range(0, len(inputs), 16):
    xb, yb = inputs[start : start + 16], targets[start : start + 16]
    logits, loss = gpt(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    history.append(loss.item())
print(history)

# %% after
for start in range(0, len(inputs), 16):
    xb, yb = inputs[start : start + 16], targets[start : start + 16]
    optimizer.zero_grad(set_to_none=True)
    counted = (yb != -1).sum()
    pieces, loss = [], 0.0
    for xp, yp in zip(xb.chunk(4), yb.chunk(4), strict=True):
        logits, part_loss = gpt(xp, yp)
        part_loss = part_loss * ((yp != -1).sum() / counted)
        part_loss.backward()
        pieces.append(logits.detach())
        loss += part_loss.detach()
    logits = torch.cat(pieces)
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    history.append(loss.item())
print(history)
