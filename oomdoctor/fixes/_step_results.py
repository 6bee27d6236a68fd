"""What of a step is used when it is over: batch tensors that were moved, and results to be put together again."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final, TypeAlias

from oomdoctor.fixes._samples import CannotSplit, Samples, Shape
from oomdoctor.program import words
from oomdoctor.program.dataflow import Loop, ancestors, bound, reads
from oomdoctor.program.names import read_first
from oomdoctor.program.words import Result

__all__ = ["Parts", "gathered", "numbers_used", "to_hoist", "unmoved", "used_after"]

_MOVES: Final = words.names_of(Result.MOVED, Result.CAST, Result.TRUNCATED, Result.SHAPED)
DEVICE_MOVES: Final = frozenset({"to", "cuda"})

Parts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Places of the statements before the parts of a batch, of those for each part, and of those after them."""


def unmoved(node: ast.expr, moves: frozenset[str] = DEVICE_MOVES) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in moves:
        node = node.func.value
    return node


def to_hoist(tree: ast.Module, loop: Loop, at: int, parts: Parts, names: Sequence[str], loss: ast.expr) -> set[int]:
    """Return the inner statements that only move or reshape batch tensors which are used after the step."""
    before, inner, after = parts
    used = used_after(tree, loop, at, (before, after)) & set(names)
    more: set[int] = set()
    for place in inner:
        node = loop.body[place]
        if not (bound(node) & used):
            continue
        if _moves_only(node, DEVICE_MOVES) and all(_only_counted(loop, at, parts, n) for n in bound(node) & used):
            continue
        if not _moves_only(node, _MOVES):
            raise CannotSplit(f"`{', '.join(sorted(bound(node) & used))}` is changed in the step and used after it")
        more.add(place)
    # What a hoisted statement reads has to be as it would have been there.
    for place in [p for p in inner if p < max(more, default=-1)]:
        if bound(loop.body[place]) & {name for hoisted in more for name in reads(loop.body[hoisted])}:
            more.add(place)
    return more


def _only_counted(loop: Loop, at: int, parts: Parts, name: str) -> bool:
    """Whether statements after the step ask ``name`` for its length alone, which a move to a device leaves as it is."""
    for node in [loop.body[place] for place in parts[2]] + loop.body[at + 1 :]:
        uses = sum(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))
        counts = sum(ast.unparse(part) in _counts(name) for part in ast.walk(node) if isinstance(part, ast.expr))
        if uses != counts:
            return False
    return True


def _counts(name: str) -> set[str]:
    return {f"len({name})", f"{name}.size(0)", f"{name}.shape[0]"}


def _moves_only(node: ast.stmt, moves: frozenset[str]) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return all(isinstance(unmoved(value, moves), ast.Name) for value in values)


def used_after(tree: ast.Module, loop: Loop, at: int, parts: tuple[Sequence[int], Sequence[int]]) -> set[str]:
    """Return the names that are read outside of the inner statements and not bound anew before."""
    before, after = parts
    used = read_first([loop.body[place] for place in before])
    used |= read_first([loop.body[place] for place in after] + loop.body[at + 1 :])
    path = ancestors(tree, loop)
    start = max(
        (i for i, node in enumerate(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), default=0
    )
    for outer, inner in zip(path[start:], path[start + 1 :], strict=False):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(outer, field, [])
            if isinstance(block, list) and inner in block:
                place = block.index(inner)
                used |= read_first(block[place + 1 :])
                if isinstance(outer, ast.For | ast.AsyncFor | ast.While):
                    used |= read_first(block[:place])
    return used


def numbers_used(
    body: list[ast.stmt], inner: Sequence[int], used: set[str], loss: ast.expr, samples: Samples
) -> tuple[tuple[str, bool], ...]:
    """Return the terms of the loss that are used after the step, and whether each is a mean, over what the loss is."""
    made = {name for place in inner[:-1] for name in bound(body[place])}
    wanted = (made & used) - ({loss.id} if isinstance(loss, ast.Name) else set())
    shapes = {name: samples.names[name].shape for name in sorted(wanted) if name in samples.names}
    return tuple((name, shape is Shape.MEAN) for name, shape in shapes.items() if shape in {Shape.MEAN, Shape.SUM})


def gathered(
    body: list[ast.stmt], inner: Sequence[int], used: set[str], names: Sequence[str], loss: ast.expr, samples: Samples
) -> tuple[str, ...]:
    """Return the results that are used after the step, whose parts are joined."""
    made = {name for place in inner[:-1] for name in bound(body[place])} - set(names)
    wanted = (made & used) - ({loss.id} if isinstance(loss, ast.Name) else set())
    for name in sorted(wanted):
        if samples.names[name].shape is not Shape.ROWS:
            raise CannotSplit(f"`{name}` is used after the step, and its parts are not known to be tensors to join")
    return tuple(sorted(wanted))
