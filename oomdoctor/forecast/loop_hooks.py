"""The loops of the user's code, made to ask the loops before each iteration whether to go on, and what they go over.

In the dry run the cell is compiled so that its loops ask, and so is each function that the user has written, where its
source can be had. ``zip``, ``enumerate`` and ``islice`` have no length, but what they go over often has, so each of
them remembers it. What a step needs mostly grows with the item that it is given: a longer batch, a wider layer, more
samples. So of the items that are not followed the largest one stands for all. Nothing is taken from an iterator.
Everything here is done to a process that was forked to be thrown away.

Limits: a ``zip`` that was made before the cell, or imported by name into a library; what is in objects of the user's
classes.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader

from oomdoctor.forecast.loop_model import Asker
from oomdoctor.objects.named import is_users_file
from oomdoctor.program.compiled import LoopHooks, install_hooks
from oomdoctor.sandbox.attempt import asking, hook_functions

if TYPE_CHECKING:
    from oomdoctor.forecast.live_storages import Ledger
    from oomdoctor.forecast.loop_model import LoopModel
    from oomdoctor.forecast.values import Scalars

_OWN: Final = __name__.partition(".")[0]
_PASSED_OVER: Final = ("torch", _OWN)

_MOST_MEASURED: Final = 10_000
"""Items of a sequence that are measured, and parts of one item."""
_FEW: Final = 3
"""So many items whose size says nothing are followed besides: they may be the names of models that are compared."""
_VIEWS: Final[tuple[type, ...]] = (dict, type({}.items()), type({}.keys()), type({}.values()))


def follow_loops(loops: LoopModel, ledger: Ledger, scalars: Scalars) -> None:
    """Let ``loop_hooks`` answer the loops of this process; what asserts ask of ``scalars`` holds."""

    def listed(before: int, made: list[Any]) -> list[Any]:
        loops.lists.complete(made, loops.cuts[before:])
        return made

    def branch(outcome: Any) -> Any:
        loops.branches()
        return outcome

    def rounds(is_outside: bool) -> Callable[[], bool]:
        """Return what a ``while`` asks before it looks at its condition."""
        return partial(next, _Items(itertools.repeat(True), loops, ledger if is_outside else None), False)

    install_hooks(
        LoopHooks(
            items=lambda iterable, is_outside: _Items(iterable, loops, ledger if is_outside else None),
            rounds=rounds,
            mark=lambda: len(loops.cuts),
            listed=listed,
            branch=branch,
            asked=lambda: scalars.asked,
            holds=lambda asked, outcome: outcome or scalars.asked > asked,  # on values that nobody knows
        )
    )


def asker() -> Asker:
    """Return who runs the code that calls this, past torch and ourselves."""
    found: Asker | None = None
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is _NEXT:
            return Asker.LOOP
        if found is None and str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _PASSED_OVER:
            found = Asker.CODE if frame.f_code.co_filename in asking else Asker.LIBRARY
    return found or Asker.LIBRARY


def is_followed(frame: FrameType) -> bool:
    """Return whether a frame runs code whose loops ask."""
    return frame.f_code.co_filename in asking


def follow_functions(functions: Sequence[FunctionType], namespace: dict[str, Any]) -> None:
    """Give every function that the user has written, and that loops, a code whose loops ask.

    Until ``follow_loops``, which a dry run calls, they go on as they would.
    """
    homes: dict[str, bool] = {}

    def is_users(function: FunctionType) -> bool:
        name = function.__code__.co_filename
        if name not in homes:
            homes[name] = _is_users(function, namespace)
        return homes[name]

    install_hooks(LoopHooks())
    hook_functions(filter(is_users, functions))


class _Items:
    """An iterator that ends early if told to. It keeps no item: what the loop lets go of is gone.

    Before it ends it gives those of the items left out that may need more than those that were followed.
    """

    __slots__ = ("_given", "_items", "_ledger", "_loop", "_loops", "_others")

    def __init__(self, iterable: Any, loops: LoopModel, ledger: Ledger | None) -> None:
        self._items, self._loops, self._ledger = iter(iterable), loops, ledger
        self._given: Any = iterable
        self._others: list[Any] | None = None
        self._loop = loops.begins(length_of(iterable))
        self._loop.is_known = is_known(iterable)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        if self._ledger is not None:
            self._ledger.turn += 1
        if self._others is None:
            if self._loops.wants_more(self._loop):
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
            self._loops.ended(self._loop)


_NEXT: Final = _Items.__next__.__code__


def _is_users(function: FunctionType, namespace: dict[str, Any]) -> bool:
    return function.__globals__ is namespace or is_users_file(function.__globals__.get("__file__"))


# What a loop goes over -----------------------------------------------------------------------------------------------


def length_of(iterable: Any) -> int | None:
    """Return how many items there are, None where that is not known."""
    try:
        return iterable.length if isinstance(iterable, _FOLLOWED) else len(iterable)
    except Exception:  # noqa: BLE001  a length of the user's may raise anything; the loop does not need one
        return None


def sources_of(iterable: Any) -> tuple[Any, ...]:
    """Return what an iterable takes its items from, side by side; nothing where that is not known."""
    shown = sys.modules.get("tqdm.std")  # a progress bar
    if shown is not None and isinstance(iterable, shown.tqdm):
        return (iterable.iterable,)
    sources: tuple[Any, ...] = getattr(iterable, "sources", ()) if isinstance(iterable, _FOLLOWED) else ()
    return sources


class _Zip(zip):  # type: ignore[type-arg]
    """``zip`` with a length: the least of those that are known; one without an end, as of ``count()``, says nothing."""

    def __init__(self, *iterables: Any, **_kwargs: Any) -> None:
        self.length = min((length for one in iterables if (length := length_of(one)) is not None), default=None)
        self.sources = iterables


class _Enumerate(enumerate):  # type: ignore[type-arg]
    def __init__(self, iterable: Any, start: int = 0) -> None:
        self.length = length_of(iterable)
        self.sources = (range(start, start + (self.length or 0)), iterable)


class _Slice(itertools.islice):  # type: ignore[type-arg]
    def __init__(self, iterable: Any, *bounds: Any) -> None:
        bound = slice(*bounds)
        ends = [count for count in (length_of(iterable), bound.stop) if count is not None]
        self.length = len(range(bound.start or 0, min(ends), bound.step or 1)) if ends else None


_FOLLOWED: Final = (_Zip, _Enumerate, _Slice)


def follow_lengths(namespace: dict[str, Any]) -> None:
    """Put those with a length in the place of Python's, for the rest of this process, where they were imported too."""
    kinds: tuple[tuple[Any, Any, Any], ...] = (
        *((builtins, zip, _Zip), (builtins, enumerate, _Enumerate)),
        (itertools, itertools.islice, _Slice),
    )
    for owner, plain, kind in kinds:
        setattr(owner, plain.__name__, kind)
        namespace.update({name: kind for name, value in namespace.items() if value is plain})


