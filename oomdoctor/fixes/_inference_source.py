"""Moves of a whole batch, or of a whole result, taken into the comprehension that predicts over its parts.

``torch.cat([model(part) for part in x.to(device).chunk(4)]).cpu()`` has the whole batch and the whole result on the
device. ``torch.cat([model(part.to(device)).cpu() for part in x.chunk(4)])`` has a part of each there.
"""

from __future__ import annotations

from typing import Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.program import rewriting, words

__all__ = ["moved_inwards"]

_MOVES: Final = words.MOVES | words.CASTS | {"detach"}
"""Methods that treat each number alone, so that they may as well be called on a part."""


def moved_inwards(source: str, part: str) -> str | Refused:
    """Return the cell with the moves around its comprehensions over ``part`` taken into them."""
    parsed = rewriting.read(source)
    if isinstance(parsed, Refused):
        return parsed
    return rewriting.write(parsed, parsed.module.visit(_Inwards(part)))


class _Inwards(cst.CSTTransformer):
    """Takes moves into the comprehensions that go over the parts of a batch."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def leave_ListComp(self, original_node: cst.ListComp, updated_node: cst.ListComp) -> cst.ListComp:  # noqa: N802
        """Take ``x.to(device).chunk(n)`` apart: the parts of ``x`` are moved one by one."""
        pieces, model = updated_node.for_in.iter, updated_node.elt
        while isinstance(model, cst.Attribute):  # of what the model returns
            model = model.value
        if not self._is_ours(updated_node) or not isinstance(model, cst.Call) or not isinstance(pieces, cst.Call):
            return updated_node
        if len(model.args) != 1 or model.args[0].star or not isinstance(pieces.func, cst.Attribute):
            return updated_node
        whole, moves = _without_moves(pieces.func.value)
        if not moves:
            return updated_node
        given = model.args[0].with_changes(value=_with_moves(cst.Name(self._part), moves))
        element = _replaced(updated_node.elt, model, model.with_changes(args=[given]))
        cut = pieces.with_changes(func=pieces.func.with_changes(value=whole))
        return updated_node.with_changes(elt=element, for_in=updated_node.for_in.with_changes(iter=cut))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """Take ``torch.cat([...]).cpu()`` apart: each result goes to the host as it comes."""
        joined, moves = _without_moves(updated_node)
        if not moves or not _to_host(moves[-1]) or not isinstance(joined, cst.Call) or not joined.args:
            return updated_node
        listed = joined.args[0].value
        if not isinstance(listed, cst.ListComp) or not self._is_ours(listed):
            return updated_node
        results = listed.with_changes(elt=_with_moves(listed.elt, moves))
        return joined.with_changes(args=[joined.args[0].with_changes(value=results), *joined.args[1:]])

    def _is_ours(self, node: cst.ListComp) -> bool:
        target = node.for_in.target
        return isinstance(target, cst.Name) and target.value == self._part


def _without_moves(node: cst.BaseExpression) -> tuple[cst.BaseExpression, list[cst.Call]]:
    """Return what is moved, and the calls that move it in their order."""
    moves: list[cst.Call] = []
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _MOVES:
        moves.insert(0, node)
        node = node.func.value
    return node, moves


def _with_moves(node: cst.BaseExpression, moves: list[cst.Call]) -> cst.BaseExpression:
    for move in moves:
        node = move.with_changes(func=cst.ensure_type(move.func, cst.Attribute).with_changes(value=node))
    return node


def _replaced(tree: cst.BaseExpression, old: cst.Call, new: cst.Call) -> cst.BaseExpression:
    return new if tree is old else cst.ensure_type(tree.deep_replace(old, new), cst.Attribute)


def _to_host(call: cst.Call) -> bool:
    name = cst.ensure_type(call.func, cst.Attribute).attr.value
    first = call.args[0].value if call.args else None
    return name == "cpu" or (name == "to" and isinstance(first, cst.SimpleString) and first.evaluated_value == "cpu")
