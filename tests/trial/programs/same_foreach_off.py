"""Adam steps through the parameters one by one (foreach=False), as it does by itself on the CPU."""

# %% setup
import torch
from torch import nn

torch.manual_seed(28)
model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
src, tgt = torch.randn(16, 5, 8), torch.randn(16, 4, 8)

# %% before
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for step in range(2):
    optimizer.zero_grad()
    loss = ((model(src, tgt[:, :-1]) - tgt[:, 1:]) ** 2).mean()
    loss.backward()
    optimizer.step()
final = loss.item()

# %% after
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for step in range(2):
    optimizer.zero_grad()
    loss = ((model(src, tgt[:, :-1]) - tgt[:, 1:]) ** 2).mean()
    loss.backward()
    optimizer.step()
final = loss.item()
