"""The statement that keeps a tensor without its graph is Python, whatever is kept."""

from __future__ import annotations

import ast

import pytest

from oomdoctor.fixes.detach_history import _without_graphs


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        ("losses.append(loss)", "losses", "losses.append(loss.detach())"),
        ("total += loss", "total", "total += loss.detach()"),
        ("total += ((m(X) - T) ** 2).mean()", "total", "total += ((m(X) - T) ** 2).mean().detach()"),
        ("total += loss * len(x)", "total", "total += (loss * len(x)).detach()"),
        ("total = total + criterion(m(x), y)", "total", "total = total + criterion(m(x), y).detach()"),
    ],
)
def test_it_is_python_and_keeps_the_same_value(source: str, name: str, told: str) -> None:
    assert _without_graphs(ast.parse(source).body[0]) == (name, told)
    ast.parse(told.replace(".detach()", ".item()"))
