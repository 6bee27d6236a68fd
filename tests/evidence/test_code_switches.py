"""Models that recompute their own layers, and lists of layers that are no blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.session import Cell, Cells


class Older(nn.Module):
    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        raise AssertionError("nothing is switched to find out")


class Newer(Older):
    def activation_checkpointing_enable(self, kwargs: Any = None, every_n_layers: int = 1) -> None:
        raise AssertionError("nothing is switched to find out")


class Without(Older):
    supports_gradient_checkpointing = False


class Around(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def read(module: nn.Module) -> ModelFacts:
    cells = Cells(history=(Cell(number=1, source="pass"),))
    return facts(cells, {"net": module}, (("net", module),), (), ()).models[0]


@pytest.mark.parametrize(
    ("module", "switches"),
    [
        (Older(), (("gradient_checkpointing_enable", False),)),
        (Newer(), (("activation_checkpointing_enable", True),)),
        (Without(), ()),
        (nn.Linear(2, 2), ()),
        (
            Around(nn.Linear(2, 2), Newer(), nn.Sequential(Older())),
            (
                ("parts.1.activation_checkpointing_enable", True),
                ("parts.2.0.gradient_checkpointing_enable", False),
            ),
        ),
    ],
)
def test_switches_of_the_outermost_modules_are_found(module: nn.Module, switches: tuple[Any, ...]) -> None:
    assert read(module).switches == switches


def test_an_inner_switch_is_turned_by_the_outer_one() -> None:
    outer = Newer()
    outer.inner = Older()  # type: ignore[assignment]
    assert read(outer).switches == (("activation_checkpointing_enable", True),)


@pytest.mark.parametrize(
    ("parts", "blocks"),
    [
        ((nn.Linear(2, 2), nn.Linear(2, 2)), ()),
        ((nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3)), ()),
        ((nn.LSTM(2, 2), nn.LSTM(2, 2)), ("parts",)),
        ((Without(), Without()), ("parts",)),
        ((nn.TransformerEncoderLayer(2, 1), nn.TransformerEncoderLayer(2, 1)), ("parts",)),
    ],
)
def test_single_layers_are_no_blocks(parts: tuple[nn.Module, ...], blocks: tuple[str, ...]) -> None:
    assert read(Around(*parts)).blocks == blocks


def test_hooks_and_what_a_forward_leaves_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert (read(model).hooked, read(model).leaves) == ((), ())
    model.register_forward_pre_hook(lambda *_: None)
    model[1][0].register_forward_hook(lambda *_: None)
    out = model(torch.ones(1, 2))
    model[1].aux, model[2].kept, model.seen = out.sum(), {"a": [1], "b": out}, [out.detach(), 3]
    found = read(model)
    assert found.hooked == ("", "1.0")
    assert found.leaves == ("1.aux", "2.kept")
    with pytest.warns(FutureWarning, match="deprecated"):
        normed = read(nn.utils.weight_norm(nn.Linear(2, 2)))
    assert (normed.hooked, normed.leaves) == ((), ())
