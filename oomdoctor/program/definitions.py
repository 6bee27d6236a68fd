"""The cells as one program: which definition of a name is live, what the failing cell runs, and the calls it makes.

Names are followed by their text alone, as the cells define them, the last definition winning; a function that a
variable or an attribute holds is known by what these were when the cell failed. What is called through a dictionary or
a framework is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Final

from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.site import Site
from oomdoctor.program import torch_functions
from oomdoctor.program.magics import Definition, Function, Loop, MaskedCell, mask, tree_of
from oomdoctor.program.names import arguments_of, blocks_of, bound_by, call_name, imported, imports_in, own_nodes

_LONGEST: Final = 72


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """Statements that run together: the top level of a cell (``function`` None) or the body of a function.

    ``name`` is qualified by the class, ``file`` what the module is called that it stands in, None in a cell.
    """

    cell: int
    function: Function | None
    body: tuple[ast.stmt, ...]
    name: str = ""
    file: str | None = None

    @property
    def tail(self) -> str:
        """The last part of the function's name, empty at the top level of a cell."""
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The class that the function is a method of, empty where it is none."""
        owner = self.name.rpartition(".")[0]
        return "" if owner.endswith("<locals>") else owner

    @property
    def disables_grad(self) -> bool:
        """Whether a decorator runs all of it without autograd."""
        return self.function is not None and any(
            call_name(node).rpartition(".")[2] in torch_functions.GRADLESS for node in self.function.decorator_list
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """All cells that are Python.

    Attributes:
        scopes: the top level of each cell and every live function, in the order of the cells.
        running: those of them that the failing cell runs.
        aliases: names that the program knows modules of the user's own by.
        other_names: of functions, each with that of the definition.
        arguments: for each live function the ``(parameter, argument text)`` pairs on which all its calls agree.
    """

    failing: int
    scopes: tuple[Scope, ...]
    running: tuple[Scope, ...]
    masked: Mapping[int, MaskedCell]
    arguments: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()

    def is_own(self, text: str) -> bool:
        """Whether what is called ``text`` may be a function of the program: by its name, of ``self`` or of a module."""
        root, _, rest = text.partition(".")
        return not rest or (root in {"self", *self.aliases} and "." not in rest)

    def magic_at(self, line: int) -> str | None:
        """Return IPython's own syntax at a line of the failing cell, None where the line is Python."""
        hidden = self.masked[self.failing].hidden
        return next((original for masked, original in hidden if masked.endswith(f" {line}")), None)

    def seen_from(self, scope: Scope) -> Program:
        """Return the program as a module sees it, whose own functions hide others of their name."""
        if scope.file is None:
            return self
        own = [one for one in self.scopes if one.cell == scope.cell]
        return replace(self, scopes=(*(one for one in self.scopes if one.cell != scope.cell), *own))

    def given(self, scope: Scope) -> dict[str, str]:
        """Return what stands for each parameter of a scope in all its calls, as source text."""
        return dict(self.arguments.get(scope.name, ()))

    def function(self, name: str) -> Scope | None:
        """Return the live function called ``name``, or the one method of that name."""
        functions = [scope for scope in self.scopes if scope.function is not None]
        found = [scope for scope in functions if scope.tail == name]
        found = found or [scope for scope in functions if scope.tail == self.other_names.get(name)]
        plain = [scope for scope in found if not scope.owner]
        return (plain or found)[-1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statement:
    """A simple statement, the loops that it stands in, the outermost first, and whether autograd is off there."""

    node: ast.stmt
    loops: tuple[Loop, ...]
    is_gradless: bool


@lru_cache(maxsize=16)
def read(cells: Cells) -> Program:
    """Return the cells parsed; those that are not Python count as empty."""
    masked = {cell.number: mask(cell.source) for cell in cells.history}
    trees = {cell.number: tree_of(cell.source) for cell in cells.history}
    files = {cell.number: cell.name for cell in cells.modules}
    # What a cell binds hides what an earlier cell has defined, and nothing of a module.
    live = {
        (number if number in files else None, name): (number, name, node)
        for number, tree in trees.items()
        for name, node in _bound(tree.body)
    }
    functions = [
        Scope(cell=number, function=node, body=tuple(node.body), name=name, file=files.get(number))
        for number, name, node in live.values()
        if node is not None
    ]
    tops = [Scope(cell=n, function=None, body=tuple(tree.body), file=files.get(n)) for n, tree in trees.items()]
    scopes = [*tops, *functions]
    failing = cells.failing.number
    other_names = dict(cells.other_names)
    running = _reached(failing, scopes, other_names)
    return Program(
        failing=failing,
        scopes=tuple(scopes),
        running=running,
        masked=masked,
        arguments={scope.name: _arguments(scope, scopes) for scope in functions},
        other_names=other_names,
        aliases=frozenset(
            name
            for cell in (cells.history if files else ())
            for name, home in imports_in(cell.source)
            if any(_is_file_of(home, module) for module in cells.modules)
        ),
    )


def _is_file_of(home: str, module: Cell) -> bool:
    path = "/" + home.replace(".", "/")
    return PurePath(module.file or "").as_posix().endswith((f"{path}.py", f"{path}/__init__.py"))


def statements(body: Iterable[ast.stmt], loops: tuple[Loop, ...] = (), gradless: bool = False) -> Iterator[Statement]:
    """Yield the simple statements of ``body``, not going into functions and classes defined there."""
    for node in body:
        if isinstance(node, Definition):
            continue
        within = (*loops, node) if isinstance(node, Loop) else loops
        off = gradless or (isinstance(node, ast.With | ast.AsyncWith) and any(map(is_gradless, node.items)))
        blocks = blocks_of(node)
        for block in blocks:
            yield from statements(block, within, off)
        if not blocks:
            yield Statement(node=node, loops=loops, is_gradless=off)


def bound_in_other_loops(source: str, known: Collection[str]) -> frozenset[str]:
    """Return the names that a cell binds in loops alone whose first lines are not among those that are ``known``."""
    lines, inside, outside = mask(source).text.splitlines(), set[str](), set[str]()
    for statement in statements(tree_of(source).body):
        is_other = any(lines[loop.lineno - 1].strip() not in known for loop in statement.loops)
        (inside if is_other else outside).update(bound_by(statement.node))
    return frozenset(inside - outside)


def is_gradless(item: ast.withitem) -> bool:
    """Whether a ``with`` of this runs without autograd."""
    return call_name(item.context_expr).rpartition(".")[2] in torch_functions.GRADLESS


def with_gradients(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of ``body`` that do not stand under ``no_grad``, nested functions left out."""
    return own_nodes(
        body, lambda node: isinstance(node, ast.With | ast.AsyncWith) and any(map(is_gradless, node.items))
    )


def site(kind: str, scope: Scope, node: ast.stmt | ast.expr, names: Iterable[str] = ()) -> Site:
    """Return where ``node`` of ``scope`` stands, with the first line of its text."""
    return Site(
        kind=kind,
        cell=scope.cell,
        line=node.lineno,
        end_line=node.end_lineno or node.lineno,
        text=short(ast.unparse(node).partition("\n")[0]),
        names=tuple(names),
        file=scope.file,
    )


def short(text: str) -> str:
    """Return ``text`` on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _bound(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | None]]:
    """Yield what the statements bind at their level; None for what hides an earlier function by something else."""
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
            for inner in (one for one in node.body if isinstance(one, Function)):
                yield f"{prefix}{node.name}.<locals>.{inner.name}", inner
        elif isinstance(node, ast.ClassDef):
            yield from _bound(node.body, f"{node.name}.")
        elif blocks := blocks_of(node):
            yield from (found for block in blocks for found in _bound(block, prefix))
        elif isinstance(node, ast.Assign | ast.Import | ast.ImportFrom) and not prefix:
            yield from ((name, None) for name in bound_by(node))


def _reached(failing: int, scopes: list[Scope], other_names: Mapping[str, str]) -> tuple[Scope, ...]:
    waiting = [scope for scope in scopes if scope.function is None and scope.cell == failing]
    done: list[Scope] = []
    while waiting:
        scope = waiting.pop(0)
        if scope in done:
            continue
        done.append(scope)
        called = {call_name(node).rpartition(".")[2] for node in own_nodes(scope.body) if isinstance(node, ast.Call)}
        called |= {other_names[name] for name in called & other_names.keys()}
        waiting += [one for one in scopes if one.function is not None and one.tail in called]
    return tuple(done)


def _arguments(of: Scope, scopes: list[Scope]) -> tuple[tuple[str, str], ...]:
    """Return what stands for each parameter of a function in all its calls; of ``__init__``, where objects are made."""
    called = of.owner if of.tail == "__init__" else of.tail
    seen: dict[str, set[str]] = {}
    for node in (node for scope in scopes for node in own_nodes(scope.body)):
        if of.function is not None and isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] == called:
            for parameter, value in arguments_of(node, of.function).items():
                seen.setdefault(parameter, set()).add(ast.unparse(value))
    return tuple((parameter, texts.pop()) for parameter, texts in seen.items() if len(texts) == 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call; ``name`` is empty where what is called is not a plain name."""

    cell: int
    line: int
    name: str
    _scope: Scope = field(repr=False)
    _node: ast.expr = field(repr=False)

    @property
    def tail(self) -> str:
        """The name of the method or of the function, without what it is of."""
        return self._called.attr if isinstance(self._called, ast.Attribute) else self.name

    @property
    def receiver(self) -> str:
        """The text of what a method is called on, empty for a plain function."""
        return ast.unparse(self._called.value) if isinstance(self._called, ast.Attribute) else ""

    @property
    def _called(self) -> ast.expr:
        return self._node.func if isinstance(self._node, ast.Call) else self._node

    @property
    def place(self) -> str:
        """Where it stands, and its text: ``In[3] line 7: loss.backward()``."""
        return str(site("call", self._scope, self._node))

    @property
    def text(self) -> str:
        """Its text on one line, cut where it is long."""
        return short(ast.unparse(self._node))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The texts of what is passed by position."""
        return tuple(map(ast.unparse, getattr(self._node, "args", ())))

    @property
    def keywords(self) -> Mapping[str, str]:
        """The texts of what is passed by keyword, ``**`` among them where names are passed on."""
        return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in self._keywords}

    def given(self, program: Program) -> dict[str, str]:
        """Return what stands for each parameter of the function that the call is in, where all its calls agree."""
        return program.given(self._scope)

    @property
    def literals(self) -> Mapping[str, object]:
        """What is passed by keyword, ``...`` for what is computed."""
        given = ((one.arg, one.value) for one in self._keywords if one.arg is not None)
        return {name: value.value if isinstance(value, ast.Constant) else ... for name, value in given}

    @property
    def _keywords(self) -> list[ast.keyword]:
        return self._node.keywords if isinstance(self._node, ast.Call) else []


def calls(scopes: Iterable[Scope]) -> Iterator[Call]:
    """Yield the calls of scopes, in the order of the text."""
    for scope in scopes:
        yield from (_call(scope, node) for node in own_nodes(scope.body) if isinstance(node, ast.Call))


def decorators(scopes: Iterable[Scope]) -> Iterator[Call]:
    """Yield the decorators of the functions among scopes."""
    for scope in scopes:
        if scope.function is not None:
            yield from (_call(scope, node) for node in scope.function.decorator_list)


def text_of(scope: Scope) -> str:
    """Return the text of a scope's statements, as Python writes them."""
    return "\n".join(map(ast.unparse, scope.body))


def imports_of(program: Program) -> dict[str, str]:
    """Return what the names stand for that the cells import, from wherever."""
    return dict(pair for scope in program.scopes for node in own_nodes(scope.body) for pair in imported(node))


@lru_cache(maxsize=16)
def imports_library(program: Program, library: str) -> bool:
    """Return whether the cells import a library, or a part of it."""
    return any(home.partition(".")[0] == library for home in imports_of(program).values())


def _call(scope: Scope, node: ast.expr) -> Call:
    return Call(cell=scope.cell, line=node.lineno, name=call_name(node), _scope=scope, _node=node)
