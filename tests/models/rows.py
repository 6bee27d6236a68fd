"""An MLP on rows of numbers."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["MLP"]

MLP: Final = Family(
    name="mlp",
    size=2000,
    templates=(
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
""",
        """\
BATCH_SIZE = $size

features = torch.randn($samples - 77, 16)
targets = (features.sum(1) > 0).long() + 2 * (features[:, 0] > 0).long()
train_loader = DataLoader(TensorDataset(features, targets), batch_size=BATCH_SIZE, shuffle=True)
""",
        """\
class MLP(nn.Module):
    def __init__(self, n_in=16, n_hidden=64, n_out=4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_in, n_hidden),
            nn.LayerNorm(n_hidden),
            nn.GELU(),
            nn.Linear(n_hidden, n_hidden),
            nn.LayerNorm(n_hidden),
            nn.GELU(),
            nn.Linear(n_hidden, n_hidden),
            nn.LayerNorm(n_hidden),
            nn.GELU(),
            nn.Linear(n_hidden, n_out),
        )

    def forward(self, x):
        return self.layers(x)


model = MLP()
""",
        """\
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
""",
        """\
model.train()
for x, y in train_loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())  # for the plot below
""",
    ),
)
