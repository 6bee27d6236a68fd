"""An old model and its optimizer let go of before a cell that is run again builds the new ones.

A name is bound when the new object is complete, so a second run of ``model = Net()`` needs room for two models, and an
optimizer of before keeps the old one with all its state. The names are set to None right before the statement that
binds the first of them, and reference cycles are collected.

What the cell computes is the same bit for bit. Yet what is let go of cannot be brought back, should the new cell fail:
it is deleted only when the user asks for it, with the names said beforehand. So it is offered as a change that is never
made by itself. There is no live form: the names are to be free when the cell is run the next time as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "guard", "patch", "propose"]

_ROLES: Final = frozenset({Role.PARAMETER, Role.GRADIENT, Role.BUFFER, Role.OPTIMIZER_STATE})
_NOTHING: Final = "no old model or optimizer that could be let go of is bound while the failing cell builds a new one"
_ROOT: Final = re.compile(r"[^\W\d]\w*")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it, by name, where the census found what the old objects hold."""
    stale = evidence.code.stale
    if not stale:
        return Refused(_NOTHING)
    names = [name for name, _ in stale]
    held = sum(
        one.bytes
        for one in evidence.census.holdings
        if one.role in _ROLES and (root := _ROOT.match(one.path)) is not None and root[0] in names
    )
    if not held:
        return Refused(f"the census found no parameters or optimizer state on the device that {_listed(names)} holds")
    unbound = [name for name, is_rebound in stale if not is_rebound]
    caveat = f"deletes {_listed(names)} as they stand, for good: save what you still need of them"
    if unbound:
        caveat += f"; the cell does not make {_listed(unbound)} anew, do so afterwards"
    return (
        Proposal(
            dose=Dose.of(names=", ".join(names)),
            effect=Effect.CHANGES_RESULT,
            saves=held,
            slowdown=1.0,
            basis=f"measured: the census found {format_size(held)} that the old {_listed(names)} hold",
            caveat=caveat,
        ),
    )


def _listed(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Set the names to None right before the first of them is bound anew."""
    stale = evidence.code.stale
    if not stale:
        return Refused(_NOTHING)
    cell = cells.failing
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    names = [name for name, _ in stale]
    first = _first_binding(parsed, {name for name, is_rebound in stale if is_rebound})
    if first is None:
        return Refused(f"no statement of {cell} that binds {_listed(names)} was found")
    if _is_none(first):
        return Refused(f"{_listed(names)} are set to None already")
    text = f"{' = '.join(names)} = None  # let go of the old before the new is built\ngc.collect()\n"
    added = rewriting.statements(text, parsed)
    lead = added[0].with_changes(leading_lines=first.leading_lines)
    module = rewriting.replace(parsed.module, first, [lead, *added[1:], first.with_changes(leading_lines=())])
    module = import_lines.insert_at_top(parsed, module, ["import gc"])
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Have oomdoctor itself let go of the named objects, which it would keep alive while the cell runs.

    That is not undone on exit: the user asked for the objects to be deleted, and holding them would hold the memory.
    """
    names = set(str(dose["names"]).split(", "))
    # A snapshot cannot refer weakly to this mapping, so that the moments would outlive their optimizer.
    for state in [optimizer.state for path, optimizer in session.optimizers if path in names]:
        state.clear()
    yield


def _first_binding(parsed: rewriting.ParsedCell, names: set[str]) -> cst.SimpleStatementLine | None:
    found = _Bindings(names)
    parsed.module.visit(found)
    return min(found.lines, key=lambda node: parsed.positions[node].start.line, default=None)


def _is_none(line: cst.SimpleStatementLine) -> bool:
    return any(
        isinstance(one, cst.Assign) and isinstance(one.value, cst.Name) and one.value.value == "None"
        for one in line.body
    )


class _Bindings(cst.CSTVisitor):
    """Finds the statements outside of functions that bind one of the names."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names
        self.lines: list[cst.SimpleStatementLine] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802
        return False

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802
        targets: list[cst.BaseExpression] = []
        targets += [target.target for one in node.body if isinstance(one, cst.Assign) for target in one.targets]
        targets += [one.target for one in node.body if isinstance(one, cst.AnnAssign)]
        while targets:
            target = targets.pop()
            if isinstance(target, cst.Tuple | cst.List):
                targets += [element.value for element in target.elements]
            elif isinstance(target, cst.Name) and target.value in self._names and node not in self.lines:
                self.lines.append(node)
        return False


FIX: Final = Fix(
    id="free_stale",
    title="Let go of the old model and optimizer before the new ones are built",
    effect=Effect.EXACT,
    cost="the old ones cannot be brought back",
    propose=propose,
    apply=None,
    patch=patch,
    guard=guard,
    asks=True,
)
