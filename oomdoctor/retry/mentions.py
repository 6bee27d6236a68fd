"""Which of the user's names a cell may get at, told before each cell in microseconds; errs towards all of them.

A cell gets at what its text mentions, and at what the functions mention that it can get at. What no text and no
function mentions that it leads to needs no look before the cell, however large it is.
"""

from __future__ import annotations

import gc
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dis import get_instructions
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final
from weakref import ReferenceType

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import module_of
from oomdoctor.objects.named import is_users
from oomdoctor.program.names import read_names

__all__ = ["EVERYTHING", "held_elsewhere", "is_fixed", "mentioned", "mentioned_by", "shares"]

EVERYTHING: Final[frozenset[str]] = frozenset({"*"})
"""Stands for all names."""
_BARE: Final = frozenset({"exec", "eval", "globals", "vars", "locals", "get_ipython", "await", "__name__", "builtins"})
"""Names by which code gets at whatever there is, if they stand alone: ``model.eval`` is no such."""
_ANYWHERE: Final = frozenset(
    {
        *("__main__", "__globals__", "f_globals", "f_locals", "tb_frame", "_getframe", "currentframe", "user_ns"),
        *("run_line_magic", "run_cell_magic", "run_cell", "get_objects", "get_referrers", "import_module"),
    }
)
_SHOWN: Final = frozenset({"_", "__", "___", "Out", "_oh"})
"""The shell's names for what cells have shown, if they are read."""
_MAGIC: Final = re.compile(r"^\s*[%!?]|[=(,]\s*[%!]|\?\s*$|\b_\d+\b|sys\s*\.\s*modules", re.MULTILINE)
_WORDS: Final = re.compile(r"\w+")
_ALONE: Final = re.compile(r"(?<![.\w])\w+")
_GLOBAL: Final = ("_GLOBAL", "_GLOBALS", "_NAME")
_REMEMBERED: Final = 4096
_MOST_LOOKED_AT: Final = 400
_MOST_HELD: Final = 3_000_000
_known: Final[dict[int, tuple[CodeType, frozenset[str]]]] = {}


def mentioned(source: str) -> frozenset[str]:
    """Return the words of a cell's text, its strings and comments included: a name may be looked up by its text."""
    if not source.isascii():  # as Python reads identifiers
        source = f"{source}\n{unicodedata.normalize('NFKC', source)}"
    words = frozenset(_WORDS.findall(source))
    if _MAGIC.search(source) or not _ANYWHERE.isdisjoint(words):
        return EVERYTHING
    if not _BARE.isdisjoint(words) and not _BARE.isdisjoint(_ALONE.findall(source)):
        return EVERYTHING
    if not _SHOWN.isdisjoint(words) and not _SHOWN.isdisjoint(read_names(source)):
        return EVERYTHING
    return words


