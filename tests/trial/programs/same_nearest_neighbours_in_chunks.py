"""The nearest neighbours of queries are looked up for a few queries at a time, against the whole bank."""

# %% setup
import torch

torch.manual_seed(33)
bank, bank_labels = torch.randn(60, 8), torch.randint(0, 5, (60,))
queries, query_labels = torch.randn(40, 8), torch.randint(0, 5, (40,))

# %% before
dist = torch.cdist(queries, bank)
knn = dist.topk(5, largest=False).indices
votes = bank_labels[knn].mode(dim=1).values
top1 = (votes == query_labels).float().mean().item()
print("kNN top-1", round(top1, 4))

# %% after
pieces = [torch.cdist(q, bank) for q in queries.split(16)]
dist = torch.cat(pieces)
knn = torch.cat([d.topk(5, largest=False).indices for d in pieces])
votes = bank_labels[knn].mode(dim=1).values
top1 = (votes == query_labels).float().mean().item()
print("kNN top-1", round(top1, 4))
