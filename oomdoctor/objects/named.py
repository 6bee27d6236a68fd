"""Whose a name or a module is, and the user's models, optimizers, schedulers and loaders by the names they go by."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeGuard

from oomdoctor.objects.containers import pairs_of
from oomdoctor.objects.kinds import (
    Kind,
    held_by,
    is_plain_key,
    kind_of,
    members_of,
    module_of,
    mro_of,
    name_of,
    parts_of,
    plain_dict,
    spelled,
)

_OURS: Final = __name__.partition(".")[0]
_FOLDERS: Final = (
    *{sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}",  # noqa: PTH120 - compared as text, like co_filename
)
_PACKAGES: Final = ("site-packages", "dist-packages", "/.cache/jittor/")
"""Parts of the paths of what was installed, and of what Jittor has compiled."""


def is_users_file(path: Any) -> TypeGuard[str]:
    """Return whether the file of a module or of code is in no folder of Python's, of installed packages, or ours."""
    return type(path) is str and not path.startswith(_FOLDERS) and not any(folder in path for folder in _PACKAGES)


@lru_cache(maxsize=4096)
def is_installed(module: object) -> bool:
    """Return whether the module of this name is Python's or an installed package's, as this one; or not known."""
    if module == "__main__":
        return False
    if is_ours(module):
        return True
    found = sys.modules.get(module) if type(module) is str else None
    return not is_users_file(getattr(found, "__file__", None))


_SHELL: Final = ("IPython.core.interactiveshell", "InteractiveShell")


def is_shell(cls: type) -> bool:
    """Return whether objects of a class are IPython's shell, which holds the namespace itself."""
    return any((module_of(one), name_of(one)) == _SHELL for one in mro_of(cls))


def is_ours(module: object) -> bool:
    """Return whether the module of this name is of this package."""
    return type(module) is str and module.partition(".")[0] == _OURS


_looked_at: Final[set[str]] = {"__main__", "__mp_main__"}
_own_names: Final[list[str]] = []
_newest: tuple[int, str, int] = (0, "", 0)


def own_modules() -> list[ModuleType]:
    """Return the modules that are loaded from files of the user's, but for the program itself.

    Each name is looked at once, and none where the newest module is as before: there are thousands.
    """
    global _newest
    last = next(reversed(sys.modules))
    before, _newest = _newest, (len(sys.modules), last, id(sys.modules[last]))
    for name in () if _newest == before else sys.modules.keys() - _looked_at:
        _looked_at.add(name)
        home = getattr(sys.modules.get(name), "__file__", None)
        # Parts of a package may be made in it, as ``torch.ops`` is, and have no file.
        if home and not is_installed(name.partition(".")[0]) and not is_installed(name):
            _own_names.append(name)
    return [module for name in _own_names if type(module := sys.modules.get(name)) is ModuleType]


_SHELL_NAMES: Final = frozenset({"In", "Out", "get_ipython", "exit", "quit"})
_SHELL_UNDERSCORED: Final = re.compile(r"_+|_i+|_i?\d+|_[iod]h|_exit_code|__\w+__|__[a-z]+")
_LAST: Final = ("_", "__", "___")
_DEPTH: Final = 3
_MOST_ITEMS: Final = 64


def is_users(name: object) -> bool:
    """Return whether the user bound this name, and not IPython or Python."""
    if type(name) is not str:
        return False
    if name[:1] != "_":
        return name not in _SHELL_NAMES
    return _SHELL_UNDERSCORED.fullmatch(name) is None


