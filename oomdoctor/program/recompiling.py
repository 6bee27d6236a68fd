"""Puts the functions of a changed module in the place of those that are loaded, and back.

The very function objects get the code of the changed text, so that whoever has bound one (``from train import fit``, a
method of an object, a wrapper of a decorator, a closure) runs the change. What the text newly imports or defines is
made in the module. A change of anything else that ran when the module was imported is refused: the live objects would
not follow it. The file itself is left as it is.
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
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeGuard, TypeVar

from oomdoctor.errors import StateError
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import shown_path
from oomdoctor.program.compiled import compile_python, lines_of, with_inner
from oomdoctor.program.modules import note_text, noted_text
from oomdoctor.program.names import imported

Compile = Callable[[str, str], CodeType]
"""Makes the code of a text of a file."""

MAKING: Final = re.compile(r"__(?!call__)\w+__|setup|reset_parameters|extra_repr")
"""Names of methods that run when an object is made, or may."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_ABSENT: Final = object()
Found = TypeVar("Found")


def why_not(before: str, after: str) -> str | None:
    """Return what of a change the loaded module could not follow, None where it can follow all of it."""
    try:
        old, new = ast.parse(before), ast.parse(after)
    except (SyntaxError, ValueError):
        return "it is not Python"
    defined = _defined_here(old.body)
    was = dict(_loaded(old.body))
    now = dict(_loaded(one for one in new.body if not _is_definition(one) or one.name in defined))
    added = (
        node for text, node in now.items() if text not in was and not isinstance(node, ast.Import | ast.ImportFrom)
    )
    gone = (node for text, node in was.items() if text not in now and not _is_definition(node))
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
    modules = [one for one in list(sys.modules.values()) if type(one) is ModuleType and _file_of(one) == file]
    if (why := why_not(edit.before, edit.after)) is not None:
        raise StateError(f"{shown_path(file)}: {why}")
    swaps = [swap for module in modules for swap in _swaps(module, edit, make)]
    back = ExitStack()
    back.callback(_put_text, file, noted_text(file), linecache.cache.get(file))
    for function, code, defaults in swaps:
        was = function.__code__, function.__defaults__, function.__kwdefaults__
        back.callback(_put_code, function, *was)
        _put_code(function, code, *(defaults or was[1:]))
    _put_text(file, edit.after, (len(edit.after), None, edit.after.splitlines(keepends=True), file))
    try:
        for module in modules:
            _run_new(module, edit, make, back)
    except BaseException:
        back.close()
        raise
    return back.close


