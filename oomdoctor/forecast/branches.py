"""Branches that a loop takes only every so many steps, or from some step on: what is in them is seen once.

A shadow follows the first few steps of a loop. ``if step % 100 == 0`` and ``if epoch >= 5`` decide by a counter alone,
so it can be told beforehand that they will go the other way, and after its last step the loop is given one more in
which they do. Limits: a chain of ``elif`` is seen as far as one such step goes; a counter moves by the same amount each
time.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Loop

__all__ = ["BRANCH", "Branches", "asking_branch", "counters_of"]

BRANCH: Final = "_oomdoctor_branch"
"""Name by which rewritten code calls this module: a builtin of the shadow."""
_GIVEN: Final = "_oomdoctor_given"
_MOST_AHEAD: Final = 50_000
"""Values of a counter that are looked at beforehand; each takes a tenth of a microsecond or two."""
_TWICE: Final = 2
"""What a branch leaves behind is there when it is taken for the second time."""
_MOST_GIVEN: Final = 4
"""Steps that a loop is given: a test may stand in a branch that is not taken in the first of them."""
_PLAIN: Final = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Name, ast.Attribute, ast.Constant, ast.Subscript),
    *(ast.boolop, ast.unaryop, ast.operator, ast.cmpop, ast.expr_context),
)


class _Test:
    """What one ``if`` has answered so far, and how to find out what it will."""

    __slots__ = ("by", "is_target", "loop", "outcomes", "turns", "value")

    def __init__(self, loop: Loop, is_target: bool) -> None:
        self.loop, self.is_target = loop, is_target
        self.outcomes: set[bool] = set()
        self.value, self.by = 0, 1
        self.turns: Callable[[int], Any] = bool

    def turns_within(self, steps: int) -> int:
        """Return how often it answers otherwise within so many steps; of more than twice nothing new is to be seen."""
        (usual,) = self.outcomes
        ahead = range(self.value + self.by, self.value + self.by * (steps + 1), self.by)
        try:
            return sum(1 for _ in islice((value for value in ahead if bool(self.turns(value)) is not usual), _TWICE))
        except Exception:  # noqa: BLE001  what the user's expression raises for another value is none of ours
            return 0


class Branches:
    """The tests of the code that is followed."""

    def __init__(self) -> None:
        self._tests: dict[str, _Test] = {}
        self._forced: set[str] = set()
        self._times: Counter[str] = Counter()
        self._given: Counter[Loop] = Counter()

    def answer(
        self, outcome: Any, key: str, turns: Callable[[int], Any], value: Any, is_target: bool, loop: Loop | None
    ) -> Any:
        """Return what the test answers: what it does by itself, or the other thing in the one step that is for it.

        Args:
            outcome: by itself.
            key: tells tests apart.
            turns: what it answers for another value of its counter.
            value: that of the counter.
            is_target: whether a ``for`` sets it, so that it begins anew with its loop.
            loop: the innermost one that is running.
        """
        if type(value) is not int or type(outcome) is not bool or loop is None:
            return outcome
        test = self._tests.get(key)
        if test is None or test.loop is not loop:
            test = self._tests[key] = _Test(loop, is_target)
        elif test.outcomes:
            test.by = value - test.value or test.by
        test.value, test.turns = value, turns
        test.outcomes.add(outcome)
        if key not in self._forced or len(test.outcomes) == _TWICE:
            return outcome
        self._forced.remove(key)
        self._times[key] += 1
        return not outcome

    def force(self, running: Sequence[Loop]) -> bool:
        """Begin a step of the innermost loop in which tests go the other way; return whether there is any that will.

        Args:
            running: that loop, after those around it.
        """
        loop = running[-1]
        if self._given[loop] == _MOST_GIVEN:
            return False
        of_loop = max(map(_left, running))
        of_all = 0
        for one in running:
            of_all = min(of_all * (one.total or _MOST_AHEAD) + _left(one), _MOST_AHEAD)
        mine = {key: test for key, test in self._tests.items() if test.loop is loop and len(test.outcomes) == 1}
        counts = {key: test.turns_within(of_loop if test.is_target else of_all) for key, test in mine.items()}
        found = {key for key, count in counts.items() if self._times[key] < count}
        self._forced = (self._forced - mine.keys()) | found
        self._given[loop] += bool(found)
        return bool(found)

    def ended(self, loop: Loop) -> None:
        """Forget the tests of a loop that is over, and what they hold."""
        del self._given[loop]
        for key in [key for key, test in self._tests.items() if test.loop is loop]:
            del self._tests[key]
            self._forced.discard(key)


def _left(loop: Loop) -> int:
    return _MOST_AHEAD if loop.total is None else min(loop.total - loop.turns, _MOST_AHEAD)


def counters_of(tree: ast.AST) -> dict[str, bool]:
    """Return what counts in some code, and whether it is the target of a ``for``; otherwise it is added to."""
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)):
            found |= {part.id: True for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            found.setdefault(ast.unparse(node.target), False)
    return found


def asking_branch(test: ast.expr, counters: Mapping[str, bool], filename: str) -> ast.expr:
    """Return the test of an ``if`` as a question to this module, or as it is where no counter decides it alone."""
    counter = _counter(test, counters)
    if counter is None:
        return test
    name = ast.unparse(counter)
    turned = _Given(name).visit(ast.parse(ast.unparse(test), mode="eval").body)
    parameter = ast.arguments(posonlyargs=[], args=[ast.arg(_GIVEN)], kwonlyargs=[], kw_defaults=[], defaults=[])
    key = f"{filename}:{test.lineno}:{test.col_offset}"
    value = ast.parse(name, mode="eval").body
    arguments = [test, ast.Constant(key), ast.Lambda(parameter, turned), value, ast.Constant(counters[name])]
    asked = ast.Call(func=ast.Name(id=BRANCH, ctx=ast.Load()), args=arguments, keywords=[])
    for node in ast.walk(asked):
        if isinstance(node, ast.expr) and node is not test:
            ast.copy_location(node, test)
    return asked


def _counter(test: ast.expr, counters: Mapping[str, bool]) -> ast.expr | None:
    """Return the one counter that decides a test, together with what does not change, as far as that shows."""
    found: dict[str, ast.expr] = {}
    todo: list[ast.AST] = [test]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := ast.unparse(node)) in counters:
            found[name] = node
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id != "len" or node.keywords:
                return None
            todo += node.args
        elif isinstance(node, _PLAIN):
            todo += ast.iter_child_nodes(node)
        else:
            return None
    return next(iter(found.values())) if len(found) == 1 else None


class _Given(ast.NodeTransformer):
    """Puts the parameter in the place of a counter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == self._name:
            return ast.Name(id=_GIVEN, ctx=ast.Load())
        return self.generic_visit(node)
