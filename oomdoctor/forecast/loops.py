"""The loops of the user's code, made to ask before each iteration whether to go on.

In the shadow the cell is compiled from a tree in which each ``for``, ``while`` and comprehension goes through a
function of this module, and so is the code of each function that the user has written, where its source can be had.
A loop that is cut ends as one that has run out: its ``else`` is run, and what follows is seen. Everything here is done
to a process that was forked to be thrown away. Limits: ``async for`` does not ask, nor do functions that were running
already, nor those made by ``exec`` of a text that no file holds.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.forecast.branches import BRANCH, asking_branch, counters_of
from oomdoctor.forecast.lengths import length_of
from oomdoctor.forecast.measures import ahead, is_known
from oomdoctor.forecast.pace import Asker
from oomdoctor.objects.homes import is_users_file

if TYPE_CHECKING:
    from oomdoctor.forecast.ledger import Ledger
    from oomdoctor.forecast.pace import Pace

__all__ = ["asker", "follow_functions", "follow_loops", "is_followed", "to_follow"]

_ITEMS: Final = "_oomdoctor_items"
_ROUNDS: Final = "_oomdoctor_rounds"
_MARK: Final = "_oomdoctor_mark"
_LISTED: Final = "_oomdoctor_listed"
"""Names by which rewritten code calls this module: builtins of the shadow."""

_OWN: Final = __name__.partition(".")[0]
_PASSED_OVER: Final = ("torch", _OWN)
_JUMP_BACK: Final = frozenset(code for name, code in dis.opmap.items() if "JUMP_BACKWARD" in name)

_followed: set[str] = set()
"""File names of the code whose loops ask."""


def to_follow(tree: ast.Module, filename: str) -> ast.Module:
    """Return the tree of a cell with loops that ask; lines stay what they are."""
    _followed.add(filename)
    return _asking(tree, filename)


def follow_loops(pace: Pace, ledger: Ledger) -> None:
    """Let ``pace`` answer the loops of this process."""
    names: Any = builtins

    def items(iterable: Any, is_statement: bool) -> Iterator[Any]:
        return _Items(iterable, pace, ledger if is_statement else None)

    def rounds(is_statement: bool) -> _Rounds:
        return _Rounds(pace, ledger if is_statement else None)

    def branch(outcome: Any, key: str, turns: Any, value: Any, is_target: bool) -> Any:
        return pace.branches.answer(outcome, key, turns, value, is_target, pace.innermost)

    def listed(before: int, made: list[Any]) -> list[Any]:
        if pace.piled is not None:
            pace.piled.complete(made, pace.cuts[before:])
        return made

    setattr(names, _ITEMS, items)
    setattr(names, _ROUNDS, rounds)
    setattr(names, _MARK, lambda: len(pace.cuts))
    setattr(names, _LISTED, listed)
    setattr(names, BRANCH, branch)


def asker() -> Asker:
    """Return who runs the code that calls this, past torch and ourselves."""
    found: Asker | None = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NEXT:
            return Asker.LOOP
        if found is None and str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _PASSED_OVER:
            found = Asker.CODE if frame.f_code.co_filename in _followed else Asker.LIBRARY
        frame = frame.f_back
    return found or Asker.LIBRARY


def is_followed(frame: FrameType) -> bool:
    """Return whether a frame runs code whose loops ask."""
    return frame.f_code.co_filename in _followed


def follow_functions(functions: Sequence[FunctionType], namespace: dict[str, Any]) -> None:
    """Give every function that the user has written, and that loops, a code whose loops ask.

    Until ``follow_loops``, in the nursery, they go on as they would.

    Args:
        functions: all that there are.
        namespace: the globals of the cells.
    """
    names: Any = builtins
    setattr(names, _ITEMS, lambda iterable, _is_statement: iterable)
    setattr(names, _ROUNDS, lambda _is_statement: lambda: True)
    setattr(names, _MARK, lambda: 0)
    setattr(names, _LISTED, lambda _before, made: made)
    setattr(names, BRANCH, lambda outcome, *_how: outcome)
    homes: dict[str, bool] = {}
    found: dict[str, list[FunctionType]] = {}
    for function in functions:
        name = function.__code__.co_filename
        if name not in homes:
            homes[name] = _is_users(function, namespace)
        if homes[name] and _loops(function.__code__):
            found.setdefault(name, []).append(function)
    for name, of_file in found.items():
        codes = _codes_of(name)
        for function in of_file:
            code = codes.get(_key(function.__code__))
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code


class _Items:
    """An iterator that ends early if told to. It keeps no item: what the loop lets go of is gone.

    Before it ends it gives those of the items left out that may need more than those that were followed.
    """

    __slots__ = ("_given", "_items", "_ledger", "_loop", "_others", "_pace")

    def __init__(self, iterable: Any, pace: Pace, ledger: Ledger | None) -> None:
        self._items, self._pace, self._ledger = iter(iterable), pace, ledger
        self._given: Any = iterable
        self._others: list[Any] | None = None
        self._loop = pace.begins(length_of(iterable))
        self._loop.is_known = is_known(iterable)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        if self._ledger is not None:
            self._ledger.turn += 1
        if self._others is None:
            if self._pace.wants_more(self._loop):
                return self._next()
            self._others = ahead(self._given, self._loop.turns, varies=self._loop.varies)
            self._given = None
        if self._others:
            self._loop.turns += 1
            return self._others.pop(0)
        if not self._pace.forces(self._loop):
            self._items = iter(())
            raise StopIteration
        self._loop.turns += 1
        self._pace.insists = True
        try:
            return self._next()
        finally:
            self._pace.insists = False

    def _next(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._loop.turns -= 1
            raise

    def __del__(self) -> None:  # at once when the loop is over, or is left
        if hasattr(self, "_loop"):
            self._pace.ended(self._loop)


_NEXT: Final = _Items.__next__.__code__


class _Rounds:
    """What a ``while`` asks before it looks at its condition."""

    __slots__ = ("_is_cut", "_ledger", "_loop", "_pace")

    def __init__(self, pace: Pace, ledger: Ledger | None) -> None:
        self._pace, self._ledger, self._is_cut = pace, ledger, False
        self._loop = pace.begins()

    def __call__(self) -> bool:
        if self._ledger is not None:
            self._ledger.turn += 1
        self._is_cut = self._is_cut or not self._pace.wants_more(self._loop)
        return not self._is_cut or self._pace.forces(self._loop)

    def __del__(self) -> None:  # when the loop begins anew, or its function ends
        self._pace.ended(self._loop)


class _Asking(ast.NodeTransformer):
    """Puts the questions into a tree."""

    def __init__(self, filename: str, counters: Mapping[str, bool]) -> None:
        self._filename, self._counters = filename, counters
        self._loops = 0
        self._depth = 0

    def visit_FunctionDef(self, node: Any) -> Any:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = _call(_ITEMS, node.iter, self._depth == 0)
        return node

    def visit_If(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = asking_branch(node.test, self._counters, self._filename)
        return node

    visit_IfExp = visit_If  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        if not node.is_async:
            node.iter = _call(_ITEMS, node.iter, False)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        self.generic_visit(node)
        if len(node.generators) > 1 or node.generators[0].ifs or node.generators[0].is_async:
            return node
        mark = ast.Call(func=ast.Name(id=_MARK, ctx=ast.Load()), args=[], keywords=[])
        listed = ast.Call(func=ast.Name(id=_LISTED, ctx=ast.Load()), args=[mark, node], keywords=[])
        return ast.copy_location(listed, node)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self.generic_visit(node)
        self._loops += 1
        name = f"{_ROUNDS}_{self._loops}"
        test = node.test
        asked = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=[], keywords=[])
        node.test = ast.copy_location(ast.BoolOp(op=ast.And(), values=[asked, test]), test)
        begun = ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=_call(_ROUNDS, None, self._depth == 0))
        return [ast.copy_location(begun, node), node]


def _asking(tree: ast.Module, filename: str) -> ast.Module:
    changed: ast.Module = _Asking(filename, counters_of(tree)).visit(tree)
    return ast.fix_missing_locations(changed)


def _call(name: str, given: ast.expr | None, is_statement: bool) -> ast.Call:
    args = [*filter(None, [given]), ast.Constant(value=is_statement)]
    made = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=args, keywords=[])
    return made if given is None else ast.copy_location(made, given)


def _is_users(function: FunctionType, namespace: dict[str, Any]) -> bool:
    if function.__globals__ is namespace:
        return True
    if str(function.__globals__.get("__name__", "")).partition(".")[0] == _OWN:
        return False
    return is_users_file(function.__globals__.get("__file__"))


def _loops(code: CodeType) -> bool:
    """Return whether a function has a loop, or a function or comprehension inside of it has."""
    return not _JUMP_BACK.isdisjoint(code.co_code[::2]) or any(
        _loops(inner) for inner in code.co_consts if type(inner) is CodeType
    )


def _codes_of(filename: str) -> dict[tuple[str, int], CodeType | None]:
    """Return the code of every function of a file with loops that ask; none where the file cannot be had."""
    text = "".join(linecache.getlines(filename))
    try:
        tree = _asking(ast.parse(text), filename)
        code: CodeType = compile(tree, filename, "exec", dont_inherit=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    _followed.add(filename)
    found: dict[tuple[str, int], CodeType | None] = {}
    todo = [code]
    while todo:
        for const in todo.pop().co_consts:
            if type(const) is CodeType:
                found[_key(const)] = None if _key(const) in found else const  # two lambdas of one line look alike
                todo.append(const)
    return found


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