@contextmanager
def importing(texts: Mapping[str, str], compiled: Compile | None = None) -> Iterator[None]:
    """Have modules that are imported in the body run another text than that of their file.

    Args:
        texts: the text by the file.
    """
    finder = _Finder(texts, compiled or compile_python)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds modules where Python does, and has some run another text."""

    def __init__(self, texts: Mapping[str, str], make: Compile) -> None:
        self._texts, self._make = texts, make

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or spec.origin not in self._texts:
            return None
        spec.loader = _Loader(fullname, spec.origin, self._texts[spec.origin], self._make)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module from another text; afterwards it is one of its file."""

    def __init__(self, name: str, file: str, text: str, make: Compile) -> None:
        super().__init__(name, file)
        self._text, self._make = text, make

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self._make(self._text, str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        plain = SourceFileLoader(module.__name__, str(self.path))
        module.__loader__ = plain
        if module.__spec__ is not None:
            module.__spec__.loader = plain


def _file_of(module: ModuleType) -> Any:
    return vars(module).get("__file__")


def _swaps(
    module: ModuleType, edit: Edit, make: Compile
) -> Iterator[tuple[FunctionType, CodeType, tuple[Any, Any] | None]]:
    """Yield each loaded function of a module with its other code, and with its defaults where they are others."""
    file = str(edit.file)
    old_tree, new_tree = ast.parse(edit.before), ast.parse(edit.after)
    old, new = _by_name(compile_python(edit.before, file)), _by_name(make(edit.after, file))
    before, after = _numbered(_defined(old_tree.body)), _numbered(_defined(new_tree.body))
    names = {(code.co_qualname, code.co_firstlineno): key for key, code in old.items()}
    for function in _functions_of(module):
        code = function.__code__
        key = names.get((code.co_qualname, code.co_firstlineno)) if code.co_filename == file else None
        if key is None or key not in new:
            continue
        if new[key].co_freevars != code.co_freevars:
            raise StateError(f"`{code.co_qualname}` of {shown_path(file)} would close over other names")
        defaults = None
        if key in before and key in after and _defaults(before[key]) != _defaults(after[key]):
            defaults = _values(after[key])
        yield function, new[key], defaults


def _functions_of(module: ModuleType) -> list[FunctionType]:
    """Return the functions of a module: those that it leads to, and others that the collector knows."""
    waiting: list[Any] = list(vars(module).values())
    seen: dict[int, Any] = {}
    for value in waiting:  # it grows on the way
        if id(value) in seen:
            continue
        if type(value) is FunctionType:
            seen[id(value)] = value
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
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


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _numbered(named: Iterable[tuple[str, Found]]) -> dict[tuple[str, int], Found]:
    """Return what has names by its name, and its place among those of the same name."""
    counts: Counter[str] = Counter()
    found: dict[tuple[str, int], Found] = {}
    for name, one in named:
        found[name, counts[name]] = one
        counts[name] += 1
    return found


def _by_name(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the code of functions by their qualified name."""
    return _numbered((one.co_qualname, one) for one in sorted(with_inner(code), key=lambda code: code.co_firstlineno))


_Node = ast.FunctionDef | ast.AsyncFunctionDef


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, _Node]]:
    """Yield the functions and methods that a text defines when it is loaded, by their qualified name."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node


def _defaults(node: _Node) -> list[str]:
    return [ast.dump(one) if one is not None else "" for one in (*node.args.defaults, *node.args.kw_defaults)]


def _values(node: _Node) -> tuple[Any, Any]:
    """Return the defaults of a function that writes them out."""
    by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    given = tuple(ast.literal_eval(one) for one in node.args.defaults)
    return given or None, {arg.arg: ast.literal_eval(one) for arg, one in by_name if one is not None} or None


def _loaded(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield what runs when a text is loaded and its objects are made, as text; of functions all but their body."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            head = [ast.dump(one) for one in (*node.bases, *node.keywords, *node.decorator_list)]
            yield f"class {prefix}{node.name} {head}", node
            yield from _loaded(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, _FUNCTIONS) and not (prefix and MAKING.fullmatch(node.name)):
            computed = [] if _are_written_out(node) else _defaults(node)
            head = [ast.dump(one) for one in node.decorator_list]
            yield f"{type(node)} {prefix}{node.name} {head} {computed}", node
        else:
            yield prefix + ast.dump(node), node


def _are_written_out(node: _Node) -> bool:
    with suppress(ValueError):
        _values(node)
        return True
    return False


def _is_definition(node: ast.stmt) -> TypeGuard[ast.ClassDef | _Node]:
    return isinstance(node, (ast.ClassDef, *_FUNCTIONS))


def _defined_here(body: list[ast.stmt]) -> frozenset[str]:
    return frozenset(node.name for node in body if _is_definition(node))


def _run_new(module: ModuleType, edit: Edit, make: Compile, back: ExitStack) -> None:
    """Run what the changed text newly imports and defines."""
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


def _put_code(function: FunctionType, code: CodeType, defaults: Any, keyword_defaults: Any) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keyword_defaults


def _put_text(file: str, text: str | None, lines: Any) -> None:
    """Note a text in the place of a file's, and its lines for tracebacks; None for none."""
    note_text(file, text)
    if lines is None:
        linecache.cache.pop(file, None)
    else:
        linecache.cache[file] = lines
