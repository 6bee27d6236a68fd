"""What of the notebook the failing cell rests on: the cells that made the names that it uses, and what those use.

A notebook has cells of other experiments. A hook, an attention layer or a data set of theirs is not to be blamed for
this failure. So statements are followed backwards from the failing cell by the names that they bind and mention.
Limits: what a function changes in its globals, and objects that are reached through others, are followed by name only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

from oomdoctor.program.definitions import Function, Program, Scope
from oomdoctor.program.names import free_names, loaded, outside, own_nodes, plain_names, read_first, root_of, stored

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
    named = _mentioned(basis, definitions, _of_modules(basis, program))
    functions = [scope for scope in program.scopes if scope.function is not None and _owner(scope.function) in named]
    methods = [scope for scope in functions if scope.owner]
    called = _mentioned(methods, definitions)
    helpers = [scope for scope in functions if scope.function is not None and _owner(scope.function) in called]
    reach = _once((*program.running, *methods, *helpers))
    return Ground(reach=reach, basis=_once((*reach, *before, *functions)))


class _Trail:
    """The way back through statements: one that binds or changes a needed name is kept, and what it reads is needed."""

    def __init__(self, definitions: Mapping[str, ast.stmt], names: set[str]) -> None:
        self._definitions = definitions
        self._needed = names

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
        rebound = plain_names(*node.targets) if isinstance(node, ast.Assign) else set()
        self._need(read_first([node]), without=rebound)
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
        if not matters and self._needed.isdisjoint(stored(inner for part in header for inner in ast.walk(part))):
            return None
        self._need(loaded(*header))
        if not getattr(block, "body", True):
            block.body = [ast.copy_location(ast.Pass(), node)]
        return cast("ast.stmt", block)

    def _cut_inner(self, one: ast.AST) -> ast.stmt | None:
        """Return a copy of an ``except`` or a ``case`` with what matters in it."""
        inner: Any = copy(one)
        inner.body = self.back(inner.body)
        return cast("ast.stmt", inner) if inner.body else None

    def _need(self, names: AbstractSet[str], without: AbstractSet[str] = frozenset()) -> None:
        needed = (self._needed - without) | names
        self._needed = needed | outside(self._definitions, needed)


def _definitions(program: Program) -> dict[str, ast.stmt]:
    """Return the functions and classes of the top level of all cells; the last of a name is the one meant."""
    return {
        node.name: node
        for scope in program.scopes
        if scope.function is None
        for node in own_nodes(scope.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def _mentioned(
    scopes: Iterable[Scope], definitions: Mapping[str, ast.stmt], more: AbstractSet[str] = frozenset()
) -> set[str]:
    """Return the names that ``scopes`` find outside of themselves, and what the definitions among these find."""
    found = set(more)
    for scope in scopes:
        if scope.function is not None:
            found |= free_names(scope.function.node)
        else:
            found |= read_first(scope.body) | (loaded(*scope.body) & definitions.keys())
    return found | outside(definitions, found)


def _of_modules(scopes: Iterable[Scope], program: Program) -> set[str]:
    """Return what ``scopes`` take from modules of the user's own: ``models.Net``."""
    nodes = (node for scope in scopes for part in scope.body for node in ast.walk(part))
    taken = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in taken if node.value.id in program.aliases}  # type: ignore[attr-defined]


def _owner(function: Function) -> str:
    """Return the name by which a function is reached: that of its class or of the outermost function around it."""
    return function.name.partition(".")[0]


def _changed(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, or whose objects it may change: targets, receivers and arguments."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) and isinstance(inner.ctx, ast.Store):
            found.add(root_of(inner))
        elif isinstance(inner, ast.Call) and isinstance(node, ast.Expr):
            found |= {root_of(part) for part in (inner.func, *inner.args)}
    return found


def _once(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    return tuple({id(scope): scope for scope in scopes}.values())
