"""A block drops by a generator of its own; recomputed, it drops others than in its forward. Visible in one step."""

# %% setup
import torch
import torch.nn as nn

from oomdoctor import recompute

torch.manual_seed(87)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drawn = nn.Linear(6, 6), torch.Generator().manual_seed(4)

    def forward(self, x):
        kept = torch.rand(x.shape, generator=self.drawn) > 0.3
        return torch.tanh(self.layer(x * kept))


model = nn.Sequential(Block(), Block(), nn.Linear(6, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 2, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    nn.functional.cross_entropy(model(xb), yb).backward()
    opt.step()

# %% after
recompute(model, "0", "1")
for xb, yb in zip(x, y):
    opt.zero_grad()
    nn.functional.cross_entropy(model(xb), yb).backward()
    opt.step()
