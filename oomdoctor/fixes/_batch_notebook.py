"""The cells as one program, read for the numbers in it: where the value of an expression is written down.

A batch size, the longest sequence or the size of an image is most often a name that another cell binds. Names are
followed by their text through assignments, parameters, dictionaries, classes and arguments of the command line, to the
literal that a person would edit. What is computed is not followed: there is no number to edit then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from oomdoctor.fixes._dataflow import Loop, ancestors, bound, loop_at, own, parsed
from oomdoctor.model.evidence import TrainingLoop
from oomdoctor.model.session import Cell, Cells

__all__ = ["Book", "Function", "Number", "Page", "Place", "call_name", "calls", "literal"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST: Final = 8
_EMPTY: Final = ast.Module(body=[], type_ignores=[])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Page:
    """One cell and its tree; a cell that is not Python has an empty one."""

    cell: Cell
    tree: ast.Module


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where an expression stands: within a function, or at the top level from ``line`` on."""

    page: Page
    function: Function | None = None
    line: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Number:
    """A whole number that is written down in a cell, and the name that it is bound to, if any."""

    page: Page
    node: ast.Constant
    name: str | None = None

    @property
    def value(self) -> int:
        """The number."""
        return int(str(self.node.value))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Book:
    """All cells, the failing one last."""

    pages: tuple[Page, ...]

    @classmethod
    def read(cls, cells: Cells) -> Book:
        """Read the cells."""
        return cls(pages=tuple(Page(cell=cell, tree=parsed(cell.source) or _EMPTY) for cell in cells.history))

    @property
    def failing(self) -> Page:
        """The cell that ran out of memory."""
        return self.pages[-1]

    def page(self, number: int) -> Page:
        """Return the cell of this number.

        Raises:
            KeyError: there is none.
        """
        return {page.cell.number: page for page in self.pages}[number]

    def functions(self) -> Iterator[tuple[Page, Function]]:
        """Yield every function and method of the cells."""
        for page in self.pages:
            yield from ((page, node) for node in ast.walk(page.tree) if isinstance(node, _FUNCTIONS))

    def function(self, name: str) -> tuple[Page, Function] | None:
        """Return the last function of the top level called ``name``."""
        found = [(page, n) for page in self.pages for n in page.tree.body if isinstance(n, _FUNCTIONS)]
        return next((one for one in reversed(found) if one[1].name == name), None)

    def loop(self, facts: TrainingLoop) -> tuple[Place, Loop] | None:
        """Return the loop that ``facts`` are of, and where it stands."""
        page = self.page(facts.cell)
        found = loop_at(page.tree, facts.line)
        return None if found is None else (self.place(page, found), found)

    def place(self, page: Page, node: ast.AST) -> Place:
        """Return where ``node`` of ``page`` stands."""
        path = ancestors(page.tree, node)
        function = next((one for one in reversed(path) if isinstance(one, _FUNCTIONS)), None)
        return Place(page=page, function=function, line=getattr(node, "lineno", 1))

    def binding(self, name: str, at: Place) -> tuple[ast.stmt, Place] | None:
        """Return the statement of the top level that bound ``name`` last before ``at``, and where it stands."""
        for page in reversed(self.pages[: self.pages.index(at.page) + 1] if at.function is None else self.pages):
            for node in reversed(page.tree.body):
                if page is at.page and at.function is None and node.lineno >= at.line:
                    continue
                if _binds(node, name):
                    return node, Place(page=page, line=node.lineno)
        return None

    def value(self, name: str, at: Place) -> tuple[ast.expr, Place] | None:
        """Return the expression that ``name`` was last assigned before ``at``, or that is passed for it."""
        given = self.values(name, at)
        return given[0] if len(given) == 1 else None

    def values(self, name: str, at: Place) -> list[tuple[ast.expr, Place]]:
        """Return the expressions that ``name`` may stand for at ``at``: several where calls differ."""
        if at.function is not None and name in _parameters(at.function) | bound(at.function):
            return self._local(name, at, at.function)
        found = self.binding(name, at)
        if found is None:
            return []
        value = _assigned(found[0], name)
        return [(value, found[1])] if value is not None else []

    def _local(self, name: str, at: Place, function: Function) -> list[tuple[ast.expr, Place]]:
        made = [node for node in own_statements(function) if _binds(node, name)]
        if made:
            value = _assigned(made[-1], name) if len(made) == 1 else None
            return [(value, at)] if value is not None else []
        return list(self._passed(name, at.page, function))

    def _passed(self, name: str, page: Page, function: Function) -> Iterator[tuple[ast.expr, Place]]:
        default = _default(function, name)
        uses = [
            (call, self.place(where, call))
            for where in self.pages
            for call in calls(where.tree)
            if call_name(call).rpartition(".")[2] == function.name
        ]
        omitted = not uses
        for call, place in uses:
            given = _argument(call, function, name)
            omitted = omitted or given is None
            if given is not None:
                yield given, place
        if omitted and default is not None:
            yield default, Place(page=page, line=function.lineno)

    def numbers(self, expr: ast.expr, at: Place, depth: int = _DEEPEST, name: str | None = None) -> list[Number]:
        """Return the literals that ``expr`` stands for at ``at``; empty if one of its values is not written down."""
        if isinstance(expr, ast.Constant):
            return [Number(page=at.page, node=expr, name=name)] if type(expr.value) is int else []
        if depth == 0:
            return []
        if isinstance(expr, ast.Name):
            known = [self.numbers(value, place, depth - 1, expr.id) for value, place in self.values(expr.id, at)]
        elif isinstance(expr, ast.Attribute | ast.Subscript):
            known = [self.numbers(value, place, depth - 1) for value, place in self._member(expr, at)]
        else:
            return []
        return [one for found in known for one in found] if all(known) else []

    def constant(self, expr: ast.expr, at: Place, depth: int = _DEEPEST) -> ast.Constant | None:
        """Return what ``expr`` stands for at ``at`` where the cells write it out, the same wherever they bind it."""
        with suppress(ValueError):
            return ast.Constant(ast.literal_eval(expr))
        if depth == 0 or not isinstance(expr, ast.Name | ast.Attribute | ast.Subscript):
            return None
        given = self._bindings(expr.id, at) if isinstance(expr, ast.Name) else self._member(expr, at)
        known = [None if value is None else self.constant(value, place, depth - 1) for value, place in given]
        agree = None not in known and len({repr(one.value) for one in known if one is not None}) == 1
        return known[0] if agree else None

    def _bindings(self, name: str, at: Place) -> Sequence[tuple[ast.expr | None, Place]]:
        """Return what each statement binds ``name`` to, None where that is no expression; unlike ``values``, of all."""
        if at.function is not None and name in _parameters(at.function) | bound(at.function):
            return self._local(name, at, at.function)
        found = [(page, node) for page in self.pages for node in page.tree.body if _binds(node, name)]
        return [(_assigned(node, name), Place(page=page, line=node.lineno)) for page, node in found]

    def _member(self, expr: ast.Attribute | ast.Subscript, at: Place) -> list[tuple[ast.expr, Place]]:
        """Return what an attribute of a settings object or an item of a settings dictionary was given."""
        key = expr.attr if isinstance(expr, ast.Attribute) else getattr(expr.slice, "value", None)
        if not isinstance(key, str) or not isinstance(expr.value, ast.Name):
            return []
        found = self.binding(expr.value.id, at)
        if found is not None and isinstance(found[0], ast.ClassDef):
            return _of_class(found[0], key, found[1])
        out: list[tuple[ast.expr, Place]] = []
        for value, place in self.values(expr.value.id, at):
            out += self._of_object(value, key, place)
        return out

    def _of_object(self, value: ast.expr, key: str, at: Place) -> list[tuple[ast.expr, Place]]:
        if isinstance(value, ast.Dict):
            return [
                (item, at)
                for name, item in zip(value.keys, value.values, strict=True)
                if isinstance(name, ast.Constant) and name.value == key
            ]
        if not isinstance(value, ast.Call):
            return []
        if given := [keyword.value for keyword in value.keywords if keyword.arg == key]:
            return [(given[0], at)]
        if call_name(value).endswith("parse_args"):
            return [(one, self.place(page, one)) for page in self.pages for one in _argument_defaults(page.tree, key)]
        made = self.binding(call_name(value), at)
        return _of_class(made[0], key, made[1]) if made and isinstance(made[0], ast.ClassDef) else []


