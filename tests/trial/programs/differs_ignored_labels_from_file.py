"""Labels from a file are -100 unevenly over the rows, so a mean of parts weighted by rows is another. Visible in two steps."""

# %% setup
import torch

torch.manual_seed(101)
labels = torch.randint(0, 9, (32, 8))
for row in range(32):
    labels[row, : row % 8] = -100
torch.save({"ids": torch.randint(0, 30, (32, 8)), "labels": labels}, "corpus.pt")

# %% setup
import torch.nn as nn
import torch.nn.functional as F

corpus = torch.load("corpus.pt", weights_only=True)
tagger = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 9))
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.5)
log = []

# %% before
def run_epoch(bs=16):
    for i in range(0, 32, bs):
        ids, gold = corpus["ids"][i : i + bs], corpus["labels"][i : i + bs]
        scores = tagger(ids)
        loss = F.cross_entropy(scores.transpose(1, 2), gold)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())


run_epoch()

# %% after
def run_epoch(bs=16):
    for i in range(0, 32, bs):
        ids, gold = corpus["ids"][i : i + bs], corpus["labels"][i : i + bs]
        optimizer.zero_grad()
        total = 0.0
        for ids_part, gold_part in zip(ids.split(4), gold.split(4)):
            scores = tagger(ids_part)
            loss = F.cross_entropy(scores.transpose(1, 2), gold_part) * (len(ids_part) / len(ids))
            loss.backward()
            total += loss.item()
        optimizer.step()
        log.append(total)


run_epoch()
