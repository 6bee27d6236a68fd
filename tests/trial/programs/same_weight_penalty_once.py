"""A penalty on the weights is no mean over rows: it goes backward once, beside the parts of the data term."""

# %% setup
import torch
from torch import nn

torch.manual_seed(40)
model = nn.Sequential(nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
genes, outcome = torch.randn(2, 16, 30), torch.randn(2, 16, 1)
l1 = 1e-2

# %% before
for x, y in zip(genes, outcome):
    data_loss = nn.functional.mse_loss(model(x), y)
    penalty = sum(p.abs().sum() for p in model.parameters())
    loss = data_loss + l1 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{data_loss.item():.4f} {penalty.item():.4f}")

# %% after
for x, y in zip(genes, outcome):
    optimizer.zero_grad()
    data_loss = torch.tensor(0.0)
    for x_part, y_part in zip(x.chunk(4), y.chunk(4)):
        micro_loss = nn.functional.mse_loss(model(x_part), y_part) / 4
        micro_loss.backward()
        data_loss += micro_loss.detach()
    penalty = sum(p.abs().sum() for p in model.parameters())
    (l1 * penalty).backward()
    loss = data_loss + l1 * penalty.detach()
    optimizer.step()
    print(f"{data_loss.item():.4f} {penalty.item():.4f}")
