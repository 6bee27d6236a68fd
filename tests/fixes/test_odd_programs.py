"""Programs with habits that a fix could trip over: it keeps its promise on them, or says why it is not made.

Each is a small family of its own, run to a real failure and checked as ``promises`` checks every fix.
"""

from __future__ import annotations

from typing import Final

import pytest
from models import Family
from promises import check
from settings import DEFAULT, SETTINGS

from oomdoctor import fixes

_IMPORTS: Final = """\
import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
losses = []
"""
_DATA: Final = "x, y = torch.randn($size, 32), torch.randint(0, 64, ($size,))\n"
_BLOCK: Final = """\
class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(x))
"""
_NET: Final = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
_LOOP: Final = """\
for step in range(5):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
_SPECTRAL: Final = _BLOCK.replace(
    "nn.Linear(width, width)", "nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))"
)
_SKIPPING: Final = _BLOCK.replace(
    "        return x", "        if random.random() < 0.3:\n            return x\n        return x"
)
_IN_PLACE: Final = _BLOCK.replace("return x + F.gelu(self.linear(x))", "return x.add_(F.gelu(self.linear(x.clone())))")
_OWN_NORM: Final = """\
class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        return x + F.gelu(F.batch_norm(self.linear(x), self.mean, self.var, training=self.training))
"""
_MAML: Final = """\
from torch.func import functional_call

for step in range(5):
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(functional_call(model, weights, (x,)), y)
    grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads)}
    loss = F.cross_entropy(functional_call(model, fast, (x,)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
_AVERAGED: Final = """\
ema = None
for step in range(5):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    ema = ema or copy.deepcopy(model).requires_grad_(False)
    for p, q in zip(model.parameters(), ema.parameters()):
        q.lerp_(p.detach(), 0.1)
    losses.append((loss.item(), F.cross_entropy(ema(x), y).item()))
"""
_MOVING: Final = (
    _NET.replace("32", "256").replace("lr=1e-3", "lr=1e-3, foreach=True")
    + """\
ema = copy.deepcopy(model).requires_grad_(False)
"""
)
_BETWEEN: Final = _LOOP.replace(
    "    optimizer.step()\n",
    """\
    with torch.no_grad():
        for p, q in zip(model.parameters(), ema.parameters()):
            q.lerp_(p, 0.1)
    optimizer.step()
""",
)


def _family(name: str, *cells: str, size: int = 1200, models: tuple[str, ...] = ("model",)) -> Family:
    return Family(name=name, size=size, templates=(_IMPORTS, *cells), models=models)


_SPECTRAL_NORM: Final = _family("spectral_norm", _DATA, _SPECTRAL + _NET, _LOOP)
_OWN_STATISTICS: Final = _family("own_statistics", _DATA, _OWN_NORM + _NET, _LOOP)
_FAST_WEIGHTS: Final = _family("fast_weights", _DATA, _BLOCK + _NET, _MAML, size=600)
_COPIED: Final = _family("copied", _DATA, _BLOCK + _NET, _AVERAGED, models=("model", "ema"))


@pytest.mark.parametrize(
    ("fix_id", "family", "forms", "why"),
    [
        ("checkpoint_blocks", _SPECTRAL_NORM, (), "which would then happen twice"),
        ("checkpoint_blocks", _OWN_STATISTICS, ("patch",), ""),
        ("chunked_forward", _OWN_STATISTICS, (), "differs by"),
        (
            "checkpoint_blocks",
            _family("stochastic_depth", _DATA, _SKIPPING + _NET, _LOOP),
            (),
            "changes Python's or NumPy's random numbers",
        ),
        (
            "checkpoint_blocks",
            _family(
                "in_place", _DATA, _IN_PLACE + _NET.replace("(self, x):\n", "(self, x):\n        x = x * 2\n"), _LOOP
            ),
            (),
            "changes its input in place",
        ),
        ("checkpoint_blocks", _FAST_WEIGHTS, (), "no longer those that its forward ran with"),
        ("chunked_forward", _FAST_WEIGHTS, (), "no call of a model was found"),
        ("checkpoint_blocks", _COPIED, ("patch",), ""),
        ("autocast", _COPIED, ("patch",), ""),
        ("chunked_forward", _COPIED, ("patch",), ""),
        (
            "optimizer_in_backward",
            _family(
                *("moving_average", _DATA.replace("32", "256"), _BLOCK.replace("32", "256") + _MOVING, _BETWEEN),
                size=64,
                models=("model", "ema"),
            ),
            (),
            "the trial: ",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else None,
)
def test_promises_are_kept_or_not_made(fix_id: str, family: Family, forms: tuple[str, ...], why: str) -> None:
    outcome = check(fixes.get(fix_id), family, SETTINGS.get(fix_id, DEFAULT))
    assert outcome.forms == forms, outcome.refusals
    assert any(why in reason for reason in (*outcome.refusals, "")), outcome.refusals
