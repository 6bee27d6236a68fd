"""Where the cells call a class of torch: at the top level or in a function, with the name that the result is bound to.

Programs for several processes live in functions more often than others do (``def main(rank)``), where no object of the
namespace leads to them. So calls are found by the name of the class, under the name that it was imported by. Of calls
that bind the same name in the same function, the last one is meant. Limits: classes that a helper returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from oomdoctor.fixes._optimizer_source import last_name
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.rewriting import exchange, text_of, within

__all__ = ["Call", "assigned", "by_cell", "called", "code_of", "edited", "find", "keyword"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call.

    Attributes:
        node: the call, a node of ``parsed``; ``statement``: the innermost statement around it.
        target: the one name that the statement binds, None where it binds none or several.
        around: the function or class at the top level of the cell that it stands in.
        name: the class's own name.
    """

    cell: Cell
    parsed: rewriting.ParsedCell
    node: cst.Call
    statement: rewriting.Statement
    target: str | None
    around: rewriting.Definition | None
    name: str

    @property
    def line(self) -> int:
        """Line of the cell, one-based."""
        return self.parsed.lines_of(self.node)[0]

    @property
    def where(self) -> str:
        """The place in words."""
        return f"line {self.line} of {self.cell}"


def called(cells: Cells, name: str) -> frozenset[str]:
    """Return the names by which the cells call the class ``name``."""
    renamed = re.compile(rf"\b{name} as (\w+)")
    return frozenset({name, *(alias for cell in cells.history for alias in renamed.findall(cell.source))})


def find(cells: Cells, *names: str) -> tuple[Call, ...] | Refused:
    """Return the calls of the classes ``names``, in the order of the cells."""
    own = {alias: name for name in names for alias in called(cells, name)}
    mentions = re.compile(rf"\b({'|'.join(own)})\b")
    found: dict[tuple[str, str], Call] = {}
    for cell in cells.history:
        if not mentions.search(cell.source):
            continue
        parsed = rewriting.read(cell.source)
        if isinstance(parsed, Refused):
            return parsed
        for node in within(parsed.module, cst.Call):
            if last_name(node) not in own:
                continue
            path = rewriting.path_to(parsed, parsed.lines_of(node)[0])
            if not path:
                return Refused(f"line {parsed.lines_of(node)[0]} of {cell} calls it outside of a statement")
            around = path[0] if isinstance(path[0], cst.FunctionDef | cst.ClassDef) else None
            target = _target(path[-1])
            key = around.name.value if around else "", target or f"{cell.number}:{parsed.code(node)}"
            found.pop(key, None)
            found[key] = Call(
                cell=cell,
                parsed=parsed,
                node=node,
                statement=path[-1],
                target=target,
                around=around,
                name=own[last_name(node)],
            )
    return tuple(found.values())


def _target(statement: rewriting.Statement) -> str | None:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    match statement.body[0]:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return name
        case cst.AnnAssign(target=cst.Name(value=name)):
            return name
    return None


def assigned(one: Call, name: str) -> list[cst.BaseExpression]:
    """Return what is assigned to ``name`` in the function of ``one``, or at the top level of its cell."""
    return [
        node.value
        for node in within(one.around or one.parsed.module, cst.Assign)
        for target in node.targets
        if isinstance(target.target, cst.Name) and target.target.value == name
    ]


def by_cell(found: Iterable[Call]) -> list[list[Call]]:
    """Return the calls of each cell together."""
    groups: dict[int, list[Call]] = {}
    for one in found:
        groups.setdefault(one.cell.number, []).append(one)
    return list(groups.values())


def keyword(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """Return what is passed by the keyword ``name``, None where nothing is."""
    return next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def code_of(node: cst.CSTNode) -> str:
    """Return ``node`` as source text."""
    return text_of(node).strip()


def edited(
    cells: Cells,
    cell: Cell,
    parsed: rewriting.ParsedCell,
    nodes: Mapping[cst.CSTNode, cst.CSTNode],
    imports: Sequence[str] = (),
    replay: str | None = None,
) -> Edit | Refused:
    """Return the change of ``cell`` that exchanges these very nodes and adds the imports.

    Args:
        replay: what a retry runs for it where it is an earlier cell; None for the functions that change.
    """
    module = exchange(parsed.module, nodes)
    whole = import_lines.insert_at_top(parsed, module, imports)
    if cell.number == cells.failing.number:
        return rewriting.edit(cells, cell, parsed, whole)
    if replay is None:
        made = rewriting.edit(cells, cell, parsed, module)
        if isinstance(made, Refused):
            return made
        replay = made.replay
    after = rewriting.write(parsed, whole)
    if isinstance(after, Refused):
        return after
    return Edit(cell=cell.number, before=cell.source, after=after, replay="\n".join([*imports, replay]))
