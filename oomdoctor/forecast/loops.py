"""The loops of the user's code, made to ask the pace before each iteration whether to go on.

In the shadow the cell is compiled so that its loops ask, and so is each function that the user has written, where its
source can be had. Everything here is done to a process that was forked to be thrown away.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.forecast.items import ahead, is_known, length_of
from oomdoctor.forecast.pace import Asker
from oomdoctor.objects.named import is_users_file
from oomdoctor.program.compiled import (
    LoopHooks,
    compile_hooked,
    function_key,
    has_loop,
    hooked_functions,
    install_hooks,
)

if TYPE_CHECKING:
    from oomdoctor.forecast.ledger import Ledger
    from oomdoctor.forecast.pace import Pace
    from oomdoctor.forecast.values import Scalars

_OWN: Final = __name__.partition(".")[0]
_PASSED_OVER: Final = ("torch", _OWN)

_followed: set[str] = set()
"""File names of the code whose loops ask."""


def compile_followed(text: str, filename: str, flags: int = 0) -> CodeType:
    """Return the code of a cell with loops that ask; lines stay what they are.

    Raises:
        SyntaxError: it is not Python.
        ValueError: likewise.
    """
    _followed.add(filename)
    return compile_hooked(text, filename, flags)


def follow_loops(pace: Pace, ledger: Ledger, scalars: Scalars) -> None:
    """Let ``pace`` answer the loops of this process; what asserts ask of ``scalars`` holds."""

    def listed(before: int, made: list[Any]) -> list[Any]:
        if pace.piled is not None:
            pace.piled.complete(made, pace.cuts[before:])
        return made

    def branch(outcome: Any) -> Any:
        pace.branches()
        return outcome

    def rounds(is_outside: bool) -> Callable[[], bool]:
        """Return what a ``while`` asks before it looks at its condition."""
        return partial(next, _Items(itertools.repeat(True), pace, ledger if is_outside else None), False)

    install_hooks(
        LoopHooks(
            items=lambda iterable, is_outside: _Items(iterable, pace, ledger if is_outside else None),
            rounds=rounds,
            mark=lambda: len(pace.cuts),
            listed=listed,
            branch=branch,
            asked=lambda: scalars.asked,
            holds=lambda asked, outcome: outcome or scalars.asked > asked,  # on values that nobody knows
        )
    )


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
    install_hooks(LoopHooks())
    homes: dict[str, bool] = {}
    found: dict[str, list[FunctionType]] = {}
    for function in functions:
        name = function.__code__.co_filename
        if name not in homes:
            homes[name] = _is_users(function, namespace)
        if homes[name] and has_loop(function.__code__):
            found.setdefault(name, []).append(function)
    for name, of_file in found.items():
        codes = hooked_functions("".join(linecache.getlines(name)), name)
        if codes:
            _followed.add(name)
        for function in of_file:
            code = codes.get(function_key(function.__code__))
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
        self._items = iter(())
        raise StopIteration

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


def _is_users(function: FunctionType, namespace: dict[str, Any]) -> bool:
    if function.__globals__ is namespace:
        return True
    if str(function.__globals__.get("__name__", "")).partition(".")[0] == _OWN:
        return False
    return is_users_file(function.__globals__.get("__file__"))
