"""The user's own modules as parts of the program: found by what the cells import, and run as a change has them.

A module counts where its file is the user's (in no folder of Python's or of installed packages), and where its text is
what its loaded functions were compiled from: one that was edited since is left out. Limits: what is imported by
``importlib`` or by a path in a string is not seen, and of a large code base only the nearest modules are taken.

The functions of a changed one get the code of the changed text, the very objects, so that whoever has bound one
(``from train import fit``, a method of an object, a wrapper of a decorator, a closure) runs the change. What the text
newly imports or defines is made in the module. A change of anything else that ran when the module was imported is
refused: the live objects would not follow it. The file itself is left as it is.
"""

from __future__ import annotations

import ast
import gc
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.errors import StateError
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import Cell, Cells, shown_path
from oomdoctor.program.compiled import compile_python, is_compiled_from, lines_of, source_of, with_inner
from oomdoctor.program.magics import Definition, Function, parsed
from oomdoctor.program.names import imported

Compile = Callable[[str, str], CodeType]
"""Makes the code of a text of a file."""

MAKING: Final = re.compile(r"__(?!call__)\w+__|setup|reset_parameters|extra_repr")
"""Names of methods that run when an object is made, or may."""
_ABSENT: Final = object()
_MOST_MODULES: Final = 16
_MOST_CHARACTERS: Final = 120_000
"""Of all modules together: LibCST reads some 50,000 in a second."""
_numbers: Final[dict[str, int]] = {}
"""The number of each module by its file, the same for as long as the process lives."""


def with_modules(cells: Cells, own: Iterable[ModuleType]) -> Cells:
    """Return the cells with the modules before them, of those from files of the user's, that they reach by imports."""
    if cells.modules:
        return cells
    loaded = {module.__name__: module for module in own if type(getattr(module, "__file__", None)) is str}
    if not loaded:
        return cells
    texts = {cell.source for cell in cells.history}
    waiting = [name for cell in cells.history for name in _imported(parsed(cell.source), "")]
    found: dict[str, Cell] = {}
    seen, room = set[str](), _MOST_CHARACTERS
    for name in waiting:  # it grows on the way: the nearest modules come first
        module = loaded.get(name)
        if module is None or name in seen or len(found) == _MOST_MODULES:
            continue
        seen.add(name)
        file = str(module.__file__)
        text = _running_text(module, file)
        if text is None or text in texts or file in found or len(text) > room:
            continue
        room -= len(text)
        found[file] = Cell(number=_numbers.setdefault(file, -1 - len(_numbers)), source=text, file=file)
        is_package = hasattr(module, "__path__")
        waiting += _imported(parsed(text), name if is_package else name.rpartition(".")[0])
    return replace(cells, history=(*reversed(found.values()), *cells.history))


