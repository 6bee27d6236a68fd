"""Programs with a habit that fills the memory: what should not be there, or evaluation as if it were training."""

from __future__ import annotations

from typing import Final

from models.family import Family

__all__ = ["EVALUATION", "HISTORY", "PREDICTION", "RETAINED", "STATEFUL", "WIDE", "ZEROED"]

_IMPORTS: Final = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
"""

_NET: Final = """\
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 64)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
"""

EVALUATION: Final = Family(
    name="evaluation",
    size=800,
    templates=(
        _IMPORTS,
        """\
data = TensorDataset(torch.randn($samples, 16), torch.randint(0, 64, ($samples,)))
val_loader = DataLoader(data, batch_size=$size)
""",
        _NET,
        """\
def evaluate(model, loader):
    model.eval()
    losses, outputs = [], []
    for x, y in loader:
        logits = model(x)
        losses.append(F.cross_entropy(logits, y).item())
        outputs.append(logits)
    return losses, torch.cat(outputs)
""",
        """\
losses, outputs = evaluate(model, val_loader)
accuracy = (outputs.argmax(1) == data.tensors[1]).float().mean()
""",
    ),
)

HISTORY: Final = Family(
    name="history",
    size=500,
    results="history",
    templates=(
        _IMPORTS,
        _NET,
        """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn($size, 16), torch.randn($size, 64)
""",
        "history = []\n",
        """\
for step in range(5):
    out = model(x)
    loss = F.mse_loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    # how far off are we on noise
    val_loss = F.mse_loss(model(torch.randn_like(x)), y)
    history.append(val_loss)
""",
    ),
)

PREDICTION: Final = Family(
    name="prediction",
    size=4000,
    results="scores",
    templates=(
        _IMPORTS,
        "test_x = torch.randn($size, 16)\n",
        _NET,
        "model.eval()\n",
        """\
with torch.no_grad():
    predictions = model(test_x)

scores = predictions.softmax(dim=-1).max(dim=-1).values.tolist()
""",
    ),
)

RETAINED: Final = Family(
    name="retained",
    size=800,
    templates=(
        _IMPORTS,
        """\
train_set = TensorDataset(torch.randn($samples, 16), torch.randint(0, 64, ($samples,)))
train_loader = DataLoader(train_set, batch_size=$size, shuffle=True)
""",
        _NET,
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nlosses = []\n",
        """\
for inputs, labels in train_loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward(retain_graph=True)  # else: "Trying to backward through the graph a second time"
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)

STATEFUL: Final = Family(
    name="stateful",
    size=48,
    models=("rnn", "head"),
    templates=(
        _IMPORTS,
        """\
text = torch.randint(0, 40, ($size, 5 * 24 + 1))
rnn = nn.GRU(40, 64, batch_first=True)
head = nn.Linear(64, 40)
""",
        "losses = []\n",
        """\
# how well does it read on?
hidden = None
for start in range(0, text.size(1) - 1, 24):
    chunk = text[:, start : start + 25]
    out, hidden = rnn(F.one_hot(chunk[:, :-1], 40).float(), hidden)
    loss = F.cross_entropy(head(out).flatten(0, 1), chunk[:, 1:].flatten())
    losses.append(loss.item())
""",
    ),
)

WIDE: Final = Family(
    name="wide",
    size=6000,
    models=("ranker",),
    templates=(
        _IMPORTS,
        """\
# clicks: who looked at what, and whether they bought it
num_users, num_items, batch_size = $size, $size // 2, 64
users = torch.randint(0, num_users, (320,))
items = torch.randint(0, num_items, (320,))
bought = torch.randint(0, 2, (320,)).float()
clicks = DataLoader(TensorDataset(users, items, bought), batch_size=batch_size, shuffle=True)
""",
        """\
class Ranker(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(num_users, dim)
        self.item = nn.Embedding(num_items, dim)
        hidden = nn.Sequential(nn.Linear(2 * dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.score = nn.Sequential(hidden, nn.Linear(256, 1))

    def forward(self, user, item):
        return self.score(torch.cat([self.user(user), self.item(item)], dim=-1)).squeeze(-1)


ranker = Ranker()
optimizer = torch.optim.AdamW(ranker.parameters(), lr=1e-3, foreach=True)
losses = []
""",
        """\
for user, item, target in clicks:
    optimizer.zero_grad(set_to_none=False)
    loss = F.binary_cross_entropy_with_logits(ranker(user, item), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)

ZEROED: Final = Family(
    name="zeroed",
    size=700,
    share=0.9,  # the first step fits, the second does not
    templates=(
        _IMPORTS,
        """\
signal = torch.randn($samples, 8)
loader = DataLoader(TensorDataset(signal, signal.flip(1)), batch_size=$size, shuffle=True)
""",
        """\
width = 224
model = nn.Sequential(
    nn.Linear(8, width), nn.Tanh(),
    nn.Linear(width, width), nn.Tanh(),
    nn.Linear(width, width), nn.Tanh(),
    nn.Linear(width, width), nn.Tanh(),
    nn.Linear(width, width), nn.Tanh(),
    nn.Linear(width, 8),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
losses = []
""",
        """\
for noisy, clean in loader:
    loss = F.mse_loss(model(noisy), clean)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)
