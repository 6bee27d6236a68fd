"""What of the notebook the failing cell rests on: the cells that made the names that it uses, and what those use.

A notebook has cells of other experiments. A hook, an attention layer or a data set of theirs is not to be blamed for
this failure. So statements are followed backwards from the failing cell by the names that they bind and mention.
Limits: what a function changes in its globals, and objects that are reached through others, are followed by name only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

from oomdoctor.program.definitions import Function, Program, Scope
from oomdoctor.program.names import FirstUse, first_uses, own_nodes, root_of

__all__ = ["Ground", "ground"]

_Block: Final = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """Parts of a program.

    Attributes:
        reach: what the failing cell runs or may: itself, what it calls, and methods of the classes that it rests on,
            which a framework or a model calls, with what those call.
        basis: the reach, and the statements of earlier cells that made what it uses, with what those call.
    """

    reach: tuple[Scope, ...]
    basis: tuple[Scope, ...]


@lru_cache(maxsize=1)
def ground(program: Program) -> Ground:
    """Return what the failing cell of ``program`` rests on."""
    definitions = _definitions(program)
    trail = _Trail(definitions, _mentioned(program.running, definitions))
    before: list[Scope] = []
    for scope in reversed([one for one in program.scopes if one.function is None and one.cell != program.failing]):
        if kept := trail.back(scope.body):
            before.insert(0, replace(scope, body=tuple(kept)))
    basis = (*program.running, *before)
    named = _closed(definitions, _mentioned(basis, definitions) | _of_modules(basis, program))
    functions = [scope for scope in program.scopes if scope.function is not None and _owner(scope.function) in named]
    methods = [scope for scope in functions if scope.function is not None and scope.function.in_class]
    called = _closed(definitions, _mentioned(methods, definitions))
    helpers = [scope for scope in functions if scope.function is not None and _owner(scope.function) in called]
    reach = _once((*program.running, *methods, *helpers))
    return Ground(reach=reach, basis=_once((*reach, *before, *functions)))


class _Trail:
    """The way back through statements: one that binds or changes a needed name is kept, and what it reads is needed."""

    def __init__(self, definitions: Mapping[str, ast.stmt], names: set[str]) -> None:
        self._definitions = definitions
        self._needed = _closed(definitions, names)

    def back(self, body: Iterable[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of ``body`` that matter, blocks with what matters in them."""
        kept = [found for node in reversed(list(body)) if (found := self._cut(node)) is not None]
        return kept[::-1]

    def _cut(self, node: ast.stmt) -> ast.stmt | None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return None  # definitions are found by their name
        if isinstance(node, _Block):
            return self._cut_block(node)
        if self._needed.isdisjoint(_changed(node)):
            return None
        self._need(_reads([node]), without=_rebound(node))
        return node

    def _cut_block(self, node: ast.stmt) -> ast.stmt | None:
        """Return a copy of a loop, a branch or the like with the statements in it that matter."""
        block: Any = copy(node)
        matters = False
        for name in ("finalbody", "orelse", "handlers", "cases", "body"):
            below = getattr(node, name, [])
            if name in {"handlers", "cases"}:
                kept = [inner for one in below if (inner := self._cut_inner(one)) is not None]
            else:
                kept = self.back(below)
            matters = matters or bool(kept)
            if below:
                setattr(block, name, kept)
        header = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr | ast.withitem)]
        if not matters and self._needed.isdisjoint({name for part in header for name in _stored(part)}):
            return None
        self._need({name for part in header for name in _loaded(part)})
        if not getattr(block, "body", True):
            block.body = [ast.copy_location(ast.Pass(), node)]
        return cast("ast.stmt", block)

    def _cut_inner(self, one: ast.AST) -> ast.stmt | None:
        """Return a copy of an ``except`` or a ``case`` with what matters in it."""
        inner: Any = copy(one)
        inner.body = self.back(inner.body)
        return cast("ast.stmt", inner) if inner.body else None

    def _need(self, names: AbstractSet[str], without: AbstractSet[str] = frozenset()) -> None:
        self._needed = _closed(self._definitions, (self._needed - without) | names)


def _definitions(program: Program) -> dict[str, ast.stmt]:
    """Return the functions and classes of the top level of all cells; the last of a name is the one meant."""
    return {
        node.name: node
        for scope in program.scopes
        if scope.function is None
        for node in own_nodes(scope.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def _closed(definitions: Mapping[str, ast.stmt], names: set[str]) -> set[str]:
    """Return ``names`` and all that the functions and classes among them mention, and those among that."""
    found, waiting = set(names), [name for name in names if name in definitions]
    while waiting:
        more = _names(definitions[waiting.pop()]) - found
        found |= more
        waiting += [name for name in more if name in definitions]
    return found


def _mentioned(scopes: Iterable[Scope], definitions: Mapping[str, ast.stmt]) -> set[str]:
    """Return the names that ``scopes`` find outside of themselves, and definitions that they name."""
    found: set[str] = set()
    for scope in scopes:
        if scope.function is not None:
            found |= _free(scope.function.node)
        else:
            named = {name for node in scope.body for name in _loaded(node)}
            found |= _reads(scope.body) | (named & definitions.keys())
    return found


def _of_modules(scopes: Iterable[Scope], program: Program) -> set[str]:
    """Return what ``scopes`` take from modules of the user's own: ``models.Net``."""
    nodes = (node for scope in scopes for part in scope.body for node in ast.walk(part))
    taken = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in taken if node.value.id in program.aliases}  # type: ignore[attr-defined]


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement or a definition finds outside of itself."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _free(node)
    if isinstance(node, ast.ClassDef):
        outside = {name for part in (*node.bases, *node.decorator_list) for name in _loaded(part)}
        return outside | {name for part in node.body for name in _names(part)}
    return _reads([node])


def _free(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that a function reads and does not bind."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.arg)]
    bound = {node.arg if isinstance(node, ast.arg) else node.id for node in inside if not _is_load(node)}
    changed = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    return (_loaded(function) - bound) | changed


def _is_load(node: ast.Name | ast.arg) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _loaded(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def _reads(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read before they bind them."""
    text = ast.unparse(ast.Module(body=list(body), type_ignores=[]))
    return {name for name, use in first_uses(text).items() if use is not FirstUse.BINDS}


def _owner(function: Function) -> str:
    """Return the name by which a function is reached: that of its class or of the outermost function around it."""
    return function.name.partition(".")[0]


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, or whose objects it may change: targets, receivers and arguments."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store):
            yield from _base(inner)
        elif isinstance(inner, ast.Call) and isinstance(node, ast.Expr):
            yield from _base(inner.func)
            for argument in inner.args:
                yield from _base(argument)


def _stored(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def _base(node: ast.AST) -> Iterator[str]:
    if name := root_of(node):
        yield name


def _rebound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds for certain, so that what they were before does not matter."""
    if not isinstance(node, ast.Assign):
        return set()
    targets = [part for target in node.targets for part in _parts(target)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _once(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    return tuple({id(scope): scope for scope in scopes}.values())
