"""Where the cells make an optimizer: the call of its class, in a cell or in a function that a cell calls.

The name in the notebook is followed backwards by its text: to the last statement outside of functions that binds it,
and from there into a function of the notebook where one made it. Limits: classes under another name, optimizers made by
libraries, and names that are attributes are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, TypeAlias

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.bindings import last_binding
from oomdoctor.program.rewriting import within

__all__ = ["Made", "edited", "last_name", "made", "with_keyword"]

Read: TypeAlias = Callable[[str], rewriting.ParsedCell | Refused]

_TORCH: Final = "torch.optim."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """The making of one optimizer.

    Attributes:
        cell: where the call of its class stands; ``call``: that call, a node of ``parsed``.
        statement: the statement outside of functions that binds its name; ``bound_in``: its cell.
        in_function: the call stands in a function that the statement calls.
    """

    path: str
    cell: Cell
    parsed: rewriting.ParsedCell
    call: cst.Call
    statement: cst.SimpleStatementLine
    bound_in: Cell
    in_function: bool = False

    def is_live(self, cells: Cells) -> bool:
        """Whether the optimizer is there before the failing cell begins."""
        return self.bound_in.number != cells.failing.number


def made(cells: Cells, optimizers: Iterable[OptimizerFacts]) -> tuple[Made, ...] | Refused:
    """Return where each of ``optimizers`` is made, or why that is not known of one."""
    read = cache(rewriting.read)
    found = []
    for facts in optimizers:
        one = _made(cells, facts, read)
        if isinstance(one, Refused):
            return one
        found.append(one)
    return tuple(found)


def _made(cells: Cells, facts: OptimizerFacts, read: Read) -> Made | Refused:
    if not facts.home.startswith(_TORCH):
        return Refused(f"`{facts.path}` is a {facts.type_name} of `{facts.home}`, whose options are not known")
    if not facts.path.isidentifier():
        return Refused(f"`{facts.path}` is not a name of its own, so where it is made is not followed")
    for cell in reversed(cells.history):
        parsed = read(cell.source)
        if isinstance(parsed, Refused):
            if facts.path in cell.source:
                return parsed
            continue
        bound = last_binding(parsed, facts.path)
        if bound is not None and bound.whole is not bound.statement:
            return Refused(f"which of several branches of {cell} makes `{facts.path}` is not followed")
        if bound is None:
            continue
        if not isinstance(bound.value, cst.Call) or not isinstance(bound.statement, cst.SimpleStatementLine):
            line = parsed.lines_of(bound.statement)[0]
            return Refused(f"line {line} of {cell} makes `{facts.path}` in a way that is not followed")
        making = Made(
            path=facts.path, cell=cell, parsed=parsed, call=bound.value, statement=bound.statement, bound_in=cell
        )
        return _followed(cells, facts, read, making)
    return Refused(f"no cell makes `{facts.path}`")


def _followed(cells: Cells, facts: OptimizerFacts, read: Read, bound: Made) -> Made | Refused:
    """Return the making behind the value that the name is bound to."""
    name = last_name(bound.call)
    if name == facts.type_name:
        return bound
    if isinstance(bound.call.func, cst.Name):
        for cell in reversed(cells.history):
            parsed = read(cell.source)
            if isinstance(parsed, Refused) or (function := _function(parsed, name)) is None:
                continue
            inside = [call for call in within(function, cst.Call) if last_name(call) == facts.type_name]
            if len(inside) == 1:
                return replace(bound, cell=cell, parsed=parsed, call=inside[0], in_function=True)
            break
    line = bound.parsed.lines_of(bound.statement)[0]
    return Refused(f"line {line} of {bound.cell} makes `{facts.path}` in a way that is not followed")


def last_name(node: cst.BaseExpression) -> str:
    """Return the last part of the name that is called, ``Adam`` of ``torch.optim.Adam(...)``; empty if it has none."""
    func = node.func if isinstance(node, cst.Call) else node
    if isinstance(func, cst.Attribute):
        return func.attr.value
    return func.value if isinstance(func, cst.Name) else ""


def _function(parsed: rewriting.ParsedCell, name: str) -> cst.FunctionDef | None:
    found = [node for node in parsed.module.body if isinstance(node, cst.FunctionDef) and node.name.value == name]
    return found[-1] if found else None


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call | Refused:
    """Return ``call`` with ``name=value`` among its arguments, in the style in which they are written."""
    if any(arg.star for arg in call.args):
        return Refused("the optimizer's options are unpacked from something that may hold this one already")
    return arguments.with_keyword(call, name, value)


def edited(cells: Cells, found: Sequence[Made], module: cst.Module, live: Sequence[str]) -> Edit | Refused:
    """Return the change of the cell in which all of ``found`` are made.

    Args:
        module: the changed cell.
        live: what does the same to those of the optimizers that are there already.
    """
    cell, parsed = found[0].cell, found[0].parsed
    if cell.number != cells.failing.number and len({one.in_function for one in found}) > 1:
        return Refused(f"{cell} makes optimizers in a function and outside of it")
    return rewriting.edit(cells, cell, parsed, module, live)
