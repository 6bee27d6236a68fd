"""A mixture of experts routes each token by itself, with no capacity and no balancing loss; parts change nothing."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)


class MoE(nn.Module):
    def __init__(self, dim=12, experts=4, k=2):
        super().__init__()
        self.k, self.gate = k, nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim)) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.k, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return x + out


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe, self.head = MoE(), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.moe(x))


x, y = torch.randn(48, 12), torch.randint(0, 3, (48,))
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% before
def train(batch_size=24):
    for s in range(0, len(x), batch_size):
        xb, yb = x[s : s + batch_size], y[s : s + batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        yield loss.item()


trace = list(train())

# %% after
def train(batch_size=24):
    for s in range(0, len(x), batch_size):
        xb, yb = x[s : s + batch_size], y[s : s + batch_size]
        optimizer.zero_grad()
        total = 0.0
        for part in range(0, len(xb), 9):
            xp, yp = xb[part : part + 9], yb[part : part + 9]
            loss = F.cross_entropy(model(xp), yp) * (len(xp) / len(xb))
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


trace = list(train())