def _imported(tree: ast.Module | None, package: str) -> Iterator[str]:
    """Yield the names of all that may be a module among what a text imports."""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            home = ".".join(filter(None, (above, node.module)))
            names = [home, *(f"{home}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _running_text(module: ModuleType, file: str) -> str | None:
    """Return the text that the functions of a module were compiled from, None where it cannot be had."""
    match linecache.cache.get(file):
        case (_, None, lines, _) if _is_compiled_from(module, file, text := "".join(lines)):
            return text  # a retry has put it there
    try:
        text = source_of(Path(file))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return text if Path(file).suffix == ".py" and _is_compiled_from(module, file, text) else None


def _is_compiled_from(module: ModuleType, file: str, text: str) -> bool:
    values = list(vars(module).values())
    values += [member for cls in values if isinstance(cls, type) for member in vars(cls).values()]
    own = (one.__code__ for one in values if type(one) is FunctionType and one.__globals__ is vars(module))
    return is_compiled_from((code for code in own if code.co_filename == file), text)


def why_not(before: str, after: str) -> str | None:
    """Return what of a change the loaded module could not follow, None where it can follow all of it."""
    try:
        old, new = ast.parse(before), ast.parse(after)
    except (SyntaxError, ValueError):
        return "it is not Python"
    defined = _defined_here(old.body)
    was = dict(_loaded(old.body))
    now = dict(_loaded(one for one in new.body if not isinstance(one, Definition) or one.name in defined))
    added = (
        node for text, node in now.items() if text not in was and not isinstance(node, ast.Import | ast.ImportFrom)
    )
    gone = (node for text, node in was.items() if text not in now and not isinstance(node, Definition))
    if (node := next(added, None) or next(gone, None)) is not None:
        return f"line {node.lineno} has run when the module, or an object of it, was made, which would not follow"
    return None


def put_in_place(edit: Edit, compiled: Compile | None = None) -> Callable[[], None]:
    """Have the loaded functions of a module run as its changed text has them; return what takes that back.

    A module that is not loaded, because the cell itself imports it, follows by ``importing`` alone.

    Raises:
        StateError: a function cannot take the other code.
    """
    file, make = str(edit.file), compiled or compile_python
    loaded = (one for one in list(sys.modules.values()) if type(one) is ModuleType)
    modules = [one for one in loaded if vars(one).get("__file__") == file]
    if (why := why_not(edit.before, edit.after)) is not None:
        raise StateError(f"{shown_path(file)}: {why}")
    swaps = [swap for module in modules for swap in _swaps(module, edit, make)]
    back = ExitStack()
    back.callback(_put_lines, file, linecache.cache.get(file))
    for function, code in swaps:
        back.callback(setattr, function, "__code__", function.__code__)
        function.__code__ = code
    _put_lines(file, (len(edit.after), None, edit.after.splitlines(keepends=True), file))
    try:
        for module in modules:
            _run_new(module, edit, make, back)
    except BaseException:
        back.close()
        raise
    return back.close


@contextmanager
def importing(texts: Mapping[str, str], compiled: Compile | None = None) -> Iterator[None]:
    """Have modules that are imported in the body run another text than that of their file, by the file."""
    finder = _Finder(texts, compiled or compile_python)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, texts: Mapping[str, str], make: Compile) -> None:
        self._texts, self._make = texts, make

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or spec.origin not in self._texts:
            return None
        file, loader = spec.origin, SourceFileLoader(fullname, spec.origin)
        loader.get_code = lambda fullname: self._make(self._texts[file], file)  # type: ignore[method-assign]
        spec.loader = loader
        return spec


def _swaps(module: ModuleType, edit: Edit, make: Compile) -> Iterator[tuple[FunctionType, CodeType]]:
    file = str(edit.file)
    old, new = _by_name(compile_python(edit.before, file)), _by_name(make(edit.after, file))
    names = {(code.co_qualname, code.co_firstlineno): key for key, code in old.items()}
    for function in _functions_of(module):
        code = function.__code__
        key = names.get((code.co_qualname, code.co_firstlineno)) if code.co_filename == file else None
        if key is None or key not in new:
            continue
        if new[key].co_freevars != code.co_freevars:
            raise StateError(f"`{code.co_qualname}` of {shown_path(file)} would close over other names")
        yield function, new[key]


def _functions_of(module: ModuleType) -> list[FunctionType]:
    """Return the functions of a module: those that it leads to, and others that the collector knows."""
    waiting: list[Any] = list(vars(module).values())
    seen: dict[int, Any] = {}
    for value in waiting:  # it grows on the way
        if id(value) in seen:
            continue
        if type(value) is FunctionType:
            seen[id(value)] = value
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    waiting.append(cell.cell_contents)
            waiting += vars(value).values()
        elif isinstance(value, type) and value.__module__ == module.__name__:
            seen[id(value)] = value
            waiting += vars(value).values()
        elif isinstance(value, staticmethod | classmethod):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset, value.fdel]
        elif isinstance(value, partial):
            waiting.append(value.func)
    seen |= {id(one): one for one in gc.get_objects() if type(one) is FunctionType}
    return [one for one in seen.values() if type(one) is FunctionType and one.__globals__ is vars(module)]


def _by_name(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the code of functions by their qualified name, and their place among those of the same name."""
    counts: Counter[str] = Counter()
    found: dict[tuple[str, int], CodeType] = {}
    for one in sorted(with_inner(code), key=lambda code: code.co_firstlineno):
        found[one.co_qualname, counts[one.co_qualname]] = one
        counts[one.co_qualname] += 1
    return found


def _loaded(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield what runs when a text is loaded and its objects are made, as text; of functions all but their body."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            head = [ast.dump(one) for one in (*node.bases, *node.keywords, *node.decorator_list)]
            yield f"class {prefix}{node.name} {head}", node
            yield from _loaded(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function) and not (prefix and MAKING.fullmatch(node.name)):
            defaults = filter(None, (*node.args.defaults, *node.args.kw_defaults))
            head = [ast.dump(one) for one in (*node.decorator_list, *defaults)]
            yield f"{type(node)} {prefix}{node.name} {head}", node
        else:
            yield prefix + ast.dump(node), node


def _defined_here(body: list[ast.stmt]) -> frozenset[str]:
    return frozenset(node.name for node in body if isinstance(node, Definition))


def _run_new(module: ModuleType, edit: Edit, make: Compile, back: ExitStack) -> None:
    old = ast.parse(edit.before).body
    known, defined = {ast.dump(node) for node in old}, _defined_here(old)
    new = [
        node
        for node in ast.parse(edit.after).body
        if ast.dump(node) not in known and getattr(node, "name", "") not in defined
    ]
    if new:
        names = {name for node in new for name in (*(one for one, _ in imported(node)), getattr(node, "name", None))}
        before = {name: vars(module).get(name, _ABSENT) for name in names if name is not None}
        back.callback(_globals_back, vars(module), before)
        exec(make(_alone(edit.after, new), str(edit.file)), vars(module))


def _alone(text: str, nodes: list[ast.stmt]) -> str:
    """Return the statements of a text alone, on the lines that they have in it."""
    kept = {line for node in nodes for line in lines_of(node)}
    return "\n".join(line if at in kept else "" for at, line in enumerate(text.split("\n"), 1))


def _globals_back(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = value


def _put_lines(file: str, lines: Any) -> None:
    """Have tracebacks, and who reads the module, find other lines of a file; None for its own."""
    if lines is None:
        linecache.cache.pop(file, None)
    else:
        linecache.cache[file] = lines
