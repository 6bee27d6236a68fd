"""What is printed beside a number a million times as large is of the last part alone. Visible after one step."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(20, 8), torch.randint(0, 3, (20,))) for _ in range(4)]

# %% before
def train():
    for x, y in batches:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        spread = out.square().mean()
        loss.backward()
        optimizer.step()
        print(f"images {1281167}, spread {spread.item():.4f}")


train()

# %% after
def train():
    for x, y in batches:
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
            out = model(micro_x)
            loss = F.cross_entropy(out, micro_y) * (len(micro_x) / len(x))
            spread = out.square().mean()
            loss.backward()
        optimizer.step()
        print(f"images {1281167}, spread {spread.item():.4f}")


train()
