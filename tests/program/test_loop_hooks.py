"""Rewritten code that asks before each iteration: what the hooks are given, and that without them nothing changes."""

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from oomdoctor.program.compiled import LoopHooks, compile_hooked, function_key, hooked_functions, install_hooks

PROGRAM = """
seen = []
for i in range(5):
    if i % 2 == 0:
        seen.append(i)
else:
    seen.append("over")
n = 0
while n < 4:
    n += 1
def total(numbers):
    whole = 0
    for number in numbers:
        whole += number
    return whole
whole = total(range(5)) + sum(x for x in [1, 2])
squares = [x * x for x in range(4)]
"""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(vars(builtins))
    yield
    for name in set(vars(builtins)) - set(before):
        delattr(builtins, name)


def ran(hooks: LoopHooks) -> dict[str, object]:
    install_hooks(hooks)
    names: dict[str, object] = {}
    exec(compile_hooked(PROGRAM, "<cell>"), names)
    return names


def test_code_whose_hooks_do_nothing_runs_as_it_was_written() -> None:
    plain: dict[str, object] = {}
    exec(compile(PROGRAM, "<cell>", "exec"), plain)
    names = ran(LoopHooks())
    for name in ("seen", "n", "whole", "squares"):
        assert names[name] == plain[name]


def test_a_hook_ends_loops_early_and_their_else_is_run() -> None:
    def two_of(iterable, is_outside):
        return list(iterable)[:2] if is_outside else iterable

    def one_round(is_outside):
        rounds = iter([True, False])
        return lambda: next(rounds)

    names = ran(LoopHooks(items=two_of, rounds=one_round))
    assert (names["seen"], names["n"], names["whole"]) == ([0, "over"], 1, 13)


def test_a_branch_that_a_counter_decides_is_told_to_the_hook() -> None:
    asked = []
    assert ran(LoopHooks(branch=lambda outcome: asked.append(outcome) or True))["seen"] == [0, 1, 2, 3, 4, "over"]
    assert asked == [True, False, True, False, True]


def test_a_list_that_a_comprehension_made_is_handed_to_the_hook() -> None:
    names = ran(LoopHooks(mark=lambda: "mark", listed=lambda mark, made: [mark, *made]))
    assert names["squares"] == ["mark", 0, 1, 4, 9]


def test_functions_of_a_file_are_found_by_their_names_and_lines() -> None:
    names = ran(LoopHooks())
    total = names["total"]
    assert function_key(total.__code__) in hooked_functions(PROGRAM, "<cell>")
    assert hooked_functions("def broken(:", "<cell>") == {}


WRITTEN = """
from dataclasses import dataclass, fields
from typing import ClassVar, Optional
@dataclass
class Base:
    count: ClassVar[int] = 1 + 1
    size: Optional[int] = None
    def grown(self, by: dict[str, int]) -> tuple[int, ...]:
        return (by["a"] + 1,)
class Other(Base):
    def grown(self, by):
        return super().grown(by)
def kind(value):
    match value:
        case 1 + 2j | -1:
            return "number"
        case [first, *_] if first > 1:
            return f"{first + 1:>{first * 2}}"
    return (found := value + 1) and found
names = [field.name for field in fields(Base)]
found = Other().grown({"a": 2}), kind(-1), kind([2, 3]), kind(4), Base.grown.__annotations__["by"]
"""


def test_all_that_python_writes_is_left_what_it_is() -> None:
    plain: dict[str, Any] = {"__name__": "__main__"}
    hooked = dict(plain)
    exec(compile(WRITTEN, "<cell>", "exec"), plain)
    seen = set()
    install_hooks(LoopHooks(value=lambda site, value: (seen.add(site[:2]), value)[1]))
    exec(compile_hooked(WRITTEN, "<cell>"), hooked)
    assert (hooked["names"], hooked["found"]) == (plain["names"], plain["found"])
    assert {("Base.grown", "by['a'] + 1"), ("kind", "first > 1"), ("kind", "value + 1")} <= seen
