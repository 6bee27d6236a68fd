"""Predictions gathered in host memory as they come, where they would add up on the device.

The statement that collects an output of the model gets a ``.cpu()``. Nothing else changes, so it is made only where all
that the cells make of the collection is the same bit for bit with tensors in host memory (see ``_frees_uses``); what is
compared with it and was gathered too, as labels are, is moved along. Outputs that still have their graph would keep it
on the device, so they are detached where evidence says that nothing is differentiated, and refused elsewhere.

There is no live form. Tensors that are in host memory already are not helped: on ``cpu`` and on the virtual accelerator
it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _frees_source, _frees_uses, _trainer_source, _trainer_terms
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_NAME: Final = re.compile(r"([^\W\d]\w*)(?:\.(?:append|extend)\(| \+= \[| = \[)")
_NOTHING: Final = "no loop that the failing cell runs collects outputs of a model on the device"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the census found on the device what the collection holds."""
    if (through := _trainer_terms.proposed("offload_predictions", incident, evidence)) is not None:
        return through
    found = _collection(evidence)
    if isinstance(found, Refused):
        return found
    _, _, name = found
    device = evidence.device
    if device.tensor_device.partition(":")[0] == "cpu":
        return Refused(f"the tensors of `{name}` are in host memory already")
    held = sum(one.bytes for one in evidence.census.holdings if _is_of(one, name) and not one.path.endswith("→ graph"))
    if not held:
        return Refused(f"the census found nothing on {device.name} that `{name}` holds")
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.EXACT,
            saves=held,
            slowdown=1.0,
            basis=f"measured: the census found {format_size(held)} on {device.name} that `{name}` holds",
            caveat=f"`{name}` is in host memory then: later cells that need it on the device have to move it",
        ),
    )


def _collection(evidence: Evidence) -> tuple[int, int, str] | Refused:
    """Return the cell and the line of the statement that collects, and the name that it fills."""
    fact = evidence.code.gathers_predictions
    place = _frees_source.place_of(fact) if fact is not None else None
    if place is None:
        return Refused(_NOTHING)
    number, line, text = place
    name = _NAME.match(text)
    if name is None:
        return Refused(f"`{text}` collects outputs in a way that is not known: append them to a list")
    return number, line, name[1]


def _is_of(holding: Holding, name: str) -> bool:
    path = holding.path.removeprefix("local `")
    return path.startswith(name) and path[len(name) :][:1] in {"", "[", "`", " "}


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Move what is collected to host memory, and what is compared with it."""
    if (through := _trainer_source.patched("offload_predictions", cells, evidence, dose)) is not None:
        return through
    found = _collection(evidence)
    if isinstance(found, Refused):
        return found
    number, line, name = found
    parsed = rewriting.read(cells.get(number).source)
    if isinstance(parsed, Refused):
        return parsed
    functions = [node for node in rewriting.path_to(parsed, line) if isinstance(node, cst.FunctionDef)]
    owner = functions[-1].name.value if functions else None
    gathers = _frees_uses.to_move(cells, _frees_uses.Gather(cell=number, line=line, name=name, owner=owner))
    if isinstance(gathers, Refused):
        return gathers
    detached = {(cell, at) for cell, at, _ in evidence.code.history_appends}
    for one in gathers:
        if (one.cell, one.line) not in detached and _has_graph(evidence, one.name):
            return Refused(f"`{one.name}` keeps the autograd graph of what it holds, which would stay on the device")
    numbers = dict.fromkeys(one.cell for one in gathers)
    return rewriting.join(
        cells, [_cell(cells, n, [one for one in gathers if one.cell == n], detached) for n in numbers]
    )


def _has_graph(evidence: Evidence, name: str) -> bool:
    return any(_is_of(one, name) and one.path.endswith("→ graph") for one in evidence.census.holdings)


def _cell(
    cells: Cells, number: int, gathers: Sequence[_frees_uses.Gather], detached: set[tuple[int, int]]
) -> Edit | Refused:
    cell = cells.get(number)
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    changes: dict[cst.CSTNode, list[rewriting.Statement]] = {}
    for one in gathers:
        old = rewriting.statement_at(parsed, one.line)
        how = ".detach().cpu()" if (number, one.line) in detached else ".cpu()"
        new = _moved(parsed, old, how) if isinstance(old, cst.SimpleStatementLine) else None
        if old is None or new is None:
            return Refused(f"line {one.line} of cell {number} collects more than one tensor: move each of them there")
        changes[old] = [new]
    return rewriting.edit(cells, cell, parsed, rewriting.replace_all(parsed.module, changes))


def _moved(parsed: rewriting.ParsedCell, line: cst.SimpleStatementLine, how: str) -> cst.SimpleStatementLine | None:
    value = _collected(line)
    if value is None or isinstance(value, cst.Tuple | cst.List | cst.Dict | cst.ListComp | cst.GeneratorExp):
        return None
    text = parsed.module.code_for_node(value)
    if text.endswith((".cpu()", ".item()", ".tolist()", ".numpy()")):
        return line
    bare = isinstance(value, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(value.lpar)
    new = cst.parse_expression((text if bare else f"({text})") + how)
    return cst.ensure_type(line.deep_replace(value, new), cst.SimpleStatementLine)


def _collected(line: cst.SimpleStatementLine) -> cst.BaseExpression | None:
    """Return what the statement puts into the collection, None where that is not one value."""
    if len(line.body) != 1:
        return None
    (node,) = line.body
    match node:
        case cst.Expr(value=cst.Call(args=[cst.Arg(value=value)])):
            return value
        case cst.AugAssign(value=cst.List(elements=[cst.Element(value=value)])):
            return value
        case cst.Assign(value=cst.ListComp(elt=value)):
            return value
    return None


FIX: Final = Fix(
    id="offload_predictions",
    title="Collect predictions in host memory",
    effect=Effect.EXACT,
    cost="a copy to the host in each step",
    propose=propose,
    apply=None,
    patch=patch,
)
