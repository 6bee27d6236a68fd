"""Which names a cell binds, reads and deletes at its top level, in the order in which it does so; and what it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from oomdoctor.program.magics import parsed

__all__ = [
    "FirstUse",
    "all_imports_in",
    "bound_names",
    "bound_otherwise",
    "call_name",
    "first_assignments",
    "first_uses",
    "imported",
    "imports_in",
    "loop_targets",
    "own_nodes",
    "parameters_of",
    "read_names",
    "root_of",
]

_INNER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def call_name(node: ast.AST) -> str:
    """Return the dotted name of what is called (``torch.no_grad``), empty where it is not a plain name."""
    if isinstance(node, ast.Call):
        return call_name(node.func)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = call_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def parameters_of(function: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the parameters of ``function``."""
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def root_of(node: ast.AST, *, through_calls: bool = True) -> str:
    """Return the name that a chain of attributes, items and, unless told otherwise, calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript) or (through_calls and isinstance(node, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of ``body`` in the order of the text, not going into functions and classes defined there."""
    for node in body:
        yield node
        if not isinstance(node, _INNER):
            yield from own_nodes(ast.iter_child_nodes(node))


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and what it stands for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


@lru_cache(maxsize=256)
def imports_in(source: str) -> frozenset[tuple[str, str]]:
    """Return each name that a cell's own imports bind, and what it stands for: ``("F", "torch.nn.functional")``."""
    return frozenset(pair for node in own_nodes(_body(source)) for pair in imported(node))


@lru_cache(maxsize=256)
def bound_otherwise(source: str) -> frozenset[str]:
    """Return the names that a cell binds at its top level by anything but an import."""
    nodes = (node for node in own_nodes(_body(source)) if not isinstance(node, ast.alias))
    kinds = ast.Name, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    named = (node for node in nodes if isinstance(node, kinds) and not isinstance(getattr(node, "ctx", None), ast.Load))
    return frozenset(node.id if isinstance(node, ast.Name) else str(node.name) for node in named)


@lru_cache(maxsize=256)
def all_imports_in(source: str) -> frozenset[tuple[str, str]]:
    """Return the same of all imports of a cell, those in functions included."""
    return frozenset(pair for part in _body(source) for node in ast.walk(part) for pair in imported(node))


class FirstUse(Enum):
    """What a cell does with a name before anything else."""

    BINDS = auto()
    READS = auto()
    DELETES = auto()


@lru_cache(maxsize=64)
def first_uses(source: str) -> dict[str, FirstUse]:
    """Return what the cell does first with each name that it uses.

    A binding inside ``if``, ``try`` or ``match`` may not happen and does not count. Functions and classes that the
    cell defines are taken to read all that they mention, from where they are defined.
    """
    uses: dict[str, FirstUse] = {}
    for name, use in _events(_body(source), certain=True):
        if use is not None:
            uses.setdefault(name, use)
    return uses


@lru_cache(maxsize=64)
def bound_names(source: str) -> frozenset[str]:
    """Return the names that the cell binds at its top level, wherever."""
    names: set[str] = set()
    for statement in _body(source):
        names.update(_bound_by(statement))
    return frozenset(names)


def first_assignments(source: str) -> dict[str, ast.Assign | ast.AnnAssign]:
    """Return the first assignment of a cell's top level that binds each name."""
    found: dict[str, ast.Assign | ast.AnnAssign] = {}
    for node in own_nodes(_body(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found.setdefault(part.id, node)
    return found


@lru_cache(maxsize=1024)
def loop_targets(source: str) -> frozenset[str]:
    """Return the names that the loops at the top level of a cell bind to items of something else."""
    names: set[str] = set()
    for loop in (node for node in own_nodes(_body(source)) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))):
        targets = [] if isinstance(loop, ast.While) else [loop.target]
        for node in own_nodes(loop.body):
            if isinstance(node, ast.Assign) and _is_item(node.value):
                targets += node.targets
        parts = (node for target in targets for node in ast.walk(target))
        names |= {node.id for node in parts if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(names)


def _is_item(value: ast.expr) -> bool:
    """Return whether an expression stands for an item of something else: ``layers[at]``, ``next(layers)``."""
    return isinstance(value, ast.Subscript) or call_name(value) == "next"


@lru_cache(maxsize=64)
def read_names(source: str) -> frozenset[str]:
    """Return every name that the cell mentions to read or delete, functions that it defines included."""
    return frozenset(
        node.id
        for statement in _body(source)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    )


def _body(source: str) -> list[ast.stmt]:
    tree = parsed(source)
    return [] if tree is None else tree.body


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).split(".")[0]
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from _bound_by(child)


def _events(body: list[ast.stmt], *, certain: bool) -> Iterator[tuple[str, FirstUse | None]]:
    """Yield uses in the order of execution; a binding that may not happen is None."""
    for statement in body:
        yield from _statement(statement, certain)


def _statement(node: ast.stmt, certain: bool) -> Iterator[tuple[str, FirstUse | None]]:
    binds = FirstUse.BINDS if certain else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield from _reads(node)
        yield node.name, binds
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _reads(node.iter)
        yield from ((name, binds) for name in _bound_by(node.target))
        yield from _events([*node.body, *node.orelse], certain=certain)
    elif isinstance(node, ast.While):
        yield from _reads(node.test)
        yield from _events([*node.body, *node.orelse], certain=certain)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            yield from _reads(item.context_expr)
            if item.optional_vars is not None:
                yield from ((name, binds) for name in _bound_by(item.optional_vars))
        yield from _events(node.body, certain=certain)
    elif isinstance(node, (ast.If, ast.Try, ast.Match)):
        yield from _branches(node)
    else:
        yield from _reads(node)
        if isinstance(node, ast.AugAssign):
            yield from ((child.id, FirstUse.READS) for child in ast.walk(node.target) if isinstance(child, ast.Name))
        yield from ((name, binds) for name in _bound_by(node))


def _branches(node: ast.stmt) -> Iterator[tuple[str, FirstUse | None]]:
    for field in ast.iter_child_nodes(node):
        if isinstance(field, ast.stmt):
            yield from _statement(field, certain=False)
        elif isinstance(field, (ast.ExceptHandler, ast.match_case)):
            yield from _events(field.body, certain=False)
        else:
            yield from _reads(field)


def _reads(node: ast.AST) -> Iterator[tuple[str, FirstUse | None]]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Store):
            yield child.id, FirstUse.DELETES if isinstance(child.ctx, ast.Del) else FirstUse.READS
