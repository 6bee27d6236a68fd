"""What a snapshot notes of an object: each note puts a part of it back, and tells what was lost or changed.

Notes hold heavy values weakly; see ``containers``. To restore may be done again after a further attempt. Of objects of
other libraries the attributes are held weakly and compared by identity. What they keep in C is not seen, but for the
few kinds that are copied here.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, Protocol

from oomdoctor.objects.containers import (
    CONTAINERS,
    GONE,
    LIGHT_TYPES,
    Recipe,
    SetCopy,
    Weak,
    fill,
    holds,
    is_light,
    is_small_array,
    items_of,
    length_of,
    living,
    refill,
    revive,
    still_holds,
    weak,
)
from oomdoctor.objects.kinds import Kind, kind_of, module_of, plain_dict
from oomdoctor.objects.places import Place


class Code(Protocol):
    """What the code of a cell may do, erring towards yes."""

    def reaches(self, value: Any) -> bool:
        """Return whether it can get at a value."""
        ...

    def writes(self, path: str) -> bool:
        """Return whether it writes items into what a path leads to."""
        ...


class Memento:
    """One note of what the user calls ``path``. By itself it does nothing."""

    __slots__ = ("path",)

    path: str

    def restore(self, memo: dict[int, Any]) -> None:
        """Put it back; ``memo`` has the containers brought back so far, by their ``id``."""

    def pieces(self, memo: dict[int, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts it back, with what it is called; one that fails does not keep the next from it."""
        yield f"`{self.path}`", partial(self.restore, memo)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence for each thing that cannot be put back."""
        yield from ()

    def changed(self) -> str | None:
        """Return what was done, if it is seen to be another: ``changed `x```."""
        return None

    def recipes(self) -> Iterator[Recipe]:
        """Yield how what it holds is brought back, if its owner lives."""
        yield from ()


class Light(Memento):
    """Plain containers of numbers and text, copied as they are: what they hold leads to nothing else of any size."""

    def __init__(self) -> None:
        # Three lists: the garbage collector would go through a tuple for each.
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._paths: list[str] = []

    def add(self, container: Any, path: str) -> None:
        """Add a container of which ``is_light`` is true."""
        self._containers.append(container)
        self._copies.append(SetCopy(container) if type(container) is set else container.copy())
        self._paths.append(path)

    def _changed(self) -> Iterator[tuple[Any, Any, str]]:
        """Yield each container that holds something else now, or in another order, with its copy and its path."""
        every = zip(self._containers, self._copies, self._paths, strict=True)
        return (one for one in every if not holds(one[0], one[1]))

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence for each set that cannot be filled again as it was."""
        for _, copy, _ in self._changed():
            yield from copy.lost() if type(copy) is SetCopy else ()

    def changed(self) -> str | None:
        """Return whether one of them was changed."""
        return next((f"changed `{path}`" for _, _, path in self._changed()), None)

    def pieces(self, memo: dict[int, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield for each that was changed what fills it again with what it held."""
        yield from ((f"`{path}`", partial(refill, container, copy)) for container, copy, path in self._changed())


class Attributes(Memento):
    """The class of an object, held, and its ``__dict__``, if it has one; or the globals of a module, as a dict."""

    __slots__ = ("_cls", "_owner", "recipe")

    def __init__(self, owner: Any, cls: type, recipe: Recipe | None, path: str) -> None:
        self._owner, self._cls, self.recipe, self.path = owner, cls, recipe, path

    def _names(self) -> Any:
        owner = living(self._owner)
        if owner is GONE or self.recipe is None:
            return None
        return owner if type(owner) is dict else object.__getattribute__(owner, "__dict__")

    def restore(self, memo: dict[int, Any]) -> None:
        """Give it its class again, and what it held."""
        owner = living(self._owner)
        if owner is not GONE and type(owner) is not self._cls:
            object.__setattr__(owner, "__class__", self._cls)
        if self.recipe is not None and (names := self._names()) is not None:
            fill(names, self.recipe, memo)

    def changed(self) -> str | None:
        """Return whether other things are in it."""
        names = self._names()
        is_same = names is None or self.recipe is None or still_holds(names, self.recipe)
        return None if is_same else f"changed `{self.path}`"

    def recipes(self) -> Iterator[Recipe]:
        """Yield that of its ``__dict__``."""
        if self.recipe is not None and living(self._owner) is not GONE:
            yield self.recipe


class Numbers(Memento):
    """The numbers and texts among the globals of a module that no name leads to."""

    def __init__(self, names: dict[str, Any], path: str) -> None:
        self._names, self.path = names, path
        self._values = {name: one for name, one in names.items() if name[:2] != "__" and type(one) in LIGHT_TYPES}

    def restore(self, memo: dict[int, Any]) -> None:
        """Bind them again."""
        now = self._names
        now.update({name: value for name, value in self._values.items() if now.get(name, GONE) is not value})


class Parts(Memento):
    """What an object keeps in one place beside its ``__dict__``."""

    __slots__ = ("_owner", "_place", "_recipe")

    def __init__(self, owner: Any, recipe: Recipe, place: Place) -> None:
        self._owner, self._recipe, self._place, self.path = owner, recipe, place, recipe.path

    def restore(self, memo: dict[int, Any]) -> None:
        """Put the parts back; one that cannot be written stays."""
        owner = living(self._owner)
        if owner is GONE:
            return
        now, before = self._place.read(owner), set()
        for name, held in self._recipe.pairs:
            before.add(name)
            value = revive(held, now.get(name), memo)
            if value is not GONE and now.get(name, GONE) is not value:
                with suppress(AttributeError, TypeError, ValueError):
                    self._place.write(owner, name, value)
        for name in now.keys() - before:
            with suppress(AttributeError, TypeError):
                self._place.delete(owner, name)

    def recipes(self) -> Iterator[Recipe]:
        """Yield that of the parts."""
        if living(self._owner) is not GONE:
            yield self._recipe


ADVANCES: Final = "is an iterator, an open file or a connection that the cell may have advanced"
CLOSED: Final = "is an object of {}, made in C, which the cell may have changed without a trace"
WRITTEN: Final = "is memory of {}, which the cell may have written to without a trace"
LOCKED: Final = "is a lock that was taken or let go of, and others may wait for it"
SET: Final = "is a context variable that was set, and cannot be set back"
DEEP: Final = "lies too deep to be looked at, and the cell may have changed it"


class Reached(Memento):
    """What cannot be wound back: it is lost if the cell can get at it, and it is not seen to stand as it stood.

    To put a lock back could take it from another thread, or stop that one.
    """

    __slots__ = ("_held", "_stand", "_what")

    def __init__(self, held: Any, path: str, what: str) -> None:
        self._held, self.path, self._what, self._stand = held, path, what, _stand_of(living(held))

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if the cell can get at it."""
        value = living(self._held)
        is_as_it_was = self._stand is not None and all(map(operator.is_, _stand_of(value) or (GONE,), self._stand))
        if value is not GONE and not is_as_it_was and code.reaches(value):
            yield f"`{self.path}` {self._what.format(type(value).__qualname__)}"


_LOCKS: Final[tuple[Any, ...]] = type(threading.Lock()), type(threading.RLock())


def is_lock(cls: type) -> bool:
    """Return whether a class is one of Python's two kinds of locks."""
    return any(cls is lock for lock in _LOCKS)


def _stand_of(value: Any) -> tuple[Any] | None:
    """Return what tells by its identity how a value stands, None where nothing does.

    Of a lock, who holds it and how many times: Python 3.11 tells it nowhere else.
    """
    if is_lock(type(value)):
        return (sys.intern(repr(value)),)
    return (value.get(GONE),) if type(value) is ContextVar else None


_COPIED: Final = (list, dict, set)
_FEW: Final = 20_000
_SHORT: Final = 256
_FRAME_CELLS: Final = 1 << 22


class _Standing(NamedTuple):
    """A container known by where it stood and how long it was: to hold it would keep alive what it holds."""

    ident: int
    length: int
    items: tuple[int, ...] | None


def _standing(value: Any) -> _Standing | None:
    kind = kind_of(type(value))
    if kind not in CONTAINERS:
        return None
    length = -1 if kind is Kind.TUPLE else length_of(value)
    return _Standing(id(value), length, tuple(map(id, items_of(value, kind))) if 0 <= length <= _SHORT else None)


class Foreign(Memento):
    """The attributes of one object, in its ``__dict__``."""

    __slots__ = ("_held", "_values")

    def __init__(self, value: Any, attributes: dict[str, Any], path: str) -> None:
        self.path = path
        self._held = _held(value)
        self._values = {name: _held(item) for name, item in attributes.items()}

    def _changes(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the ``__dict__``, and name and old value of each attribute that is another one now."""
        owner = living(self._held)
        now = plain_dict(owner) if owner is not GONE else None
        if now is None:
            return
        for name, held in self._values.items():
            item = now.get(name, GONE)
            if type(held) is _Standing:
                if _standing(item) != held:
                    yield now, name, GONE
            elif item is not (old := living(held)):
                yield now, name, old

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence for each attribute that cannot be put back."""
        for _, name, old in self._changes():
            if old is GONE:
                yield f"`{self.path}.{name}` was changed by the cell, and cannot be put back"

    def restore(self, memo: dict[int, Any]) -> None:
        """Put the attributes back that can be, and take away those that are new."""
        for now, name, old in list(self._changes()):
            if old is not GONE:
                now[name] = old
        owner = living(self._held)
        now = (plain_dict(owner) if owner is not GONE else None) or {}
        for name in [name for name in now if name not in self._values]:
            del now[name]


def _held(value: Any) -> Any:
    if type(value) in LIGHT_TYPES:
        return value
    if kind_of(type(value)) in CONTAINERS:
        is_copied = type(value) in _COPIED and len(value) <= _FEW and is_light(value)
        return value if is_copied else _standing(value)
    return value if is_small_array(value) else weak(value)


class Frame(Memento):
    """A pandas frame or series: one that shares its columns until either is written to (copy on write)."""

    def __init__(self, value: Any, path: str) -> None:
        self._held, self.path = Weak(value), path
        self._copy = value.copy(deep=False)
        self._attrs = dict(value.attrs)

    def objects(self) -> Iterator[Any]:
        """Yield what a column of objects holds, beside numbers and text."""
        for block in self._copy._mgr.blocks:
            values = block.values
            if getattr(values.dtype, "kind", "") == "O" and hasattr(values, "flat"):
                yield from (item for item in values.flat if type(item) not in LIGHT_TYPES)

    def restore(self, memo: dict[int, Any]) -> None:
        """Let the frame have the columns that it had."""
        value = self._held.get()
        if value is not GONE:
            object.__setattr__(value, "_mgr", self._copy.copy(deep=False)._mgr)
            value.attrs.clear()
            value.attrs.update(self._attrs)


class Cached(Memento):
    """A function of the user's that remembers results by ``lru_cache``: what it remembers is not seen."""

    def __init__(self, function: Any, path: str) -> None:
        self._function, self.path = function, path
        self._info = _LRU.cache_info(function)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if results were added or dropped that it cannot be rid of."""
        now = _LRU.cache_info(self._function)
        moved = (now.misses, now.currsize) != (self._info.misses, self._info.currsize)
        if self._info.currsize and (moved or (now.hits != self._info.hits and now.currsize == now.maxsize)):
            yield f"`{self.path}` remembers other results than before, and cannot be wound back"

    def restore(self, memo: dict[int, Any]) -> None:
        """Let it remember nothing again, if it remembered nothing."""
        if not self._info.currsize and _LRU.cache_info(self._function) != self._info:
            _LRU.cache_clear(self._function)


def is_cached(cls: type) -> bool:
    """Return whether a class is that of ``functools.lru_cache``, made in C."""
    return cls is _LRU


_LRU: Final[Any] = type(lru_cache(abs))


def is_frame(value: Any) -> bool:
    """Return whether it is a pandas frame or series, not too large, of a pandas that copies on write: 3 and later."""
    cls = type(value)
    if module_of(cls) not in ("pandas", "pandas.core.frame", "pandas.core.series"):
        return False
    if cls.__name__ not in ("DataFrame", "Series") or value.size > _FRAME_CELLS:
        return False
    return int(vars(sys.modules["pandas"])["__version__"].split(".")[0]) >= 3
