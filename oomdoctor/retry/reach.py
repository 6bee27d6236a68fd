"""What the code of a cell can get at: from the names that it reads, through objects, closures and their methods' code.

Errs towards yes. Asked only after a failure.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import members_of, module_of, mro_of
from oomdoctor.program.code_names import last_name, names_of, names_written_by, written_names
from oomdoctor.program.names import FirstUse, first_uses, read_names

__all__ = ["Reach"]

_MOST: Final = 300_000
_ANYTHING: Final = frozenset({"exec", "eval", "globals", "vars", "locals", "get_ipython", "run_line_magic"})


class Reach:
    """What a cell can get at.

    Args:
        source: its text.
        namespace: its globals, which are not gone through as a whole.
        lookup: returns what a name stood for before the cell and what it stands for now.

    Attributes:
        names: the globals that the code reads.
        is_all: whether it may get at anything.
    """

    def __init__(self, source: str, namespace: dict[str, Any], lookup: Callable[[str], Iterable[Any]]) -> None:
        self.names: set[str] = set()
        self._seen: dict[int, Any] = {id(namespace): namespace}
        self._namespace, self._lookup = namespace, lookup
        self._todo: list[Any] = []
        self._source, self._codes = source, list[CodeType]()
        reads = read_names(source)
        self.is_all = bool(reads & _ANYTHING) or "%run" in source or "%load" in source
        rebound = {name for name, use in first_uses(source).items() if use is FirstUse.BINDS}
        self._read(reads - rebound)
        self.names |= reads
        self._walk()

    def reaches(self, value: Any) -> bool:
        """Return whether the code can get at ``value``."""
        return self.is_all or id(value) in self._seen

    def writes(self, path: str) -> bool:
        """Return whether the code writes items into what a path leads to, told by its last name."""
        return last_name(path) in self._written

    def mentions(self, names: frozenset[str]) -> bool:
        """Return whether the code has one of these names, as a global, an attribute or an import."""
        if not names.isdisjoint(re.findall(r"\w+", self._source)):
            return True
        return any(not names.isdisjoint(names_of(code).names) for code in self._codes)

    @cached_property
    def _written(self) -> frozenset[str]:
        return written_names(self._source).union(*map(names_written_by, self._codes))

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._todo += self._lookup(name)

    def _walk(self) -> None:
        while self._todo:
            value = self._todo.pop()
            if type(value) in LIGHT_TYPES or id(value) in self._seen:
                continue
            if len(self._seen) > _MOST:
                self.is_all = True
                return
            self._seen[id(value)] = value
            self._todo += self._leads_to(value)

    def _leads_to(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        if issubclass(kind, ModuleType):
            if not is_installed(value.__name__):
                yield from vars(value).values()
        elif issubclass(kind, type):
            if not is_installed(module_of(value)):
                yield from members_of(value).values()
        elif type(value) is FunctionType:
            yield from self._code(value)
        else:
            if type(value) is MethodType:
                yield value.__func__
            for base in mro_of(type(value)):
                if not is_installed(module_of(base)):
                    yield base
            yield from islice(gc.get_referents(value), _MOST)

    def _code(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function holds, and take note of the globals that it and the functions in it mention."""
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield function.__dict__
        yield from (cell for cell in function.__closure__ or ())
        if is_installed(function.__module__):
            return
        self._codes.append(function.__code__)
        names = names_of(function.__code__).loaded
        if function.__globals__ is self._namespace:
            self._read(names)
        else:
            yield from (function.__globals__[name] for name in names if name in function.__globals__)
