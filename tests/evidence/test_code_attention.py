"""What drops weights of attention, told by the layer that the attention calls or by a setting of the model."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.fixes.sdpa_attention import DROPS
from oomdoctor.model.session import Cell, Cells

CELL = """
    class Attention(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.drop = nn.Dropout(p)
            self.out_drop = nn.Dropout(0.1)

        def forward(self, x):
            w = (x @ x.transpose(-2, -1)).softmax(dim=-1)
            w = self.drop(w)
            return self.out_drop(w @ x)
"""
RUNS = "model = nn.Sequential(nn.Linear(2, 2), Attention(0.1))\ny = model(x)"
ASKS = "model = AutoModel.from_pretrained('bert', attn_implementation='eager')"


def dropout(*sources: str, model: Any) -> str | None:
    history = tuple(Cell(number=n, source=textwrap.dedent(s)) for n, s in enumerate(sources, 1))
    found = facts(Cells(history=history), {"model": model}, [("model", model)], loaded=()).sites.get(
        "sdpa_attention", ()
    )
    return next((site.text for site in found if site.kind == DROPS), None)


def made(cell: str, p: float = 0.1, name: str = "Attention") -> nn.Module:
    space: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(textwrap.dedent(cell), space)
    return nn.Sequential(nn.Linear(2, 2), space[name](p))


def test_a_layer_that_the_attention_gives_its_weights_to() -> None:
    assert dropout(CELL, RUNS, model=made(CELL)) == "model[1].drop"
    assert dropout(CELL, RUNS, model=made(CELL).eval()) is None
    assert dropout(CELL, RUNS, model=made(CELL, p=0.0)) is None
    frozen = made(CELL)
    frozen[1].drop.eval()  # type: ignore[index, union-attr, operator]
    assert dropout(CELL, RUNS, model=frozen) is None
    assert dropout(CELL, RUNS, model=nn.Sequential(nn.Dropout(0.5))) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.drop(w)", "w / 2"),
        ("w = self.drop(w)", "x = self.drop(x)"),
        (".softmax(dim=-1)", ".tanh()"),
    ],
)
def test_other_layers_are_none(old: str, new: str) -> None:
    assert dropout(CELL.replace(old, new), RUNS, model=made(CELL)) is None


def test_another_layer_of_the_same_name_is_none() -> None:
    other = CELL + "\n    class Other(Attention):\n        def forward(self, x):\n            return self.drop(x)\n"
    assert dropout(other, RUNS.replace("Attention", "Other"), model=made(other, name="Other")) is None


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"attention_dropout": 0.1}, "model.config.attention_dropout"),
        ({"hidden_dropout_prob": 0.1, "attn_pdrop": 0.2}, "model.config.attn_pdrop"),
        ({"attention_dropout": 0.0, "hidden_dropout_prob": 0.1}, None),
        ({"attention_dropout": True}, None),
    ],
)
def test_a_setting_of_a_model_that_is_asked_for_eager_attention(settings: dict[str, Any], found: str | None) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**settings)
    assert dropout(ASKS, "y = model(x)", model=model) == found
    assert dropout(ASKS.replace("eager", "sdpa"), "y = model(x)", model=model) is None
    assert dropout(ASKS, "y = model(x)", model=model.eval()) is None