def call_name(node: ast.AST) -> str:
    """Return the dotted name of what is called, empty where it is not a plain name."""
    if isinstance(node, ast.Call):
        return call_name(node.func)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = call_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield every call within ``tree``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def literal(node: ast.AST | None) -> int | None:
    """Return the whole number that ``node`` is, None if it is none."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def own_statements(function: Function) -> Iterator[ast.stmt]:
    """Yield the statements of ``function``, those of functions in it left out."""
    for statement in function.body:
        yield from (node for node in own(statement) if isinstance(node, ast.stmt))


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return any(isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store) for part in own(node))


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return the expression that ``node`` assigns to ``name``; the whole value where it is unpacked from one."""
    if isinstance(node, ast.AnnAssign):
        return node.value
    if not isinstance(node, ast.Assign):
        return None
    for target in node.targets:
        if isinstance(target, ast.Name) and target.id == name:
            return node.value
        if isinstance(target, ast.Tuple | ast.List):
            names = [part.id if isinstance(part, ast.Name) else "" for part in target.elts]
            if name in names and isinstance(node.value, ast.Tuple) and len(names) == len(node.value.elts):
                return node.value.elts[names.index(name)]
            if name in names:
                return node.value
    return None


def _parameters(function: Function) -> set[str]:
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def _positional(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args]


def _default(function: Function, name: str) -> ast.expr | None:
    names = [part.arg for part in _positional(function)]
    given = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
    for part, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if value is not None:
            given[part.arg] = value
    return given.get(name)


def _argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    names = [part.arg for part in _positional(function)]
    if names[:1] == ["self"]:
        names = names[1:]
    passed: dict[str | None, ast.expr] = dict(zip(names, _unstarred(call.args), strict=False))
    passed |= {keyword.arg: keyword.value for keyword in call.keywords}
    return passed.get(name)


def _unstarred(args: Sequence[ast.expr]) -> list[ast.expr]:
    at = next((index for index, one in enumerate(args) if isinstance(one, ast.Starred)), len(args))
    return list(args[:at])


def _of_class(node: ast.ClassDef, key: str, at: Place) -> list[tuple[ast.expr, Place]]:
    found = [_assigned(part, key) for part in node.body if _binds(part, key)]
    return [(value, at) for value in found if value is not None]


def _argument_defaults(tree: ast.Module, key: str) -> Iterator[ast.expr]:
    """Yield the default of the command line's argument that is stored as ``key``."""
    for call in calls(tree):
        names = [str(arg.value).lstrip("-").replace("-", "_") for arg in call.args if isinstance(arg, ast.Constant)]
        if call_name(call).endswith("add_argument") and key in names:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == "default")