def user_names(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names that the user bound; those of IPython are left out."""
    yield from ((name, value) for name, value in list(namespace.items()) if is_users(name) and name.isidentifier())


def class_attributes(names: Iterable[tuple[str, Any]], home: object) -> Iterator[tuple[str, Any]]:
    """Yield what those of ``names`` hold that are classes of the module ``home``, or modules of the user's own.

    Each by one name: what is deleted by one is gone by the others.
    """
    first: dict[int, tuple[str, Any]] = {}
    for name, value in names:
        first.setdefault(id(value), (name, value))
    for name, value in first.values():
        if type(value) is ModuleType:
            if _is_users_module(value):
                yield from ((f"{name}.{key}", item) for key, item in _own(vars(value)))
        elif issubclass(type(value), type) and type(home) is str and module_of(value) == home:
            yield from ((name + of_class(value, key), item) for key, item in _own(members_of(value)))


def of_class(cls: type, name: str) -> str:
    """Return the part of a path from a class to what it holds; it cannot be typed where the metaclass may refuse."""
    metaclasses = (base for base in mro_of(type(cls)) if base is not type and base is not object)
    refuses = any(type(key) is str and key == "__delattr__" for base in metaclasses for key in members_of(base))
    return f".__dict__[{name!r}]" if refuses else f".{name}"


def _own(held: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(key, item) for key, item in list(held.items()) if type(key) is str and key[:2] != "__"]


def is_home_of_users(name: str) -> bool:
    """Return whether the module of this name is of the program: a script, a notebook, or a module of the user's own."""
    module = sys.modules.get(name)
    return name == "__main__" or (type(module) is ModuleType and _is_users_module(module))


def _is_users_module(module: ModuleType) -> bool:
    """Return whether a module lies in no folder of Python's or of installed packages."""
    return is_users_file(spelled(vars(module)).get("__file__"))


def output_cache(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the results of earlier cells that IPython keeps."""
    outputs = namespace.get("_oh")
    if type(outputs) is dict:
        yield from ((f"Out[{number}]", value) for number, value in list(outputs.items()))
    yield from ((name, value) for name, value, is_shown in _last(namespace) if is_shown)


def own_underscores(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ``_``, ``__`` and ``___`` where the user bound them, as ``pred, _ = model(x)`` does."""
    yield from ((name, value) for name, value, is_shown in _last(namespace) if not is_shown)


def _last(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the names of the last results, each with whether that is a result which IPython keeps."""
    outputs = namespace.get("_oh")
    shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    own = plain_dict(getattr(getattr(shell, "_instance", None), "displayhook", None)) or {}
    shown = [*(outputs.values() if type(outputs) is dict else ()), *(own.get(name) for name in _LAST)]
    for name in filter(namespace.__contains__, _LAST):
        yield name, namespace[name], any(namespace[name] is one for one in shown)


def find(namespace: Mapping[str, Any]) -> dict[Kind, tuple[tuple[str, Any], ...]]:
    """Return ``(path, object)`` by kind for every root module, optimizer, scheduler and loader.

    A module that another one holds is no root. Containers and plain objects are looked into a few levels deep.
    """
    found: dict[Kind, dict[int, tuple[str, Any]]] = {
        kind: {} for kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER)
    }
    seen: set[int] = set()
    level = list(user_names(spelled(namespace)))
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            kind = kind_of(type(value))
            if kind in found:
                found[kind].setdefault(id(value), (path, value))
            else:
                below += _children(path, value, kind)
        level = below
    inner = parts_of([module for _, module in found[Kind.MODULE].values()])
    found[Kind.MODULE] = {key: item for key, item in found[Kind.MODULE].items() if key not in inner}
    return {kind: tuple(items.values()) for kind, items in found.items()}


def other_names(namespace: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what functions of the user's are called by beside the name of their definition, each with that.

    By a name of the namespace, as in ``step = partial(train_step, model)``, or an attribute of an object of theirs.
    """
    held = list(user_names(spelled(namespace)))
    own = (
        value for _, value in held if kind_of(type(value)) is Kind.OBJECT and not is_installed(module_of(type(value)))
    )
    held += [pair for value in own for pair in list((plain_dict(value) or {}).items())[:_MOST_ITEMS]]
    found: dict[str, str] = {}
    for name, value in held:
        while (cls := type(value)) is partial or cls is MethodType:
            value = value.func if cls is partial else value.__func__
        is_own = type(value) is FunctionType and is_users_file(value.__code__.co_filename)
        if is_own and value.__name__.isidentifier() and value.__name__ != name:
            found[name] = value.__name__
    return tuple(found.items())


def _children(path: str, value: Any, kind: Kind) -> list[tuple[str, Any]]:
    if kind is Kind.MAPPING:
        pairs = pairs_of(value, kind, _MOST_ITEMS)
        return [(f"{path}[{key!r}]", item) for key, item in pairs if is_plain_key(key)]
    if kind in (Kind.SEQUENCE, Kind.TUPLE):
        return [(f"{path}[{index}]", item) for index, item in pairs_of(value, kind, _MOST_ITEMS)]
    if kind is Kind.CALLABLE:
        return [(f"{path}{suffix}", item) for suffix, item in held_by(value)]
    if kind is Kind.OBJECT:
        return [(f"{path}.{name}", item) for name, item in list((plain_dict(value) or {}).items())[:_MOST_ITEMS]]
    return []
