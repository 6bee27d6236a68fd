"""Regions of a program that end in a backward pass, wherever they stand: in a loop, a function, a method, a closure.

A region is a stretch of one block: the statements behind the backward pass before, up to the one that calls
``backward``, by itself or within ``if`` and ``with``. So a block with several backward passes has several regions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.magics import Definition, Function, Loop
from oomdoctor.program.names import blocks_of, read_first, target_names

_BRANCHES = (ast.If, ast.With, ast.AsyncWith)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The statements ``block[start:end]``, of which the last one holds a call of ``backward``.

    ``path`` is what the block stands in, from the function or the cell down to the statement that it belongs to.
    """

    scope: Scope
    path: tuple[ast.AST, ...]
    block: Sequence[ast.stmt]
    start: int
    end: int

    @property
    def body(self) -> Sequence[ast.stmt]:
        """The statements."""
        return self.block[self.start : self.end]

    @property
    def function(self) -> Function | None:
        """The innermost function that the region stands in, None at the top level of a cell."""
        return next((node for node in reversed(self.path) if isinstance(node, Function)), None)

    @property
    def loop(self) -> Loop | None:
        """The loop that runs the region once for each turn, None where the region's function has none around it."""
        for node in reversed(self.path):
            if isinstance(node, Loop):
                return node
            if not isinstance(node, _BRANCHES):
                return None
        return None

    @property
    def read_behind(self) -> set[str]:
        """The names that are read behind the region before they are bound anew."""
        used = _read(self.block[self.end :])
        inner: Sequence[ast.stmt] = self.block
        for node in reversed(self.path):
            if isinstance(node, Loop):
                again = _read([ast.Expr(node.test), *inner] if isinstance(node, ast.While) else inner)
                used |= again if isinstance(node, ast.While) else again - {*target_names(node.target)}
            if isinstance(node, Function | ast.Module):
                break
            outer = self.path[self.path.index(node) - 1]
            for block in blocks_of(outer):
                if node in block:
                    used |= _read(block[block.index(node) + 1 :])
                    inner = block
        return used


def regions(program: Program) -> tuple[Region, ...]:
    """Return the regions of what the failing cell runs, those of a block in their order."""
    found: dict[tuple[int, int], Region] = {}
    for scope in program.running:
        top: ast.AST = scope.function or ast.Module(body=[*scope.body], type_ignores=[])
        for path, block in _blocks((top,), scope.body):
            for start, end in _stretches(block):
                key = block[start].lineno, block[end - 1].lineno
                found.setdefault((scope.cell, *key), Region(scope=scope, path=path, block=block, start=start, end=end))  # type: ignore[arg-type]
    return tuple(found.values())


def backwards_in(node: ast.stmt) -> tuple[ast.Expr, ...]:
    """Return the statements that call ``backward``: ``node`` itself, or those within an ``if`` or a ``with``."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="backward"))):
            return (node,)
    if isinstance(node, _BRANCHES):
        return tuple(found for block in blocks_of(node) for one in block for found in backwards_in(one))
    return ()


def _read(body: Iterable[ast.AST]) -> set[str]:
    return read_first(body, loops_run=False)


def _stretches(block: Sequence[ast.stmt]) -> Iterator[tuple[int, int]]:
    start = 0
    for at, node in enumerate(block):
        if _is_apart(node):
            start = at + 1
        elif backwards_in(node):
            yield start, at + 1
            start = at + 1


def _is_apart(node: ast.stmt) -> bool:
    """Tell whether the regions are those of a branch's own block.

    It has several backward passes one after the other, or is a ``with`` that the optimizer steps in: that is entered
    once for each step, which ``accumulate`` of accelerate counts.
    """
    steps = any(isinstance(one, ast.Attribute) and one.attr == "step" for one in ast.walk(node))
    if isinstance(node, ast.With | ast.AsyncWith) and steps and backwards_in(node):
        return True
    return isinstance(node, _BRANCHES) and any(
        sum(bool(backwards_in(one)) for one in block) > 1 or any(map(_is_apart, block)) for block in blocks_of(node)
    )


def _blocks(
    path: tuple[ast.AST, ...], block: Sequence[ast.stmt]
) -> Iterator[tuple[tuple[ast.AST, ...], Sequence[ast.stmt]]]:
    """Yield the blocks that regions may be stretches of, each with what it stands in."""
    owner = path[-1]
    if not isinstance(owner, _BRANCHES) or _is_apart(owner):
        yield path, block
    named = {part.id for node in block for part in ast.walk(node) if isinstance(part, ast.Name)}
    for node in block:
        if isinstance(node, Function) and node.name in named:
            yield from _blocks((*path, node), node.body)
        elif not isinstance(node, Definition):
            for inner in blocks_of(node):
                yield from _blocks((*path, node), inner)
