"""An expert takes eight rows at most, which few rows never reach. Not visible in 16 rows; the batch has 64."""

# %% setup
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(319)


class Experts(nn.Module):
    def __init__(self, capacity=10):
        super().__init__()
        self.gate, self.capacity = nn.Linear(6, 4), capacity
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weight, choice = self.gate(x).softmax(1).max(1)
        out = x.clone()
        for k, expert in enumerate(self.experts):
            rows = (choice == k).nonzero().flatten()[: self.capacity]
            out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return out


model = nn.Sequential(Experts(), nn.Linear(6, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(128, 6), torch.randint(0, 3, (128,))), batch_size=64)

# %% before
for xb, yb in loader:
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    opt.step()

# %% after
for xb, yb in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(xb.chunk(8), yb.chunk(8)):
        part = nn.functional.cross_entropy(model(xp), yp) / 8
        part.backward()
        loss += part.detach()
    opt.step()
