"""Whether the cells hold on to a gradient: as a view of a bucket it is overwritten by the next step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from oomdoctor.model.session import Cells
from oomdoctor.program import words
from oomdoctor.program.magics import parsed
from oomdoctor.program.words import Result

__all__ = ["held"]

_MEASURES: Final = frozenset(
    {
        *words.names_of(Result.REDUCED, Result.DISCRETE),
        *("abs", "square", "pow", "clone", "numel", "item", "size", "element_size", "dim"),
        *("zero_", "mul_", "div_", "add_", "sub_", "clamp_", "copy_", "nan_to_num_"),
    }
)
"""Methods whose result shares no memory with the gradient, or that change it where it is."""
_FACTS: Final = frozenset({"shape", "dtype", "device", "is_sparse", "ndim"})


def held(cells: Cells) -> str | None:
    """Return the text of the first expression that may keep a gradient or refuses views, None where there is none."""
    for cell in cells.history:
        if (tree := parsed(cell.source)) is None:
            continue
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if (text := _told(node, parents)) is not None:
                return text
    return None


def _told(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    if isinstance(node, ast.keyword) and node.arg == "create_graph" and not _is(node.value, False):
        return f"create_graph={ast.unparse(node.value)}"
    if not (isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)):
        return None
    above = list(_above(node, parents))
    return None if _is_passing(node, above) else ast.unparse(above[0])


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_passing(node: ast.Attribute, above: list[ast.AST]) -> bool:
    """Whether what is done with the gradient at ``node`` leaves nothing behind that shares its memory."""
    parent = above[0]
    if isinstance(parent, ast.Call) and parent.func is node:
        return True  # torch.autograd.grad is a function
    if isinstance(parent, ast.Compare):
        return all(_is(one, None) for one in parent.comparators)
    if isinstance(parent, ast.Attribute) and parent.attr == "data":
        node, parent, above = parent, above[1], above[1:]
        if isinstance(node.ctx, ast.Store):
            return False
    if isinstance(parent, ast.Attribute):
        is_call = len(above) > 1 and isinstance(above[1], ast.Call) and above[1].func is parent
        kept = len(above) > 2 and not isinstance(above[2], ast.Expr) and parent.attr.endswith("_")
        return parent.attr in _FACTS or (is_call and parent.attr in _MEASURES and not kept)
    if isinstance(parent, ast.Call) and node in parent.args:
        called = ast.unparse(parent.func).rpartition(".")[2]
        return called in {"isnan", "isfinite", "isinf", "norm", "vector_norm", "is_tensor"}
    return isinstance(parent, ast.AugAssign) and parent.target is node


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
