"""Functions of the cells that a piece of code calls, and by which names they know the models."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting

__all__ = ["called_with"]

_DEPTH = 2


def called_with(
    cells: Cells, parsed: rewriting.ParsedCell, around: cst.CSTNode, models: Collection[str], depth: int = _DEPTH
) -> Iterator[tuple[Cell, rewriting.ParsedCell, cst.FunctionDef, set[str]]]:
    """Yield each function that ``around`` calls, with its cell and the names of the models in it, the nearest first.

    Args:
        cells: the last definition of a name is the one that is called.
        parsed: the cell of ``around``.
        around: the code that calls.
        models: source text of the models there.
        depth: how many calls deep to look.
    """
    for call in _calls_in(around):
        if (found := _definition(cells, parsed.code(call.func).rpartition(".")[2])) is None:
            continue
        cell, where, function = found
        known = _known_as(parsed, call, function, models)
        yield cell, where, function, known
        if depth > 1:
            yield from called_with(cells, where, function.body, known, depth - 1)


def _calls_in(node: cst.CSTNode) -> Iterator[cst.Call]:
    if isinstance(node, cst.Call):
        yield node
    for child in node.children:
        if not isinstance(child, cst.FunctionDef | cst.ClassDef):
            yield from _calls_in(child)


def _definition(cells: Cells, name: str) -> tuple[Cell, rewriting.ParsedCell, cst.FunctionDef] | None:
    """Return the last function or method of this name; None as well where several classes have one."""
    for cell in reversed(cells.history):
        if f"def {name}(" not in cell.source or isinstance(parsed := rewriting.read(cell.source), Refused):
            continue
        methods = [one for owner in parsed.module.body if isinstance(owner, cst.ClassDef) for one in owner.body.body]
        plain = [node for node in parsed.module.body if isinstance(node, cst.FunctionDef) and node.name.value == name]
        bound = [node for node in methods if isinstance(node, cst.FunctionDef) and node.name.value == name]
        if plain or len(bound) == 1:
            return cell, parsed, (plain or bound)[-1]
    return None


def _known_as(
    parsed: rewriting.ParsedCell, call: cst.Call, function: cst.FunctionDef, models: Collection[str]
) -> set[str]:
    """Return what the models are called in ``function``: globals, parameters, and attributes of ``self``."""
    parameters = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
    is_method = parameters[:1] == ["self"]
    parameters = parameters[1:] if is_method else parameters
    by_place = zip(parameters, (one for one in call.args if one.keyword is None), strict=False)
    given = {name: argument.value for name, argument in by_place}
    given |= {one.keyword.value: one.value for one in call.args if one.keyword is not None}
    every = {*parameters, *(one.name.value for one in function.params.kwonly_params)}
    passed = {name for name, value in given.items() if parsed.code(value) in models}
    own = {f"self.{path.rpartition('.')[2]}" for path in models if "." in path} if is_method else set()
    return passed | own | {path for path in models if path.partition(".")[0] not in every}
