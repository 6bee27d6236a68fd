"""The cells as one program, read for the numbers in it: where the value of an expression is written down.

A batch size, the longest sequence or the size of an image is most often a name that another cell binds. Names are
followed by their text through assignments, parameters, dictionaries, classes and arguments of the command line, to the
literal that a person would edit. What is computed is not followed: there is no number to edit then.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program.dataflow import ancestors, assigned, bound, loop_at
from oomdoctor.program.magics import Function, Loop, tree_of
from oomdoctor.program.names import arguments_of, bound_by, call_name, own_nodes, parameters_of, root_of, target_names

SETTINGS: Final = re.compile(
    r"^((types\.)?SimpleNamespace|(argparse\.)?Namespace|dict|(\w+\.)?(EasyDict|edict|AttrDict|DotDict|Munch|ConfigDict)"
    r"|OmegaConf\.create)$"
)
"""Calls that make settings which can be changed of the settings that they are given."""

_DEEPEST: Final = 8


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
    """A whole number that is written down in a cell, which may be one that a condition chooses.

    ``entry`` is what the cells read it by where it is part of some settings: ``args.batch_size``.
    """

    page: Page
    node: ast.Constant
    name: str | None = None
    entry: str | None = None
    is_choice: bool = False

    @property
    def value(self) -> int:
        """The number."""
        return int(str(self.node.value))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Book:
    """All cells, the failing one last."""

    pages: tuple[Page, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def read(cls, cells: Cells) -> Book:
        """Read the cells."""
        return cls(pages=tuple(Page(cell=cell, tree=tree_of(cell.source)) for cell in cells.history))

    @property
    def failing(self) -> Page:
        """The cell that ran out of memory."""
        return self.pages[-1]

    def page(self, number: int) -> Page:
        """Return the cell of this number, a ``KeyError`` where there is none."""
        return {page.cell.number: page for page in self.pages}[number]

    def functions(self) -> Iterator[tuple[Page, Function]]:
        """Yield every function and method of the cells."""
        for page in self.pages:
            yield from ((page, node) for node in ast.walk(page.tree) if isinstance(node, Function))

    def function(self, name: str) -> tuple[Page, Function] | None:
        """Return the last function of the top level called ``name``."""
        found = [(page, n) for page in self.pages for n in page.tree.body if isinstance(n, Function)]
        return next((one for one in reversed(found) if one[1].name == name), None)

    def loop(self, facts: TrainingLoop) -> tuple[Place, Loop] | None:
        """Return the loop that ``facts`` are of, and where it stands."""
        page = self.page(facts.cell)
        found = loop_at(page.tree, facts.line)
        return None if found is None else (self.place(page, found), found)

    def place(self, page: Page, node: ast.AST) -> Place:
        """Return where ``node`` of ``page`` stands."""
        path = ancestors(page.tree, node)
        function = next((one for one in reversed(path) if isinstance(one, Function)), None)
        return Place(page=page, function=function, line=getattr(node, "lineno", 1))

    def _before(self, at: Place) -> Iterator[tuple[Page, ast.stmt]]:
        """Yield the statements of the top level that ran before ``at``, the last first: a module sees its own alone."""
        pages = [page for page in self.pages if page.cell.file is None] if at.page.cell.file is None else [at.page]
        for page in reversed(pages if at.function is not None else pages[: pages.index(at.page) + 1]):
            for node in reversed(list(_unguarded(page))):
                if page is not at.page or at.function is not None or node.lineno < at.line:
                    yield page, node

    def binding(self, name: str, at: Place) -> tuple[ast.stmt, Place] | None:
        """Return the statement of the top level that bound ``name`` last before ``at``, and where it stands."""
        found = ((node, Place(page=page, line=node.lineno)) for page, node in self._before(at) if binds(node, name))
        return next(found, None)

    def values(self, name: str, at: Place) -> list[tuple[ast.expr, Place]]:
        """Return the expressions that ``name`` may stand for at ``at``: several where calls differ."""
        function, where = at.function, at
        if function is not None and name in parameters_of(function) | bound(function):
            made = [node for node in own_nodes(function.body) if isinstance(node, ast.stmt) and binds(node, name)]
            if not made:
                return list(self._passed(name, at.page, function))
            node = made[0] if len(made) == 1 else None
        else:
            node, where = self.binding(name, at) or (None, at)
        value = _assigned(node, name) if node is not None else None
        return [(value, where)] if value is not None else []

    def of_self(self, name: str, at: Place) -> list[tuple[ast.expr, Place]]:
        """Return what methods of the class that ``at`` stands in assign to ``self.name``."""
        path = ancestors(at.page.tree, at.function) if at.function is not None else ()
        owner = next((node for node in reversed(path) if isinstance(node, ast.ClassDef)), None)
        methods = [node for node in owner.body if isinstance(node, Function)] if owner is not None else []
        return [
            (node.value, Place(page=at.page, function=method))
            for method in methods
            for node in own_nodes(method.body)
            if isinstance(node, ast.Assign) and any(ast.unparse(one) == f"self.{name}" for one in node.targets)
        ]

    def _passed(self, name: str, page: Page, function: Function) -> Iterator[tuple[ast.expr, Place]]:
        default = _default_of(function, name)
        called = function.name
        if called == "__init__":
            called = next(
                (n.name for n in ast.walk(page.tree) if isinstance(n, ast.ClassDef) and function in n.body), ""
            )
        uses = [
            (call, self.place(where, call))
            for where in self.pages
            for call in calls(where.tree)
            if call_name(call).rpartition(".")[2] == called
        ]
        given = [(arguments_of(call, function).get(name), place) for call, place in uses]
        yield from ((value, place) for value, place in given if value is not None)
        if default is not None and (not given or any(value is None for value, _ in given)):
            yield default, Place(page=page, line=function.lineno)

    def numbers(
        self, expr: ast.expr, at: Place, depth: int = _DEEPEST, name: str | None = None, entry: str | None = None
    ) -> list[Number]:
        """Return the literals that ``expr`` stands for at ``at``; empty if one of its values is not written down."""
        if isinstance(expr, ast.Constant):
            return [Number(page=at.page, node=expr, name=name, entry=entry)] if type(expr.value) is int else []
        if depth == 0:
            return []
        expr = _looked_up(expr)
        if isinstance(expr, ast.IfExp):
            known = [self.numbers(branch, at, depth - 1, name, entry) for branch in (expr.body, expr.orelse)]
            known = [[replace(one, is_choice=True) for one in found] for found in known]
        elif isinstance(expr, ast.Name):
            known = [self.numbers(value, place, depth - 1, expr.id) for value, place in self.values(expr.id, at)]
        elif isinstance(expr, ast.Attribute | ast.Subscript) and (others := self._other_names(expr, at)):
            known = [self.numbers(other, place, depth - 1) for other, place in others]
        elif isinstance(expr, ast.Attribute | ast.Subscript):
            text = ast.unparse(expr)
            known = [self.numbers(value, place, depth - 1, entry=text) for value, place in self._member(expr, at)]
        else:
            return []
        return [one for found in known for one in found] if all(known) else []

    def _other_names(self, expr: ast.Attribute | ast.Subscript, at: Place) -> list[tuple[ast.expr, Place]]:
        """Return ``cfg.size`` for ``c.size`` where ``c`` is another name of ``cfg``, such as a parameter."""
        whole, key = expr.value, key_of(expr)
        if not isinstance(whole, ast.Name) or key is None or self._set(whole, key, at) is not None:
            return []
        given = self.values(whole.id, at)
        if not all(isinstance(value, ast.Name | ast.Attribute | ast.Subscript) for value, _ in given):
            return []
        copies = [(ast.parse(ast.unparse(expr), mode="eval").body, value, place) for value, place in given]
        for copy, value, _ in copies:
            copy.value = value  # type: ignore[attr-defined]
        return [(copy, place) for copy, _, place in copies]

    def _member(self, expr: ast.Attribute | ast.Subscript, at: Place) -> list[tuple[ast.expr, Place]]:
        key = key_of(expr)
        if key is None:
            return []
        whole = expr.value
        if (given := self._set(whole, key, at)) is not None:
            return [given]
        if isinstance(whole, ast.Name):
            found = self.binding(whole.id, at)
            if found is not None and isinstance(found[0], ast.ClassDef):
                return [(value, found[1]) for value in _of_class(found[0], key)]
        return [one for value, place in self._wholes(whole, at) for one in self._of_object(value, key, place)]

    def _wholes(self, whole: ast.expr, at: Place) -> list[tuple[ast.expr, Place]]:
        if isinstance(whole, ast.Name):
            return self.values(whole.id, at)
        return self._member(whole, at) if isinstance(whole, ast.Attribute | ast.Subscript) else [(whole, at)]

    def _set(self, whole: ast.expr, key: str, at: Place) -> tuple[ast.expr, Place] | None:
        """Return what ``whole[key]`` was last set to by a statement of the top level, None where none sets it.

        One that sets it in another way gives something that is no number.
        """
        root, text = root_of(whole, through_calls=False), ast.unparse(whole)
        if at.function is not None and root in parameters_of(at.function) | bound(at.function):
            return None
        for page, node in self._before(at):
            if any(_sets_entry(part, text, key) for part in own_nodes([node])):
                value = node.value if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
                return value or ast.Constant(None), Place(page=page, line=node.lineno)
            if binds(node, root):
                return None
        return None

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
        if call_name(value).endswith(("parse_args", "parse_known_args")):
            option = f"--{key}".replace("_", "-"), f"--{key}"
            trees = [page.tree for page in self.pages]
            if any(_is_given(tree, option) for tree in trees):
                return []
            return [(one, self.place(page, one)) for page in self.pages for one in _argument_defaults(page.tree, key)]
        if SETTINGS.match(call_name(value)):
            inner = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg is None)]
            return [
                found
                for one in inner
                for whole, there in self._wholes(one, at)
                for found in self._of_object(whole, key, there)
            ]
        made = self.binding(call_name(value), at)
        if made is None or not isinstance(made[0], ast.ClassDef):
            return []
        return [(one, made[1]) for one in _of_class(made[0], key)]


def _unguarded(page: Page) -> Iterator[ast.stmt]:
    """Yield the statements of the top level, those under ``if __name__ == "__main__"`` among them where it holds."""
    for node in page.tree.body:
        is_main = isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"
        if isinstance(node, ast.If) and is_main:
            yield from node.body if page.cell.file is None else ()
        else:
            yield node


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield every call within ``tree``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def literal(node: ast.AST | None) -> int | None:
    """Return the whole number that ``node`` is, None if it is none."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def key_of(expr: ast.expr) -> str | None:
    """Return the name of the attribute or item that ``expr`` takes, None where it takes none by name."""
    if isinstance(expr, ast.Attribute):
        return expr.attr
    key = getattr(expr.slice, "value", None) if isinstance(expr, ast.Subscript) else None
    return key if isinstance(key, str) else None


