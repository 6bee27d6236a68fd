"""A model drops by a generator of its own; in parts, each part drops what the first rows should. Visible in one step."""

# %% setup
import numpy as np
import torch
import torch.nn as nn

from oomdoctor import in_parts

torch.manual_seed(88)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.drawn = nn.Linear(6, 2), [np.random.default_rng(4)]

    def forward(self, x):
        return self.layers(x * self.drawn[0].random())


model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(0, 2, (2, 16))

# %% before
for xb, yb in zip(x, y):
    opt.zero_grad()
    nn.functional.cross_entropy(model(xb), yb).backward()
    opt.step()

# %% after
for xb, yb in zip(x, y):
    opt.zero_grad()
    nn.functional.cross_entropy(in_parts(model, 2)(xb), yb).backward()
    opt.step()
