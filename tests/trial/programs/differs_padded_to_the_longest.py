"""Sentences are padded to the longest of their batch, and the mean over time counts the padding. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(216)
texts = [(torch.randint(1, 30, (int(n),)), int(n) % 2) for n in torch.randint(2, 15, (32,))]
emb, clf = nn.Embedding(30, 8), nn.Linear(8, 2)
opt = torch.optim.SGD([*emb.parameters(), *clf.parameters()], lr=0.5)


def collate(rows):
    return pad_sequence([t for t, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])

# %% before
for i in range(0, 32, 16):
    words, sentiment = collate(texts[i : i + 16])
    opt.zero_grad()
    loss = nn.functional.cross_entropy(clf(emb(words).mean(1)), sentiment)
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    words, sentiment = collate(texts[i : i + 16])
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        some_words, some_sentiment = collate(texts[j : j + 4])
        part = nn.functional.cross_entropy(clf(emb(some_words).mean(1)), some_sentiment) / 4
        part.backward()
        loss += part.detach()
    opt.step()
