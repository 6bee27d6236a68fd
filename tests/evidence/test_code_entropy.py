"""Where a cross-entropy is taken, and over how many classes."""

from __future__ import annotations

from typing import Any

import pytest
from observed import facts
from torch import nn

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.session import Cell, Cells


def read(*sources: str, **namespace: Any) -> CodeFacts:
    cells = Cells(history=tuple(Cell(number=number, source=text) for number, text in enumerate(sources, 1)))
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    return facts(cells, namespace, modules, loaded=())


def places(*sources: str, **namespace: Any) -> tuple[tuple[Any, ...], ...]:
    """Return where a cross-entropy is taken, what is called there, and what that stands for."""
    found = read(*sources, **namespace).sites.get("chunked_loss", ())
    return tuple((site.cell, site.line, *site.names) for site in found)


NET = """\
class Net(nn.Module):
    def forward(self, x, y):
        return F.cross_entropy(self.head(x), y)
"""


def test_places_by_name_by_object_and_in_a_method() -> None:
    loop = (
        "net = Net()\nfor x, y in loader:\n    loss = criterion(net(x), y) + torch.nn.functional.cross_entropy(a, b)\n"
    )
    found = places(NET, loop, criterion=nn.CrossEntropyLoss())
    assert found == (
        (1, 3, "F.cross_entropy", "F.cross_entropy", "forward"),
        (2, 3, "criterion", "criterion"),
        (2, 3, "torch.nn.functional.cross_entropy", "torch.nn.functional.cross_entropy"),
    )


def test_a_parameter_stands_for_the_loss_that_it_is_given() -> None:
    function = "def step(x, y, loss_fn):\n    return loss_fn(model(x), y)\n"
    assert places(function, "step(a, b, criterion)", criterion=nn.CrossEntropyLoss()) == (
        (1, 2, "loss_fn", "criterion"),
    )


@pytest.mark.parametrize("source", ["loss = criterion(model(x), y)", "loss = F.binary_cross_entropy(a, b)", "x = 1"])
def test_other_losses_are_none(source) -> None:
    assert places(source, criterion=nn.MSELoss()) == ()


def test_other_experiments_are_not_this_one() -> None:
    assert places("def other():\n    return F.cross_entropy(a, b)", "x = model(y)") == ()


def test_classes_are_outputs_of_the_last_layer_and_rows_of_embeddings_as_wide() -> None:
    tied = nn.Sequential(nn.Embedding(70, 16), nn.Embedding(32, 8), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 16))
    assert read("x = 1", model=tied, other=nn.Conv2d(1, 2, 3)).classes == (16, 70)
    assert read("x = 1", model=nn.Embedding(70, 16)).classes == (70,)
    assert read("x = 1").classes == ()


def test_positions_and_words_that_are_only_read_are_no_classes() -> None:
    model = nn.Sequential(nn.Embedding(1000, 32), nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 1000))
    assert read("x = 1", model=model).classes == (1000,)