def mentioned_by(code: CodeType) -> frozenset[str]:
    """Return the globals that a function and those defined in it mention; read once for each code."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        known = _known[id(code)] = code, _read(code)
    return known[1]


def _read(code: CodeType) -> frozenset[str]:
    codes = [code]
    for one in codes:  # it grows on the way
        codes += [constant for constant in one.co_consts if type(constant) is CodeType]
    names = frozenset(name for one in codes for name in one.co_names)
    loaded = frozenset(step.argval for one in codes for step in get_instructions(one) if step.opname.endswith(_GLOBAL))
    texts = {word for one in codes for text in one.co_consts if type(text) is str for word in _WORDS.findall(text)}
    if not (_BARE | _SHOWN).isdisjoint(loaded) or not _ANYWHERE.isdisjoint(names) or "__main__" in texts:
        return EVERYTHING
    return EVERYTHING if {"sys", "modules"} <= names else loaded


def shares(value: Any) -> bool:
    """Return whether an object of a library's may lead to the user's code, or to a container that others hold too."""
    held: Counter[int] = Counter()
    seen: dict[int, Any] = {}
    containers: list[Any] = []
    fresh: dict[int, Any] = {}
    inner: list[Any] = []
    wave = gc.get_referents(value)
    while wave:
        held.update(map(id, wave))
        fresh = {id(one): one for one in wave if type(one) not in LIGHT_TYPES and id(one) not in seen}
        seen |= fresh
        if len(seen) > _MOST_LOOKED_AT:
            return True
        inner.clear()
        for one in fresh.values():
            kind = type(one)
            if issubclass(kind, ReferenceType) or _is_users_own(one):
                return True
            if not _is_end(one):
                inner.append(one)
                if kind in (dict, list, set):
                    containers.append(one)
        wave = gc.get_referents(*inner)
    fresh.clear()
    inner.clear()
    # Our own: ``seen``, ``containers``, the name of the loop and the argument.
    return any(len(one) and sys.getrefcount(one) > held[id(one)] + 4 for one in containers)


def is_fixed(value: Any) -> bool:
    """Return whether a cell that does not mention a value leaves it as it is: numbers, text, what a library defines."""
    kind = type(value)
    if kind in LIGHT_TYPES or kind is BuiltinFunctionType:
        return True
    return issubclass(kind, (ModuleType, type, FunctionType)) and not _is_users_own(value)


def _is_users_own(value: Any) -> bool:
    if type(value) is FunctionType:
        return not is_installed(value.__globals__.get("__name__"))
    if issubclass(type(value), type):
        return not is_installed(module_of(value))
    return not is_installed(value.__name__ if issubclass(type(value), ModuleType) else module_of(type(value)))


def _is_end(value: Any) -> bool:
    """Return whether what a value leads to is not followed: it is a library's, and everybody's."""
    return issubclass(type(value), (ModuleType, type, FunctionType))


def held_elsewhere(namespace: dict[str, Any], snapshots: Iterable[Any], unread: frozenset[str]) -> set[str]:
    """Return those of ``unread`` that code mentions which something beside the namespace holds: a hook of a library's.

    Goes through all objects of the process, so it is for after a failure. What widgets call runs between cells: a cell
    that runs it itself mentions the widget, or awaits.

    Args:
        namespace: the globals of the functions.
        snapshots: what of ours holds functions. unread: names.
    """
    functions = [one for one in gc.get_referrers(namespace) if type(one) is FunctionType]
    named = (value for name, value in namespace.items() if is_users(name) or name == "Out")
    inside = _inside([*named, *_widgets()], snapshots)
    classes = [one for one in inside.values() if issubclass(type(one), type) and not is_installed(module_of(one))]
    mention: dict[int, frozenset[str]] = {}
    for one in (*functions, *classes):
        if names := _mentioned_by_own(one) & unread:
            mention[id(one)] = names
    objects = [one for one in inside.values() if id(type(one)) in mention]
    mention |= {id(one): mention[id(type(one))] for one in objects}
    targets = [one for one in (*functions, *classes, *objects) if id(one) in mention]
    found = set().union(*(mention[id(one)] for one in functions if id(one) in mention and id(one) not in inside))
    passed = {id(one) for one in (namespace, functions, classes, objects, targets, inside)}
    for holder in gc.get_referrers(*targets) if targets else ():
        if id(holder) not in inside and id(holder) not in passed and type(holder) is not FrameType:
            found |= set().union(*(mention.get(id(one), ()) for one in gc.get_referents(holder)))
    return found


def _widgets() -> list[Any]:
    """Return the widgets that are open. Source: ``widget.py`` of ipywidgets 8 and 7."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if module is None:
        return []
    return list((module._instances if hasattr(module, "_instances") else module.Widget.widgets).values())


def _mentioned_by_own(value: Any) -> frozenset[str]:
    """Return what a function mentions, or the methods of a class. Its own frame holds neither when it has returned."""
    own = [value] if type(value) is FunctionType else [one for one in vars(value).values() if type(one) is FunctionType]
    return frozenset[str]().union(*(mentioned_by(one.__code__) for one in own))


def _inside(values: list[Any], snapshots: Iterable[Any]) -> dict[int, Any]:
    """Return by their ``id`` the objects that the values lead to, but not by way of a library."""
    seen: dict[int, Any] = {}
    wave = [*values, *snapshots]
    while wave and len(seen) < _MOST_HELD:
        fresh = {id(one): one for one in wave if type(one) not in LIGHT_TYPES and id(one) not in seen}
        seen |= fresh
        wave = gc.get_referents(*(one for one in fresh.values() if not _is_a_librarys(one)))
        for one in fresh.values():
            if type(one) is FunctionType and _is_a_librarys(one):
                wave += [*(one.__closure__ or ()), one.__dict__]
    return seen


def _is_a_librarys(value: Any) -> bool:
    """Return whether a value is a library's, told by its type: the proxy of what is gone answers nothing."""
    kind = type(value)
    if issubclass(kind, (ModuleType, type, FunctionType)):
        return not _is_users_own(value)
    return module_of(kind).startswith(("IPython", "ipykernel", "traitlets"))
