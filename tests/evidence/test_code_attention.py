"""What drops weights of attention, told by a setting of the model."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from observed import facts
from torch import nn

from oomdoctor.fixes.sdpa_attention import DROPS
from oomdoctor.model.session import Cell, Cells

ASKS = "model = AutoModel.from_pretrained('bert', attn_implementation='eager')"


def dropout(*sources: str, model: Any) -> str | None:
    history = tuple(Cell(number=n, source=textwrap.dedent(s)) for n, s in enumerate(sources, 1))
    found = facts(Cells(history=history), {"model": model}, [("model", model)], loaded=()).sites.get(
        "sdpa_attention", ()
    )
    return next((site.text for site in found if site.kind == DROPS), None)


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
