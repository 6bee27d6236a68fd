"""Which expressions may come to another value in later steps, and what becomes of them there."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from oomdoctor.program.compiled import LoopHooks, compile_hooked, install_hooks
from oomdoctor.trial.later_steps import Values, shown

ROWS = 13


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dict(vars(builtins))
    yield
    for name in set(vars(builtins)) - set(before):
        delattr(builtins, name)


def still(program: str, **names: Any) -> dict[str, Any]:
    values = Values(ROWS, [64])
    install_hooks(LoopHooks(value=values.pass_on))
    exec(compile_hooked(program, "<cell>"), names)
    return {site.text: value for site, value in values.still().items()}


def test_a_condition_on_a_counter_that_has_not_turned_round_may() -> None:
    program = (
        "for step in range(2):\n    late = step > 100\n    known = step >= 0 and size == 3\n    first = step == 0\n"
    )
    found = still(program, size=3)
    assert found == {"step > 100": False, "step >= 0": True, "step >= 0 and size == 3": True}


def test_a_weight_that_is_nothing_yet_may_become_something() -> None:
    program = "table = [0.0, 0.0, 0.5]\nfor i in range(2):\n    a = table[i]\n    b = max(0, i - 5)\n    c = abs(-2)\n"
    assert still(program) == {"table[i]": 0.0, "max(0, i - 5)": 0}


@pytest.mark.parametrize(
    "condition",
    ["len(seen) > 9", "self.calls > 9", "torch.isnan(loss)", "loss.item() > 999", "x.shape[0] > 32"],
)
def test_what_it_is_made_of_moves_wherever_it_is_kept(condition: str) -> None:
    program = f"""
import torch
class Counter: calls = 0
self, seen, x = Counter(), [], torch.zeros({ROWS}, 2)
for step in range(2):
    loss = torch.tensor(float(step))
    found = {condition}
    self.calls += 1
    seen.append(0)
"""
    assert still(program)[condition] is False


def test_a_condition_in_a_function_that_the_program_calls_is_found_there() -> None:
    program = "def is_late(n):\n    return n > 9\nfor step in range(2):\n    found = is_late(step)\n"
    assert still(program) == {"n > 9": False, "is_late(step)": False}


def test_what_stands_still_with_all_that_it_is_made_of_stays() -> None:
    program = "kind = 'mse'\nfor step in range(2):\n    if kind == 'nce' or x.dim() == 4:\n        pass\n"
    assert still(program, x=torch.zeros(8, 2)) == {}


def test_what_is_asserted_or_raised_for_is_no_step_to_come() -> None:
    program = "for i in range(2):\n    assert i < 9\n    if i > 9:\n        raise ValueError(i)\n    late = i > 9\n"
    assert still(program) == {"i > 9": False}
    assert still(program.replace("late = i > 9", "late = 0")) == {}


def test_the_condition_of_a_while_loop_is_no_condition_of_its_steps() -> None:
    assert still("step = 0\nwhile step < 3:\n    step += 1\n") == {}


def test_later_steps_turn_conditions_round_and_weigh_by_one() -> None:
    program = """
for i in range(2):
    late, weight, bad = i > 5, max(0.0, i - 5.0), torch.isnan(loss * i)
    table, tensor, many = tables[0][i], tables[1][i], np.bool_(i > 7)
"""
    tables = np.zeros(9, np.float32), torch.zeros(9)
    names: dict[str, Any] = {"torch": torch, "np": np, "loss": torch.tensor(1.0), "tables": tables}
    values = Values(ROWS)
    install_hooks(LoopHooks(value=values.pass_on))
    exec(compile_hooked(program, "<cell>"), names)
    found = values.still()
    assert shown(found) == "`i > 5`, `max(0.0, i - 5.0)`, `torch.isnan(loss * i)` and 4 more"
    install_hooks(LoopHooks(value=Values(ROWS, turned=found).pass_on))
    exec(compile_hooked(program, "<cell>"), names)
    assert (names["late"], names["weight"], bool(names["bad"])) == (True, 1.0, True)
    assert (names["table"], names["table"].dtype, names["tensor"].item()) == (1.0, np.float32, 1.0)
    assert names["many"] == np.True_
