from __future__ import annotations

from typing import Any

import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.model.session import Cell, Cells

BUILD = "model = nn.Linear(4, 4)\noptimizer = torch.optim.Adam(model.parameters())\n"


def live(**more: Any) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    return {"torch": torch, "nn": nn, "model": model, "optimizer": optimizer, **more}


def stale(source: str, line: int | None, namespace: dict[str, Any] | None = None) -> tuple[tuple[str, bool], ...]:
    found = facts(Cells(history=(Cell(number=1, source=source),)), namespace or live(), line=line)
    return tuple((one.names[0], one.kind == "rebound") for one in found.sites.get("free_stale", ()))


def test_what_the_failing_line_is_about_to_replace() -> None:
    assert stale(BUILD, 1) == (("model", True), ("optimizer", True))
    assert stale("epochs = 3\n" + BUILD, 2) == (("model", True), ("optimizer", True))


def test_an_optimizer_and_a_scheduler_of_other_cells() -> None:
    namespace = live()
    namespace["schedule"] = torch.optim.lr_scheduler.StepLR(namespace["optimizer"], 1)
    assert stale("model = nn.Linear(4, 4)\n", 1, namespace) == (
        ("model", True),
        ("optimizer", False),
        ("schedule", False),
    )


def test_each_pass_of_a_loop() -> None:
    source = (
        "for width in (4, 8):\n    model = nn.Linear(4, width)\n    optimizer = torch.optim.Adam(model.parameters())\n"
    )
    assert stale(source, 2) == (("model", True), ("optimizer", True))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (BUILD, None),
        (BUILD + "out = model(x)\n", 3),
        ("out = model(x)\n" + BUILD, 1),
        ("if again:\n    model = nn.Linear(4, 4)\n", 2),
        ("model = nn.Linear(4, 4)\noptimizer.zero_grad()\n", 1),
        ("other = nn.Linear(4, 4)\n", 1),
        ("def build():\n    return nn.Linear(4, 4)\nmodel = build()\n", 2),
    ],
)
def test_what_is_new_already_or_still_needed_is_not_named(source: str, line: int | None) -> None:
    assert stale(source, line) == ()


@pytest.mark.parametrize("how", ["name", "list", "dict", "object", "weight", "wrapped"])
def test_what_something_else_keeps_alive_is_not_named(how: str) -> None:
    namespace = live()
    model = namespace["model"]
    holder = type("Trainer", (), {})()
    holder.model = model
    namespace["kept"] = {
        "name": model,
        "list": [model],
        "dict": {"best": (model, 0.1)},
        "object": holder,
        "weight": model.weight,
        "wrapped": nn.Sequential(model),
    }[how]
    assert stale(BUILD, 1, namespace) == ()
