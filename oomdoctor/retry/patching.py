"""Which attributes of modules, classes and functions a function assigns to, read from its code.

``torch.foo = 1``, ``F.gelu += 1``, ``del torch.foo`` and ``setattr(torch, "foo", 1)``, with what the function imports
itself. Read once for each code, as it is asked about before each cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dis import get_instructions, opmap
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeAlias

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import members_of, module_of, mro_of
from oomdoctor.objects.places import functions_in

__all__ = ["Assigned", "assigned_by"]

_MOST: Final = 500
"""Functions that are followed from one cell."""
_REMEMBERED: Final = 4096
_STORES: Final = ("STORE_ATTR", "DELETE_ATTR")
_STORE_CODES: Final = frozenset(opmap[name] for name in _STORES)
_BY_NAME: Final = ("setattr", "delattr")


class Assigned(NamedTuple):
    """One assignment.

    Attributes:
        path: of the owner, as the code has it. name: of the attribute.
        imports: what names stand for that the code imports. names: the globals that it reads.
    """

    path: str
    name: str
    imports: Mapping[str, str]
    names: Mapping[str, Any]


def assigned_by(values: Iterable[Any]) -> Iterator[Assigned]:
    """Yield what functions, and those that they mention, assign to.

    Args:
        values: functions, classes, their objects and anything else, of which the user's own are looked into.
    """
    waiting = [function for value in values if type(value) not in LIGHT_TYPES for function in _functions_of(value)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names, (found, mentioned) = function.__globals__, _read(function.__code__)
        yield from (Assigned(path, name, imports, names) for path, name, imports in found)
        for name in mentioned:
            if name in names and type(value := names[name]) not in LIGHT_TYPES:
                waiting += _functions_of(value)


def _functions_of(value: Any) -> list[FunctionType]:
    """Return a function, or those of a class or of the class of an object, as far as they are the user's."""
    kind: Any = type(value)
    if kind is MethodType:
        value, kind = value.__func__, FunctionType
    if kind is FunctionType:
        return [] if is_installed(value.__globals__.get("__name__")) else [value]
    cls = value if isinstance(value, type) else kind
    if is_installed(module_of(cls)):  # and so is what it derives from
        return []
    items = [item for one in mro_of(cls) if not is_installed(module_of(one)) for item in members_of(one).values()]
    found = [item if type(item) is FunctionType else inner for item in items for inner in functions_in(item) or (item,)]
    return [one for one in found if type(one) is FunctionType and not is_installed(one.__globals__.get("__name__"))]


_Read: TypeAlias = "tuple[list[tuple[str, str, dict[str, str]]], list[str]]"

_known: Final[dict[int, tuple[CodeType, _Read]]] = {}


def _read(code: CodeType) -> _Read:
    """Return what ``code`` and the functions in it assign to, and the names that they mention."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        codes = [code]
        for one in codes:  # it grows on the way
            codes += [constant for constant in one.co_consts if type(constant) is CodeType]
        found = [target for one in codes for target in _targets(one)]
        known = _known[id(code)] = code, (found, list({name for one in codes for name in one.co_names}))
    return known[1]


def _targets(code: CodeType) -> Iterator[tuple[str, str, dict[str, str]]]:
    if _STORE_CODES.isdisjoint(code.co_code[::2]) and not set(_BY_NAME).intersection(code.co_names):
        return
    imports: dict[str, str] = {}
    owner, copied, module, member, given = "", "", "", "", None
    is_by_name = is_from = False
    for step in get_instructions(code):
        kind, value = step.opname, step.argval
        if kind in ("LOAD_GLOBAL", "LOAD_NAME") or (kind.startswith(("LOAD_FAST", "LOAD_DEREF")) and value in imports):
            is_by_name = is_by_name or value in _BY_NAME
            owner = "" if value in _BY_NAME else value
        elif kind in ("LOAD_ATTR", "LOAD_METHOD") and owner:
            owner += f".{value}"
        elif kind in _STORES:
            if owner or copied:
                yield owner or copied, value, imports
            owner = copied = ""
        elif kind in ("COPY", "DUP_TOP"):  # ``torch.foo += 1``
            copied = owner
        elif kind == "LOAD_CONST":
            if is_by_name and owner and type(value) is str:
                yield owner, value, imports
            owner, is_by_name, given = "", False, value
        elif kind == "IMPORT_NAME":
            module, is_from, member = value, given is not None, ""
        elif kind == "IMPORT_FROM":
            member = value
        elif kind.startswith("STORE_") and module and type(value) is str:
            of_package = module if value != module.partition(".")[0] else value
            imports[value] = f"{module}.{member}" if is_from else of_package
        elif not kind.startswith(("SWAP", "ROT_TWO", "POP_TOP", "CACHE")):
            owner = module = ""