def size_of(item: Any) -> int:
    """Return how large an item is: samples, characters, elements, parameters; 0 where that is not known."""
    if isinstance(item, torch.Tensor):
        return item.numel()
    if isinstance(item, torch.nn.Module):
        return sum(parameter.numel() for parameter in item.parameters())
    if isinstance(item, DataLoader):
        return item.batch_size or 0
    if type(item) is int:
        return abs(item)
    if isinstance(item, (str, bytes, range)):
        return len(item)
    if isinstance(item, Mapping):
        return sum(map(size_of, item.values()))
    if isinstance(item, (list, tuple)):
        is_row = bool(item) and type(item[0]) in (int, float)
        return len(item) if is_row else sum(map(size_of, item[:_MOST_MEASURED]))
    arrays = sys.modules.get("numpy")
    return int(item.size) if arrays is not None and isinstance(item, arrays.ndarray) else 0


def ahead(iterable: Any, done: int, *, varies: bool) -> list[Any]:
    """Return items of ``iterable`` that may need more than the ``done`` ones that a loop has followed.

    ``varies``: whether the last of them still made tensors of other sizes than those before.
    """
    items = _sequence(iterable)
    if items is None or not done < len(items):
        return []
    last = len(items) - 1
    if _counts(items):  # numbers in a row, of which the last is the largest
        return [items[last]] if varies else []
    sizes = [_told(items, index) for index in range(min(len(items), _MOST_MEASURED))]
    chosen = {last} if varies else set()
    if done == 1 and not any(sizes[: _FEW + 1]):
        chosen |= {*range(1, 1 + _FEW), last}
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > max(sizes[:done]):
        chosen.add(largest)
    return [items[index] for index in sorted(chosen) if done <= index <= last]


def is_known(iterable: Any) -> bool:
    """Whether it can be told what a loop would still go over."""
    return _sequence(iterable) is not None


class _Together(Sequence[Any]):
    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return min(map(len, self.columns))

    def __getitem__(self, index: Any) -> Any:
        return tuple(column[index] for column in self.columns)


def _sequence(iterable: Any) -> Sequence[Any] | None:
    """Return what an iterable goes over as a sequence, without taking anything from it."""
    if isinstance(iterable, (list, tuple, range)):
        return iterable
    if type(iterable) in _VIEWS:
        return list(iterable)
    sources = sources_of(iterable)
    if not sources:
        return None
    columns = [column for source in sources if (column := _sequence(source)) is not None]
    if len(columns) < len(sources):
        return None
    return columns[0] if len(columns) == 1 else _Together(columns)


def _counts(items: Sequence[Any]) -> bool:
    return all(map(_counts, items.columns)) if isinstance(items, _Together) else isinstance(items, range)


def _told(items: Sequence[Any], index: int) -> int:
    """Return the size of an item; a counter that goes with it says nothing, nor does the name of one in a dict."""
    if isinstance(items, _Together):
        return sum(_told(column, index) for column in items.columns if not _counts(column))
    return size_of(items[index])
