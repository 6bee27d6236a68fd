"""What piles up only so far: deques with a greatest length, and ``itertools.cycle`` over a loader.

A shadow follows a few iterations, and what each of them keeps is reckoned for all that are left out. A container that
lets go of the oldest once it is full is filled before: one piece of memory stands for all that it would hold, and the
iteration that is followed next lets go of as much as it keeps. Limits: items that hold a graph, or tensors in objects
of classes; there more is reckoned with than is needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.data import DataLoader

from oomdoctor.forecast.lengths import length_of
from oomdoctor.objects.alive import alive_exactly

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

__all__ = ["Bounded", "follow_cycles"]


class _Cycle:
    """``itertools.cycle``, which keeps what it has seen, and can be told that it has seen all."""

    def __init__(self, iterable: Any, count: int) -> None:
        self._items, self._at = iter(iterable), 0
        self.kept: list[Any] = []
        self.maxlen = count

    def __iter__(self) -> _Cycle:
        return self

    def __next__(self) -> Any:
        if len(self.kept) < self.maxlen:
            for item in self._items:
                self.kept.append(item)
                return item
            self.maxlen = len(self.kept)
        if not self.kept:
            raise StopIteration
        self._at += 1
        return self.kept[self._at % len(self.kept)]


def follow_cycles(namespace: dict[str, Any]) -> None:
    """Let cycles over loaders be told of, for the rest of this process.

    Args:
        namespace: the user's, where the name may have been imported.
    """
    plain: Any = itertools.cycle

    def cycle(iterable: Iterable[Any]) -> Iterator[Any]:
        count = length_of(iterable) if isinstance(iterable, DataLoader) else None
        return plain(iterable) if count is None else _Cycle(iterable, count)

    tools: Any = itertools
    tools.cycle = cycle
    namespace.update({name: cycle for name, value in namespace.items() if value is plain})


class Bounded:
    """Fills what is there of such containers.

    Attributes:
        stays_open: whether one was left as it is because it does not get full.
    """

    def __init__(self, tracker: Tracker, before: Sequence[weakref.ref[deque[Any]]]) -> None:
        """Begin with the deques that were there before the cell; the garbage collector does not tell of them."""
        self._tracker, self._before = tracker, before
        self._growing: list[tuple[Any, int]] = []
        self._filled_at, self.stays_open = -1, False
        self._empty: list[Any] = []

    def take_back(self) -> None:
        """Take as much from those that are not full even so as the last iteration has added: it is reckoned with.

        The newest may be held by a variable besides: the oldest goes in its place.
        """
        growing, self._growing = self._growing, []
        for items, added in growing:
            newest = items.pop()
            for _ in range(min(added, len(items)) - 1):
                items.pop()
            items.append(newest)
            del items[0]

    def fill(self, since: int, left: int | None, *, is_inner: bool) -> bool:
        """Fill those to which something was added, for as many iterations as are left.

        Returns:
            Whether there were any, or were some in the last iteration, which is like no other then.

        Args:
            since: where in the trace of allocations the last iteration began.
            left: iterations that are left out, None where that is not known.
            is_inner: whether the loop is in another one. Of one that is not, what does not get full need not be filled.
        """
        self._growing = []
        events = self._tracker.ledger.events
        first = next((event[1] for event in events[since:] if event[0] == "alloc"), None)
        if first is None:
            return False
        found = alive_exactly(deque, _Cycle)
        found += [one for reference in self._before if (one := reference()) is not None]
        for one in found:
            if self._fill(one, first, left, is_inner):
                self._filled_at = len(events)
            self._put_last(one)
        return self._filled_at >= since

    def _fill(self, container: Any, first: int, left: int | None, is_inner: bool) -> bool:
        items = container.kept if type(container) is _Cycle else container
        if container.maxlen is None or not 0 < len(items) < container.maxlen:
            return False
        added = nbytes = 0
        for item in reversed(items):
            size = self._made_since(item, first)
            if not size:
                break
            added, nbytes = added + 1, max(nbytes, size)
        lacking = container.maxlen - len(items)
        count = lacking if left is None else min(lacking, added * (left - 1))  # one more iteration is followed
        if not added or not count:
            return False
        if count < lacking and not is_inner:
            self.stays_open = True
            return False
        standing = torch.empty(count * nbytes, dtype=torch.uint8)
        weakref.finalize(container, _let_go, standing)
        if count < lacking:
            self._growing.append((items, added))
        if type(container) is deque:
            empty = tree_map_only(torch.Tensor, _without_memory, items[-1])
            self._empty.append(empty)
            container.extend([empty] * count)
        elif count == lacking:
            container.maxlen = len(items)
        return True

    def _put_last(self, container: Any) -> None:
        """Have a deque let go of what has memory first, as it would of all that it holds."""
        if type(container) is deque and any(one is empty for empty in self._empty for one in container):
            empty = [one for one in container if any(one is other for other in self._empty)]
            full = [one for one in container if not any(one is other for other in self._empty)]
            container.clear()
            container.extend([*full, *empty])

    def _made_since(self, item: Any, first: int) -> int:
        """Return the bytes of what an item of a container keeps and was made since; 0 where a graph keeps more."""
        sizes: dict[int, int] = {}
        for leaf in tree_iter(item):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = leaf.untyped_storage()
            number = self._tracker.ledger.number_of(storage)
            if leaf.grad_fn is not None:
                return 0
            if number is not None and number >= first:
                sizes[number] = storage.nbytes()
        return sum(sizes.values())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _let_go(_standing: torch.Tensor) -> None:
    """Do nothing: with this call the last reference is gone."""
