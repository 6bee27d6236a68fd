"""With tied embeddings, logits and loss are made for chunks of tokens and recomputed; the sum is divided once."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)


class TinyLM(nn.Module):
    def __init__(self, vocab=60, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.mix(self.wte(ids))[0]


lm = TinyLM()
optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
text = torch.randint(0, 60, (3, 16, 11))

# %% before
def lm_loss(ids):
    logits = lm.lm_head(lm(ids[:, :-1]))
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))


for ids in text:
    loss = lm_loss(ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"ppl {loss.exp().item():.3f}")

# %% after
from torch.utils.checkpoint import checkpoint


def chunk_loss(hidden, targets):
    return F.cross_entropy(lm.lm_head(hidden), targets, reduction="sum")


def lm_loss(ids):
    hidden, targets = lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].reshape(-1)
    sums = [checkpoint(chunk_loss, h, t, use_reentrant=False) for h, t in zip(hidden.split(48), targets.split(48))]
    return torch.stack(sums).sum() / len(targets)


for ids in text:
    loss = lm_loss(ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"ppl {loss.exp().item():.3f}")
