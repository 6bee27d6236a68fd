"""The statement that keeps a tensor without its graph is Python, whatever is kept."""

from __future__ import annotations

import ast

import pytest

from oomdoctor.fixes import get
from oomdoctor.fixes.detach import _without_graph

FIX = get("detach_history")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("losses.append(loss)", "losses.append(loss.detach())"),
        ("total += loss", "total += loss.detach()"),
        ("total += ((m(X) - T) ** 2).mean()", "total += ((m(X) - T) ** 2).mean().detach()"),
        ("total += loss * len(x)", "total += (loss * len(x)).detach()"),
        ("total = total + criterion(m(x), y)", "total = total + criterion(m(x), y).detach()"),
    ],
)
def test_it_is_python_and_keeps_the_same_value(source: str, told: str) -> None:
    assert _without_graph(ast.parse(source).body[0]) == told
    ast.parse(told.replace(".detach()", ".item()"))
