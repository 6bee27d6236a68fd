"""Small programs as a notebook's cells, shared by the tests that run them in kernels."""

from __future__ import annotations

MODEL = """\
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=128, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""

DATA = """\
data = torch.utils.data.TensorDataset(torch.randn(512, 32, 128), torch.randint(0, 10, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True)
losses = []
"""

TRAIN = """\
for x, y in loader:
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""

PARAMETERS = "[p.detach().double().flatten().tolist() for p in model.parameters()]"
"""An expression: the parameters of the model, for ``Kernel.value``."""

BUDGET = "128MiB"
"""What TRAIN does not fit into, and its healed forms do."""
