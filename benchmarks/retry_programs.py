"""Five small training scripts, as text: what a user writes first, and the loop that runs out of memory.

The setup leaves the names ``model``, ``criterion``, ``optimizer``, ``dataset`` and ``batch_size``, and where a script
has them ``scheduler``, ``clip`` and ``shuffle``. Peers that bring a loop of their own take these; all others run the
text. Where each fails is shown by the benchmark's table, not said here: it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PROGRAMS", "Program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One script.

    Attributes:
        budget: memory of the virtual accelerator that it is run on.
        loop: reads ``batch_size`` from where it runs.
    """

    budget: str
    setup: str
    loop: str


_IMPORTS: Final = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
"""

_MLP: Final = Program(
    budget="56MiB",
    setup=_IMPORTS
    + """\
batch_size = 8000
features = torch.randn(6 * batch_size, 16)
dataset = TensorDataset(features, (features[:, 0] * features[:, 1] > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )
        self.head = nn.Linear(256, 2)

    def forward(self, x):
        return self.head(self.layers(x))


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    loop="""\
loader = DataLoader(dataset, batch_size=batch_size)
model.train()
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
)

_CNN: Final = Program(
    budget="56MiB",
    setup=_IMPORTS
    + """\
batch_size = 96
images = torch.randn(6 * batch_size, 3, 32, 32)
dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
""",
    loop=_MLP.loop,
)

_GPT: Final = Program(
    budget="90MiB",
    setup=_IMPORTS
    + """\
batch_size, length, words, width = 16, 64, 4096, 128
text = torch.randint(words, (6 * batch_size, length + 1))
dataset = TensorDataset(text[:, :-1], text[:, 1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    loop=_MLP.loop,
)

_SCHEDULED: Final = Program(
    budget="64MiB",
    setup="from torch.nn.utils.rnn import pad_sequence\n"
    + _IMPORTS
    + """\
batch_size, steps, clip = 32, 6, 1.0
lengths = torch.randint(40, 80, (steps * batch_size,))
lengths[4 * batch_size + 3] = 320  # one text is much longer than the others
dataset = [(torch.randint(1, 1000, (int(length),)), int(length) % 2) for length in lengths]


def collate(rows):
    return pad_sequence([tokens for tokens, _ in rows], batch_first=True), torch.tensor([label for _, label in rows])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 96)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(2)
        )
        self.head = nn.Linear(96, 2)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        is_word = (tokens > 0).unsqueeze(-1)
        return self.head((x * is_word).sum(1) / is_word.sum(1))


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
""",
    loop="""\
loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate)
model.train()
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
""",
)

_DROPOUT: Final = Program(
    budget="72MiB",
    setup=_IMPORTS
    + """\
batch_size, shuffle = 8000, True
features = torch.randn(6 * batch_size, 16)
dataset = TensorDataset(features, (features[:, 0] * features[:, 1] > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(256, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    loop="""\
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
model.train()
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
)

PROGRAMS: Final = {
    "MLP, SGD": _MLP,
    "CNN, BatchNorm, momentum": _CNN,
    "small GPT, AdamW": _GPT,
    "schedule, clipping, one long text": _SCHEDULED,
    "dropout, shuffled": _DROPOUT,
}
"""By what the table calls them."""
