"""Layers over a whole graph are recomputed in the backward pass; the nodes stay together."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(207)
edge_index = torch.randint(0, 40, (2, 160))
x, y, train_mask = torch.randn(40, 8), torch.randint(0, 4, (40,)), torch.rand(40) < 0.5


class SAGE(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.own, self.neigh = nn.Linear(cin, cout), nn.Linear(cin, cout)

    def forward(self, x, edge_index):
        src, dst = edge_index
        total = torch.zeros_like(x).index_add_(0, dst, x[src])
        degree = torch.bincount(dst, minlength=len(x)).clamp(min=1).unsqueeze(1)
        return self.own(x) + self.neigh(total / degree)


layers = nn.ModuleList([SAGE(8, 16), SAGE(16, 16), SAGE(16, 4)])
optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
best = 0.0

# %% before
for epoch in range(1, 4):
    optimizer.zero_grad()
    h = x
    for layer in layers[:-1]:
        h = F.dropout(F.relu(layer(h, edge_index)), 0.3)
    out = layers[-1](h, edge_index)
    loss = F.cross_entropy(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    acc = (out[~train_mask].argmax(1) == y[~train_mask]).float().mean().item()
    best = max(best, acc)
    print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Best: {best:.4f}")

# %% after
for epoch in range(1, 4):
    optimizer.zero_grad()
    h = x
    for layer in layers[:-1]:
        h = F.dropout(F.relu(checkpoint(layer, h, edge_index, use_reentrant=False)), 0.3)
    out = layers[-1](h, edge_index)
    loss = F.cross_entropy(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    acc = (out[~train_mask].argmax(1) == y[~train_mask]).float().mean().item()
    best = max(best, acc)
    print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Best: {best:.4f}")
