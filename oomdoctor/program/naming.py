"""Which names a node of the source binds, fills or stands for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from oomdoctor.program.definitions import target_names

__all__ = [
    "bindings",
    "names_bound",
    "names_captured",
    "names_filled",
    "names_in",
    "names_set",
    "parameters_of",
    "parts_of",
    "root_of",
    "stored_in",
]

_FILLS: Final = frozenset({"append", "extend", "insert", "appendleft", "add", "update", "setdefault", "put"})
_SHOWS: Final = frozenset({"print", "set_postfix", "set_description", "set_postfix_str", "log", "write", "add_scalar"})
"""What only shows what it is given."""
_LOOKS_UP: Final = frozenset({"setdefault", "get"})


def names_in(node: ast.AST) -> set[str]:
    """Return every name that stands in ``node``."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def parameters_of(function: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the parameters of ``function``."""
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield the names that a node binds or fills, with what goes there."""
    if isinstance(node, ast.Assign):
        yield {name for target in node.targets for name in names_set(target)}, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield set(names_set(node.target)), node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield set(target_names(node.target)), node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield set(target_names(node.optional_vars)), node.context_expr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for name in names_in(ast.Module(body=node.body, type_ignores=[])) - parameters_of(node):
            yield {node.name}, ast.Name(name, ast.Load())
    elif isinstance(node, ast.Match):
        yield {name for part in ast.walk(node) for name in names_captured(part)}, node.subject
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield {root_of(node.func.value)}, value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _fed(node.value)


def _is_in_place(method: str) -> bool:
    return method in _FILLS or (method.endswith("_") and not method.endswith("__"))


def _fed(call: ast.Call) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield what a call that is made for its effect may keep an argument in: its object, and the other arguments."""
    if ast.unparse(call.func).rpartition(".")[2] in _SHOWS:
        return
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    for value in given:
        yield {root_of(other) for other in (call.func, *given) if other is not value}, value


def names_captured(node: ast.AST) -> Iterator[str]:
    """Yield the names that a pattern of ``match`` binds."""
    name = node.rest if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
    if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping) and name is not None:
        yield name


def names_set(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment to ``target`` binds or fills."""
    yield from target_names(target)
    for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
        if isinstance(part, ast.Subscript | ast.Attribute):
            yield root_of(part)


def names_bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that ``node`` itself binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def stored_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes and items that a node sets and the containers that it fills, with what goes there."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Subscript | ast.Attribute):
                    yield part, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield node.func.value, value


def names_filled(node: ast.AST) -> Iterator[str]:
    """Yield the names of what a node changes in place."""
    if isinstance(node, ast.Assign):
        yield from (root_of(part) for part, _ in stored_in(node))
    elif isinstance(node, ast.AugAssign):
        yield root_of(node.target)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
        yield root_of(node.func.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from (name for names, _ in _fed(node.value) for name in names)


def parts_of(value: ast.expr) -> Iterator[str]:
    """Yield the names of what an expression is, is a part of, or has as a part."""
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        yield root_of(value)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _LOOKS_UP:
        yield root_of(value.func)
    elif isinstance(value, ast.Tuple | ast.List | ast.Set):
        yield from (name for part in value.elts for name in parts_of(part))
    elif isinstance(value, ast.Dict):
        yield from (name for part in value.values for name in parts_of(part))
    elif isinstance(value, ast.IfExp):
        yield from (*parts_of(value.body), *parts_of(value.orelse))
    elif isinstance(value, ast.NamedExpr):
        yield from (value.target.id, *parts_of(value.value))


def root_of(node: ast.expr) -> str:
    """Return the name that a chain of attributes, items and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
