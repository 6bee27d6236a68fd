"""How many items an iterable has, where Python does not say it: those made of others that do.

``zip``, ``enumerate`` and ``islice`` have no length, but what they go over often has. So in the shadow each of them
remembers it. Limits: one that was made before the cell, or imported by name from ``itertools`` into a library.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from typing import Any, Final

_LENGTH: Final = "_oomdoctor_length"


def length_of(iterable: Any) -> int | None:
    """Return how many items there are, None where that is not known."""
    known = getattr(type(iterable), _LENGTH, None)
    if known is not None:
        return getattr(iterable, "length", None)
    try:
        return len(iterable)
    except Exception:  # noqa: BLE001  a length of the user's may raise anything; the loop does not need one
        return None


def sources_of(iterable: Any) -> tuple[Any, ...]:
    """Return what an iterable takes its items from, side by side; nothing where that is not known."""
    if getattr(type(iterable), _LENGTH, None) is not None:
        sources: tuple[Any, ...] = getattr(iterable, "sources", ())
        return sources
    shown = sys.modules.get("tqdm.std")  # a progress bar
    if shown is not None and isinstance(iterable, shown.tqdm):
        return (iterable.iterable,)
    return ()


def _shortest(iterables: Any) -> int | None:
    """Return the least of the lengths that are known: one without an end, as of ``count()``, says nothing."""
    return min((length for one in iterables if (length := length_of(one)) is not None), default=None)


class _Zip(zip):  # type: ignore[type-arg]
    """``zip`` with a length."""

    _oomdoctor_length = True

    def __new__(cls, *iterables: Any, **kwargs: Any) -> Any:
        made: Any = super().__new__(cls, *iterables, **kwargs)
        made.length, made.sources = _shortest(iterables), iterables
        return made


class _Enumerate(enumerate):  # type: ignore[type-arg]
    """``enumerate`` with a length."""

    _oomdoctor_length = True

    def __new__(cls, iterable: Any, start: int = 0) -> Any:
        made: Any = super().__new__(cls, iterable, start)
        made.length = length_of(iterable)
        made.sources = (range(start, start + (made.length or 0)), iterable)
        return made


class _Slice(itertools.islice):  # type: ignore[type-arg]
    """``itertools.islice`` with a length."""

    _oomdoctor_length = True

    def __new__(cls, iterable: Any, *bounds: Any) -> Any:
        made: Any = super().__new__(cls, iterable, *bounds)
        whole = length_of(iterable)
        bound = slice(*bounds)
        if bound.stop is None and whole is None:
            made.length = None
        else:
            most = min(count for count in (whole, bound.stop) if count is not None)
            made.length = len(range(bound.start or 0, most, bound.step or 1))
        return made


_KINDS: Final[dict[Any, Any]] = {zip: _Zip, enumerate: _Enumerate, itertools.islice: _Slice}


def follow_lengths(namespace: dict[str, Any]) -> None:
    """Put those with a length in the place of Python's, for the rest of this process.

    Args:
        namespace: the user's, where names may have been imported.
    """
    names: Any = builtins
    names.zip, names.enumerate = _Zip, _Enumerate
    tools: Any = itertools
    tools.islice = _Slice
    for name, value in list(namespace.items()):
        kind = _KINDS.get(value) if isinstance(value, type) else None
        if kind is not None:
            namespace[name] = kind
