"""Lists to which every iteration of a loop adds, made as long as the whole loop would have made them.

What the iterations that a shadow leaves out keep alive is reckoned with elsewhere (see ``steady``). What comes after
the loop puts it together: ``torch.cat(outputs)``, ``np.concatenate(scores)``, ``torch.tensor(losses)``. So where a loop
is cut, the last items of such a list are put into it again, once for each iteration that is left. Limits: lists that a
name leads to, of the cell or of a running function of the user's, at most through one dict or object; loops whose
length is known, and that add as many items each time. What NumPy would make of them is made for real here, so of much
no more is put in.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from oomdoctor.objects.alive import alive_exactly
from oomdoctor.objects.kinds import module_of, plain_dict

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Loop
    from oomdoctor.forecast.steady import Cut

_MOST_ITEMS: Final = 1 << 17
_MOST_BYTES: Final = 1 << 28
_NUMBER_BYTES: Final = 8
"""Of a number in a list of numbers, once it is in an array."""


class Piled:
    """Watches the lists that the user's code can name, by their length."""

    def __init__(self, namespace: dict[str, Any], is_users: Callable[[FrameType], bool]) -> None:
        """Begin with none.

        Args:
            namespace: the user's.
            is_users: whether a frame runs code that the user has written.
        """
        self._namespace, self._is_users = namespace, is_users
        self._lengths: WeakKeyDictionary[Loop, tuple[dict[int, int], dict[int, int]]] = WeakKeyDictionary()

    def note(self, loop: Loop) -> None:
        """Take down how long they are where an iteration of ``loop`` begins."""
        now = {id(items): len(items) for items in self._lists()}
        _, before = self._lengths.get(loop, ({}, {}))
        self._lengths[loop] = before, now

    def lengthen(self, loop: Loop, left: int) -> None:
        """Make those to which each of the last two iterations has added as many items as long as they would get."""
        first, second = self._lengths.pop(loop, ({}, {}))
        for items in list({id(items): items for items in self._lists()}.values()):
            begun = second.get(id(items), 0)
            added = len(items) - begun
            if 0 < added == begun - first.get(id(items), 0):
                _extend(items, added, left)

    def complete(self, made: list[Any], cuts: Sequence[Cut]) -> None:
        """Make what a comprehension has made as long as it would get.

        Args:
            made: an item for each of its iterations.
            cuts: the loops that were cut meanwhile; its own is the last.
        """
        if made and cuts and cuts[-1].turns == len(made) and cuts[-1].left is not None:
            _extend(made, 1, cuts[-1].left)

    def _lists(self) -> Iterator[list[Any]]:
        for value in self._named():
            if type(value) is list:
                yield value
            else:
                yield from _lists_in(value, self._namespace)

    def _named(self) -> Iterator[Any]:
        yield from list(self._namespace.values())
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and self._is_users(frame):
                found = frame.f_locals
                yield from list(found.values())
                if type(found) is dict:  # before Python 3.13 the frame keeps this copy, and so what its variables were
                    found.clear()
            frame = frame.f_back


def fills_up(before: Iterable[weakref.ref[deque[Any]]]) -> bool:
    """Return whether there is a deque of tensors that has a greatest length and is not full, or an ``itertools.cycle``.

    Args:
        before: the deques that were there before the cell; the garbage collector does not tell of them.
    """
    import torch
    from torch.utils._pytree import tree_iter

    found = [*alive_exactly(deque), *(one for reference in before if (one := reference()) is not None)]
    filling = (one for one in found if one.maxlen is not None and 0 < len(one) < one.maxlen)
    holds = any(isinstance(leaf, torch.Tensor) for one in filling for leaf in tree_iter(one[-1]))
    return holds or bool(alive_exactly(itertools.cycle))


def _extend(items: list[Any], added: int, times: int) -> None:
    last = items[-added:]
    if added * times <= _MOST_ITEMS and sum(map(_real_bytes, last)) * times <= _MOST_BYTES:
        items.extend(last * times)


def _lists_in(value: Any, namespace: dict[str, Any]) -> Iterable[list[Any]]:
    """Return the lists that a dict, or an object of a class of the user's, holds itself or in its dicts."""
    if type(value) is dict:
        return [item for item in value.values() if type(item) is list] if value is not namespace else ()
    held = plain_dict(value) if module_of(type(value)) == namespace.get("__name__", "__main__") else None
    if held is None:
        return ()
    found = [item for item in held.values() if type(item) is list]
    return found + [item for one in held.values() if type(one) is dict for item in one.values() if type(item) is list]


def _real_bytes(item: Any) -> int:
    """Return how much memory an item would take once it is put together with others outside of torch."""
    if type(item) is list:
        return sum(map(_real_bytes, item)) if item and type(item[0]) is list else _NUMBER_BYTES * len(item)
    arrays = sys.modules.get("numpy")
    return int(item.nbytes) if arrays is not None and isinstance(item, arrays.ndarray) else 0
