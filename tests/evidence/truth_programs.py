"""Programs as the cells of a notebook hold them, each with what its writer knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from truth import LEFT_OVER

from oomdoctor.model.memory import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A notebook, and what its writer knows of it.

    Attributes:
        cells: source texts; the last one trains.
        middle: module whose forward is looked into, as an expression; ``call``: which of its calls in a step, from 0.
        models, optimizers: names; the last optimizer ends the step.
        batch: names of what the loop draws, wherever they are bound.
        has_cache: whether the model keeps keys and values in a cache of transformers' kind.
        kept: name of a list of tensors with their graphs; ``values``: of one of tensors without graphs.
        old: roles that are right for what an earlier step left and no name above leads to.
    """

    name: str
    cells: tuple[str, ...]
    middle: str
    call: int = 0
    models: tuple[str, ...] = ("model",)
    optimizers: tuple[str, ...] = ("optimizer",)
    batch: tuple[str, ...] = ("x", "y")
    has_cache: bool = False
    kept: str | None = None
    values: str | None = None
    old: frozenset[Role] = LEFT_OVER


IMPORTS: Final = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\ntorch.manual_seed(0)"
OPTIMIZER: Final = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"

AT_THE_TOP: Final = """\
for x, y in batches():
    optimizer.zero_grad()
    output = model(x)
    loss = F.mse_loss(output, y)
    loss.backward()
    optimizer.step()
"""
STEP_FUNCTION: Final = """\
def train_step(x, y):
    output = model(x)
    loss = criterion(output, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

criterion = nn.MSELoss()
"""
CALLS: Final = """\
losses = []
for x, y in batches():
    losses.append(train_step(x, y))
"""
LOOP_FUNCTION: Final = """\
def train(steps):
    for x, y in batches(steps):
        output = model(x)
        loss = F.mse_loss(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def batches(x: str, y: str) -> str:
    return f"def batches(steps=3):\n    for _ in range(steps):\n        yield {x}, {y}\n"


MLP: Final = Program(
    name="mlp",
    cells=(
        IMPORTS,
        "model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))",
        OPTIMIZER,
        batches("torch.randn(512, 128)", "torch.randn(512, 128)"),
        AT_THE_TOP,
    ),
    middle="model[2]",
)

CONV: Final = Program(
    name="conv_batchnorm",
    cells=(
        IMPORTS,
        """\
class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm = nn.BatchNorm2d(outer)

    def forward(self, x):
        out = self.convolution(x)
        out = self.norm(out)
        return F.relu(out) + x.mean()

model = nn.Sequential(Block(3, 16), Block(16, 16), nn.Sequential(Block(16, 8), nn.BatchNorm2d(8)))
""",
        OPTIMIZER,
        batches("torch.randn(8, 3, 32, 32)", "torch.randn(8, 8, 32, 32)"),
        STEP_FUNCTION,
        CALLS,
    ),
    middle="model[1].norm",
)

LSTM: Final = Program(
    name="lstm",
    cells=(
        IMPORTS,
        """\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 32)

    def forward(self, x):
        hidden, (state, cell) = self.rnn(x)
        return self.head(hidden)

model = Tagger()
""",
        OPTIMIZER,
        batches("torch.randn(32, 40, 64)", "torch.randn(32, 40, 32)"),
        LOOP_FUNCTION,
        "train(3)",
    ),
    middle="model.rnn",
)

TRANSFORMER: Final = Program(
    name="transformer_encoder_layer",
    cells=(
        IMPORTS,
        "model = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)",
        OPTIMIZER,
        batches("torch.randn(16, 48, 64)", "torch.randn(16, 48, 64)"),
        AT_THE_TOP,
    ),
    middle="model.linear1",
)

GELU: Final = Program(
    name="gelu_dropout",
    cells=(
        IMPORTS,
        """\
def block(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))

model = nn.Sequential(block(128), block(128))
""",
        OPTIMIZER,
        batches("torch.randn(512, 128)", "torch.randn(512, 128)"),
        STEP_FUNCTION,
        CALLS,
    ),
    middle="model[1][1]",
)

GPT2: Final = Program(
    name="gpt2",
    cells=(
        f"{IMPORTS}\nfrom transformers import GPT2Config, GPT2LMHeadModel",
        """\
config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=128, vocab_size=512)
model = GPT2LMHeadModel(config)
model.train()
""",
        OPTIMIZER,
        "def batches():\n    for _ in range(3):\n        yield {'input_ids': torch.randint(0, 512, (8, 96))}\n",
        """\
