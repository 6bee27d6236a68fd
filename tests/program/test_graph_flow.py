"""Which names carry a graph behind a piece of code, and which statements keep one, held against torch where it runs."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch import nn

from oomdoctor.model.session import Cell, Cells
from oomdoctor.program.dataflow import Flow
from oomdoctor.program.definitions import read
from oomdoctor.program.kept_tensors import history_appends

SURE = Flow(makes=lambda call: ast.unparse(call.func) == "model")


def has_graph(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    return isinstance(value, list | tuple) and any(map(has_graph, value))


@pytest.mark.parametrize(
    "source",
    [
        "a = model(x)",
        "a = model(x).detach()",
        "a = model(x)\nb = a.mean()\na = b.item()",
        "a = model(x)\nb = a.float().reshape(-1)\nc = a.argmax(1)",
        "a, b = model(x), 1",
        "a, b = model(x).max(1)",
        "a, b = torch.max(model(x), 1)",
        "a, b = model(x).sort()",
        "a = model(x).topk(1)[1]\nb = model(x).topk(1)[0]\nc = model(x).topk(1).indices",
        "a = [model(x) for _ in range(2)]\nb = [one.item() for one in a[0].flatten()]",
        "a = []\nfor _ in range(2):\n    a.append(model(x))\nb = a\na = None",
        "a = 0\nfor _ in range(2):\n    a += model(x)",
        "for i, a in enumerate([model(x)]):\n    pass",
        "for a, b in zip([1], [model(x)]):\n    pass",
        "with torch.no_grad():\n    a = model(x)\nb = model(x)",
        "a = model(x)\nwith torch.no_grad():\n    b = a * 2\n    c = a",
        "with torch.no_grad():\n    with torch.enable_grad():\n        a = model(x)",
        "a = model(x)\ndel a",
        "a = x\nb = model(a) > 0\nc = not a.any()",
        "a = model(x) if x.any() else None\nb = (x, model(x))[0]",
        "a = torch.zeros_like(model(x))\nb = model(x).new_zeros(3)",
        "a = [None]\na[0] = model(x)\nb = f'{a}'",
        "a = torch.zeros(3, 2)\na.add_(model(x))",
        "a = lambda: model(x)\nb = {}\nb = len(b)",
        "try:\n    a = model(x)\nexcept ValueError:\n    b = 1",
    ],
)
def test_names_that_carry_a_graph_are_those_that_torch_gives_one(source: str) -> None:
    names = {"torch": torch, "model": nn.Linear(2, 2), "x": torch.ones(3, 2)}
    exec(source, names)
    truth = {name for name in "abc" if has_graph(names.get(name))}
    body = ast.parse(source).body
    found = SURE.through(body).now & set("abc")
    assert truth <= found
    assert found - truth <= ({"b"} if "[0]" in source else set())


@pytest.mark.parametrize(
    "source",
    [
        "a = model(x)\nif flag:\n    a = None",
        "for x in xs:\n    a = model(x)\n    if flag:\n        break\n    a = None",
        "a = model(x)\nfor a in xs:\n    pass",
        "try:\n    a = model(x)\n    check()\n    a = None\nexcept ValueError:\n    pass",
        "with suppress(ValueError):\n    a = model(x)\n    a = None",
        "while True:\n    b = a\n    a = model(x)\na = b",
    ],
)
def test_what_may_not_happen_lets_go_of_nothing(source: str) -> None:
    assert "a" in SURE.through(ast.parse(source).body).now


def appended(value: str) -> bool:
    source = f"hist = []\nfor x, y in loader:\n    out = model(x)\n    hist.append({value})\nprint(len(hist))\n"
    program = read(Cells(history=(Cell(number=1, source=textwrap.dedent(source)),)))
    return history_appends(program, {"model": "model", "criterion": "loss"}) != []


NO_GRAPH = """
    argmin(1) argsort() long() int() bool() byte() isnan() isfinite() logical_not() nonzero() any(1) all(1) argmax(1)
    count_nonzero() signbit() max(1)[1] topk(1).indices sort()[1] new_zeros(3) eq(0) stride() nelement()
"""


@pytest.mark.parametrize("value", NO_GRAPH.split())
def test_a_history_of_positions_and_truth_values_is_no_leak(value: str) -> None:
    given = torch.ones(3, 2, requires_grad=True) * 1
    assert not has_graph(eval(f"given.{value}", {"given": given}))
    assert not appended(f"out.{value}")


@pytest.mark.parametrize(
    "value", ["mean()", "max(1)[0]", "max()", "softmax(1)", "float()", "sort()[0]", "clone()", "T"]
)
def test_a_history_of_values_is(value: str) -> None:
    given = torch.ones(3, 2, requires_grad=True) * 1
    assert has_graph(eval(f"given.{value}", {"given": given}))
    assert appended(f"out.{value}")


@pytest.mark.parametrize(
    "function", ["torch.argmin(out, 1)", "torch.argsort(out)", "torch.max(out, 1)[1]", "torch.isnan(out).sum()", "y"]
)
def test_a_history_of_what_functions_of_torch_give_without_a_graph_is_no_leak(function: str) -> None:
    assert not appended(function)


def test_a_name_that_was_bound_to_a_number_since_keeps_no_graph() -> None:
    source = """
        hist = []
        for x, y in loader:
            loss = criterion(model(x), y)
            loss = loss.item()
            hist.append(loss)
    """
    program = read(Cells(history=(Cell(number=1, source=textwrap.dedent(source)),)))
    assert history_appends(program, {"model": "model", "criterion": "loss"}) == []
