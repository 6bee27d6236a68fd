"""What assignments and calls bind, fill and keep: each target, with the expression that goes there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.names import names_in, parameters_of, root_of, target_names

_SHOWS: Final = frozenset({"print", "set_postfix", "set_description", "set_postfix_str", "log", "write", "add_scalar"})
"""What only shows what it is given."""
_NOTHING: Final = ast.Constant(None)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment, each with what it is bound to, taken apart as far as they can be."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _taken_apart(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value


def _taken_apart(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    if not parts or any(isinstance(one, ast.Starred) for one in (*parts, *values)):
        yield target, value
    elif len(parts) == len(values):
        for part, one in zip(parts, values, strict=True):
            yield from _taken_apart(part, one)
    elif len(parts) == 2 and words.has_index(value):
        yield parts[0], value
        yield parts[1], _NOTHING
    else:
        yield target, value


def _iterated(target: ast.expr, iterated: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of a loop, each with what its values come from."""
    match target, iterated:
        case ast.Tuple(elts=[first, second]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            yield first, _NOTHING
            yield from _iterated(second, inner)
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=given) if len(parts) == len(given):
            for part, inner in zip(parts, given, strict=True):
                yield from _iterated(part, inner)
        case _:
            yield target, iterated


def bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield the names that a node binds or fills, with what goes there."""
    match node:
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            for target, value in assigned(node):
                yield set(names_set(target)), value
        case ast.AugAssign(target=target, value=value):
            yield set(names_set(target)), value
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            yield from ((set(target_names(part)), given) for part, given in _iterated(target, value))
        case ast.comprehension(target=target, iter=value):
            yield from ((set(target_names(part)), given) for part, given in _iterated(target, value))
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield set(target_names(target)), value
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for name in names_in(ast.Module(body=node.body, type_ignores=[])) - parameters_of(node):
                yield {node.name}, ast.Name(name, ast.Load())
        case ast.Match(subject=subject):
            yield {name for part in ast.walk(node) for name in names_captured(part)}, subject
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if _is_filling(method):
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield {root_of(base)}, value


def _is_filling(method: str) -> bool:
    return method in words.FILLS or words.is_in_place(method)


def fed(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield what a call that is made for its effect may keep an argument in: its object, and the other arguments."""
    match node:
        case ast.Expr(value=ast.Call() as call) if words.last_name(call) not in _SHOWS and not (
            isinstance(call.func, ast.Attribute) and _is_filling(call.func.attr)
        ):
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


def stored_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes and items that a node sets and the containers that it fills, with what goes there."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [pair for one in targets for pair in _taken_apart(one, value)]
        case ast.AugAssign(target=written, value=value):
            pairs = [(written, value)]
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if method in words.FILLS:
            yield from ((base, value) for value in (*node.args, *(keyword.value for keyword in node.keywords)))
            return
        case _:
            return
    for target, value in pairs:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        yield from ((part, value) for part in parts if isinstance(part, ast.Subscript | ast.Attribute))


def names_filled(node: ast.AST) -> Iterator[str]:
    """Yield the names of what a node changes in place."""
    match node:
        case ast.Assign():
            yield from (root_of(part) for part, _ in stored_in(node))
        case ast.AugAssign(target=target):
            yield root_of(target)
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if _is_filling(method):
            yield root_of(base)
        case _:
            yield from (name for names, _ in fed(node) for name in names)


def parts_of(value: ast.expr) -> Iterator[str]:
    """Yield the names of what an expression is, is a part of, or has as a part."""
    match value:
        case ast.Name() | ast.Attribute() | ast.Subscript():
            yield root_of(value)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault") as called):
            yield root_of(called)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
            yield from (name for part in parts for name in parts_of(part))
        case ast.IfExp(body=one, orelse=other):
            yield from (*parts_of(one), *parts_of(other))
        case ast.NamedExpr(target=target, value=inner):
            yield from (target.id, *parts_of(inner))