def train_step(batch):
    output = model(**batch, labels=batch["input_ids"])
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    return output.loss.item()
""",
        "for batch in batches():\n    train_step(batch)\n",
    ),
    middle="model.transformer.h[1].mlp",
    batch=("batch",),
    has_cache=True,
)

CHECKPOINTED_CLASS: Final = """\
from torch.utils.checkpoint import checkpoint

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(128, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant={reentrant})
        return x

model = Deep()
"""

CHECKPOINTED: Final = Program(
    name="checkpointed",
    cells=(
        IMPORTS,
        CHECKPOINTED_CLASS.format(reentrant=False),
        OPTIMIZER,
        batches("torch.randn(512, 128)", "torch.randn(512, 128)"),
        STEP_FUNCTION,
        CALLS,
    ),
    middle="model.layers[2]",
)

REENTRANT: Final = Program(
    name="checkpointed_reentrant",
    cells=(
        IMPORTS,
        CHECKPOINTED_CLASS.format(reentrant=True),
        OPTIMIZER,
        batches("torch.randn(512, 128)", "torch.randn(512, 128)"),
        AT_THE_TOP,
    ),
    middle="model.layers[2]",
)

SAVED_ON_CPU: Final = Program(
    name="save_on_cpu",
    cells=(
        IMPORTS,
        """\
class Offloaded(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.inner(x)

model = Offloaded(nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 128)))
""",
        OPTIMIZER,
        batches("torch.randn(512, 128)", "torch.randn(512, 128)"),
        STEP_FUNCTION,
        CALLS,
    ),
    middle="model.inner[3]",
)

GAN: Final = Program(
    name="gan",
    cells=(
        IMPORTS,
        """\
generator = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256))
discriminator = nn.Sequential(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
""",
        """\
generator_optimizer = torch.optim.AdamW(generator.parameters())
discriminator_optimizer = torch.optim.AdamW(discriminator.parameters())
""",
        "def batches():\n    for _ in range(3):\n        yield torch.randn(512, 256)\n",
        """\
for real in batches():
    noise = torch.randn(512, 8)
    fake = generator(noise)
    discriminator_optimizer.zero_grad()
    judged_real, judged_fake = discriminator(real), discriminator(fake.detach())
    discriminator_loss = F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()
    discriminator_loss.backward()
    discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    generator_loss = F.softplus(-discriminator(fake)).mean()
    generator_loss.backward()
    generator_optimizer.step()
""",
    ),
    middle="discriminator[1]",
    call=2,
    models=("generator", "discriminator"),
    optimizers=("discriminator_optimizer", "generator_optimizer"),
    batch=("real",),
)

TIED: Final = Program(
    name="tied_weights_shared_buffers",
    cells=(
        IMPORTS,
        """\
class Tied(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.embed = nn.Embedding(1024, 128)
        self.register_buffer("mask", mask)
        self.again = nn.Linear(128, 128)
        self.again.register_buffer("mask", mask)
        self.again.register_buffer("last_row", mask[-1], persistent=False)
        self.head = nn.Linear(128, 1024, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = torch.tanh(self.again(self.embed(x)))
        return self.head(hidden * self.again.last_row)

model = Tied(torch.ones(256, 128))
""",
        OPTIMIZER,
        batches("torch.randint(0, 1024, (512,))", "torch.randint(0, 1024, (512,))"),
        STEP_FUNCTION.replace("nn.MSELoss()", "nn.CrossEntropyLoss()"),
        CALLS,
    ),
    middle="model.again",
)

HISTORY: Final = Program(
    name="history",
    cells=(
        IMPORTS,
        "model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))",
        OPTIMIZER,
        batches("torch.randn(256, 128)", "torch.randn(256, 128)"),
        STEP_FUNCTION,
        """\
def validate(inputs):
    history.append(model(inputs).square().mean())
    predictions.append(model(inputs).detach())

history, predictions = [], []
""",
        """\
for x, y in batches(4):
    train_step(x, y)
    validate(torch.randn(256, 128))
""",
    ),
    middle="model[1]",
    batch=("x", "y", "inputs"),
    kept="history",
    values="predictions",
    old=frozenset({Role.GRAPH_KEPT_ALIVE}),
)

PROGRAMS: Final = {
    program.name: program
    for program in (
        *(MLP, CONV, LSTM, TRANSFORMER, GELU, GPT2),
        *(CHECKPOINTED, REENTRANT, SAVED_ON_CPU, GAN, TIED, HISTORY),
    )
}