def _looked_up(expr: ast.expr) -> ast.expr:
    """Return ``config["size"]`` for ``config.get("size", 8)``."""
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute) and expr.func.attr == "get" and expr.args:
        return ast.Subscript(value=expr.func.value, slice=expr.args[0], ctx=ast.Load())
    return expr


def _sets_entry(node: ast.AST, whole: str, key: str) -> bool:
    return (
        isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and key_of(node) == key
        and ast.unparse(node.value) == whole
    )


def _is_given(tree: ast.AST, options: tuple[str, ...]) -> bool:
    """Whether a list of arguments gives one of ``options``, so that its default does not count."""
    lists = (node for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple))
    texts = (str(one.value) for node in lists for one in node.elts if isinstance(one, ast.Constant))
    return any(text.partition("=")[0] in options for text in texts)


def binds(node: ast.stmt, name: str) -> bool:
    """Tell whether ``node`` binds ``name``."""
    return name in bound_by(node)


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return the expression that ``node`` assigns to ``name``; the whole value where it is unpacked from one."""
    if isinstance(node, ast.If):
        first, second = (_assigned_last(block, name) for block in (node.body, node.orelse))
        return ast.IfExp(test=node.test, body=first, orelse=second)
    return next((value for target, value in assigned(node) if name in target_names(target)), None)


def _assigned_last(block: Sequence[ast.stmt], name: str) -> ast.expr:
    """Return what a branch assigns to ``name``: what it was before where the branch leaves it alone."""
    made = next((node for node in reversed(block) if binds(node, name)), None)
    if made is None:
        return ast.Name(id=name, ctx=ast.Load())
    return _assigned(made, name) or ast.Constant(None)


def _default_of(function: Function, name: str) -> ast.expr | None:
    args = function.args
    names = [part.arg for part in (*args.posonlyargs, *args.args)]
    given: dict[str, ast.expr | None] = dict(zip(names[::-1], args.defaults[::-1], strict=False))
    given |= {part.arg: value for part, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    return given.get(name)


def _of_class(node: ast.ClassDef, key: str) -> list[ast.expr]:
    found = [_assigned(part, key) for part in node.body if binds(part, key)]
    return [value for value in found if value is not None]


def _argument_defaults(tree: ast.Module, key: str) -> Iterator[ast.expr]:
    """Yield the default of the command line's argument that is stored as ``key``."""
    for call in calls(tree):
        names = [str(arg.value).lstrip("-").replace("-", "_") for arg in call.args if isinstance(arg, ast.Constant)]
        if call_name(call).endswith("add_argument") and key in names:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == "default")
