"""Makes an array or a tensor of float32 where it is made of float64.

NumPy makes float64 where nothing else is said, which takes twice the memory of float32 and is most often turned into
float32 for the model later on. The numbers keep 7 digits and no longer 16, and what is computed from them is of the
narrower type as well, so the results are others: it is offered with that said, never taken silently.

Only the call in the line that ran out of memory is changed, where NumPy says that it asked for float64, or the line
does. Whole numbers are left as they are: whether all of them fit a narrower type, an index that is computed from them
included, cannot be told from the cells.
Source: https://numpy.org/doc/stable/user/basics.types.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _class_calls, _host_room
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.rewriting import place_at, text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import CellLine, Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_WHOLE: Final = re.compile(r"data type (?:u?int\d+)")
_DOUBLE: Final = re.compile(r"data type float64")
_SAID: Final = re.compile(r"\bfloat64\b|\bdouble\b|\.double\(\)")
_TEXTS: Final = frozenset({"float", "float64", "double", "f8", "d"})
_ROOTS: Final = frozenset({"np", "numpy", "torch"})
_AT: Final = {
    **dict.fromkeys(("zeros", "ones", "empty", "array", "asarray", "loadtxt", "genfromtxt"), 1),
    **dict.fromkeys(("full", "arange", "linspace", "eye", "tensor", "as_tensor", "rand", "randn"), None),
}
"""Functions that make new numbers, with the place of their dtype where that may stand without its keyword.

Source: the signatures in NumPy 2 and PyTorch; those of torch take shapes without their keyword as well.
"""
_RANDOM: Final = frozenset({"rand", "randn"})
_NOWHERE: Final = "the line that ran out of memory makes no float64 of which the type can be said there"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where float64 is what was asked for."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    if _WHOLE.search(incident.message):
        return Refused("whether all whole numbers of the array fit a narrower type is not known")
    lines = [line for line in (incident.inner, incident.cell) if line is not None and line.line is not None]
    line = next((one for one in lines if _DOUBLE.search(incident.message) or _SAID.search(one.source_line)), None)
    if line is None:
        return Refused("nothing shows that float64 was asked for")
    if not incident.requested:
        return Refused("how much memory was asked for is not known")
    return (_proposal(line, incident.requested, evidence.code.failing_cell or 0),)


def _proposal(line: CellLine, asked: int, failing: int) -> Proposal:
    cell = failing if line.number is None else line.number
    return Proposal(
        dose=Dose.of(cell=cell, line=line.line or 0),
        effect=Effect.CHANGES_RESULT,
        saves=asked // 2,
        slowdown=1.0,
        basis=f"half of the {format_size(asked)} that were asked for in float64",
        caveat="numbers keep 7 digits instead of 16, and what is computed from them becomes float32 as well",
    )


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with float32 in the call that asked for float64."""
    del evidence
    place = place_at(cells, dose.number("cell"), dose.number("line"))
    if isinstance(place, Refused):
        return place
    statement = rewriting.statement_at(place.parsed, place.line)
    if not isinstance(statement, cst.SimpleStatementLine):
        return Refused(_NOWHERE)
    narrowed: dict[cst.CSTNode, rewriting.New]
    narrowed = {call: new for call in within(statement, cst.Call) if (new := _narrowed(call)) is not None}
    if len(narrowed) > 1:
        return Refused(f"line {place.line} of {place.cell} makes several arrays of float64")
    if not narrowed:
        return Refused(_NOWHERE)
    module = rewriting.exchange(place.parsed.module, narrowed)
    return rewriting.join(cells, [rewriting.edit(cells, place.cell, place.parsed, module)])


def _narrowed(call: cst.Call) -> cst.Call | None:
    """Return ``call`` with float32, None where it makes no float64 of which the type can be said."""
    if not isinstance(call.func, cst.Attribute) or any(arg.star for arg in call.args):
        return None
    root, name = text_of(call.func.value), call.func.attr.value
    if name == "double" and not call.args:
        return call.with_changes(func=call.func.with_changes(attr=cst.Name("float")))
    if name in {"astype", "to"} and call.args and call.args[0].keyword is None:
        return _exchanged(call, 0)
    if root not in _ROOTS or name not in _AT:
        return None
    at = next((i for i, arg in enumerate(call.args) if arg.keyword is not None and arg.keyword.value == "dtype"), None)
    if at is not None:
        return _exchanged(call, at)
    place = _AT[name] if root != "torch" else None
    if place is not None and len(call.args) > place and call.args[place].keyword is None:
        return _exchanged(call, place)
    # torch makes float32 where nothing is said, and NumPy's random functions take no dtype.
    if root == "torch" or name in _RANDOM or not call.args:
        return None
    named = _class_calls.with_keyword(call, "dtype", f"{root}.float32")
    return None if isinstance(named, Refused) else named


def _exchanged(call: cst.Call, at: int) -> cst.Call | None:
    """Return ``call`` with float32 for its argument ``at``, None where that is not float64."""
    value = call.args[at].value
    root, _, last = text_of(value).strip("\"'").rpartition(".")
    if last not in _TEXTS or (root and root not in _ROOTS):
        return None
    if isinstance(value, cst.SimpleString):
        new: cst.BaseExpression = value.with_changes(value=f"{value.quote}float32{value.quote}")
    else:
        own = text_of(cst.ensure_type(call.func, cst.Attribute).value)
        new = cst.parse_expression(f"{root or (own if own in _ROOTS else 'np')}.float32")
    return call.with_changes(args=[*call.args[:at], call.args[at].with_changes(value=new), *call.args[at + 1 :]])


FIX: Final = Fix(
    id="narrow_dtype",
    title="Make the array of float32 instead of float64",
    effect=Effect.CHANGES_RESULT,
    cost="7 digits instead of 16",
    propose=propose,
    apply=None,
    patch=patch,
)
