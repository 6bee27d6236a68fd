"""Which names statements read and bind, in the order in which they run: the little dataflow that rewriting needs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["Loop", "ancestors", "bound", "exposed", "loop_at", "own", "reads"]

Block = Sequence[ast.stmt]
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While


def loop_at(tree: ast.AST, line: int) -> Loop | None:
    """Return the loop that begins on ``line``."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return next((loop for loop in loops if loop.lineno == line), None)


def reads(node: ast.AST) -> set[str]:
    """Return the names that ``node`` reads anywhere within; ``x += 1`` and ``x[0] = 1`` read ``x``."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    found |= {part.target.id for part in ast.walk(node) if _is_sum(part)}  # type: ignore[attr-defined]
    return found - _of_comprehensions(node)


def bound(node: ast.AST) -> set[str]:
    """Return the names that ``node`` binds, a name whose items are set included."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name):
            found.add(part.value.id)
    return found - _of_comprehensions(node)


def _of_comprehensions(node: ast.AST) -> set[str]:
    """Return the names that live within comprehensions alone."""
    return {
        name.id
        for part in ast.walk(node)
        if isinstance(part, ast.comprehension)
        for name in ast.walk(part.target)
        if isinstance(name, ast.Name)
    }


def exposed(block: Iterable[ast.stmt]) -> set[str]:
    """Return the names that ``block`` reads before it has bound them itself."""
    out: set[str] = set()
    done: set[str] = set()
    for node in block:
        out |= _exposed(node) - done
        done |= _surely_bound(node)
    return out


def ancestors(tree: ast.AST, wanted: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes from ``tree`` down to ``wanted``, both included; empty if it is not there."""
    if tree is wanted:
        return (tree,)
    for child in ast.iter_child_nodes(tree):
        if path := ancestors(child, wanted):
            return (tree, *path)
    return ()


def own(node: ast.AST) -> Iterable[ast.AST]:
    """Yield ``node`` and what is within it, leaving out functions and classes defined there."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from own(child)


def _exposed(node: ast.stmt) -> set[str]:
    match node:
        case ast.For() | ast.AsyncFor():
            inner = exposed(node.body) - bound(node.target)
            return reads(node.iter) | inner | exposed(node.orelse)
        case ast.While():
            return reads(node.test) | exposed([*node.body, *node.orelse])
        case ast.If():
            return reads(node.test) | exposed(node.body) | exposed(node.orelse)
        case ast.With() | ast.AsyncWith():
            return {name for item in node.items for name in reads(item.context_expr)} | exposed(node.body)
        case _:
            return reads(node)


def _surely_bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Import() | ast.ImportFrom():
            return bound(node)
        case ast.With() | ast.AsyncWith():
            return {name for inner in node.body for name in _surely_bound(inner)}
        case ast.If() if node.orelse:
            first, second = ({n for inner in part for n in _surely_bound(inner)} for part in (node.body, node.orelse))
            return first & second
        case _:
            return set()


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
