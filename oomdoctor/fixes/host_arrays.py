"""Arrays that a line asks too much host memory for: mapped from their file, or made of float32.

``memmap_array``: ``np.load(path, mmap_mode="r")`` gives the same array over pages of the file, which the system brings
in as they are read and drops when memory is short; processes that read the same file share them. Nothing can be written
to them: NumPy raises an error where a cell tries, so no number is changed silently. A tensor that shares the memory
would not be told of it, so cells that make such tensors are refused, as are cells that may write the file.

``narrow_dtype``: NumPy makes float64 where nothing else is said, which takes twice the memory of float32 and is most
often turned into float32 for the model later on. The numbers keep 7 digits and no longer 16, and what is computed from
them is of the narrower type as well, so the results are others. Only the call in the line that ran out of memory is
changed, where NumPy says that it asked for float64, or the line does. Whole numbers are left as they are: whether all
of them fit a narrower type, an index that is computed from them included, cannot be told from the cells.

There is no live form: an array that is there has other holders, and what they do is not known.
Sources: https://numpy.org/doc/stable/reference/generated/numpy.load.html, https://numpy.org/doc/stable/user/basics.types
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import libcst as cst

from oomdoctor.fixes._preconditions import check_host
from oomdoctor.fixes._unfit import Unfit, need, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import with_keyword
from oomdoctor.program.import_lines import qualified_name
from oomdoctor.program.rewriting import place_at, text_of, within

_LOADS: Final = frozenset({"np.load", "numpy.load"})
_READS_NONE: Final = "the line that ran out of memory reads no array as a whole with np.load"
_SLOWER: Final = 1.1
"""Time of a step that reads from pages of a file, as a ratio. A round figure, not measured."""

_SHARES: Final = re.compile(r"\b(from_numpy|as_tensor|frombuffer)\s*\(")
_NOT_CODE: Final = re.compile(r"^\s*!.*$|#.*$|'[^'\n]*'|\"[^\"\n]*\"", re.MULTILINE)
_SAVING: Final = re.compile(r"\b(savez|savez_compressed|savetxt|open_memmap|tofile)\b|[\w.]*\b(?:save|memmap\()")
_OF_NUMPY: Final = frozenset(f"{root}.{name}" for root in ("np", "numpy") for name in ("save", "memmap("))
_OTHER_LANGUAGES: Final = re.compile(r"\s*%%(bash|sh|script|system|writefile|html|javascript|js|markdown|latex|svg)\b")

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
_MAKES_NONE: Final = "the line that ran out of memory makes no float64 of which the type can be said there"


@proposing
def _propose_mapped(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where reading the array is what failed."""
    check_host(incident)
    dose = _line(incident, evidence, lambda text: any(f"{name}(" in text for name in _LOADS))
    if dose is None:
        raise Unfit(_READS_NONE)
    if not incident.requested:
        raise Unfit("how large the array is that was read is not known")
    yield Proposal(
        dose=dose,
        effect=Effect.EXACT,
        saves=incident.requested,
        slowdown=_SLOWER,
        basis=f"the array asked for {format_size(incident.requested)}, which stay in its file",
    )


@proposing
def _propose_narrow(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where float64 is what was asked for."""
    check_host(incident)
    if _WHOLE.search(incident.message):
        raise Unfit("whether all whole numbers of the array fit a narrower type is not known")
    dose = _line(incident, evidence, lambda text: bool(_DOUBLE.search(incident.message) or _SAID.search(text)))
    if dose is None:
        raise Unfit("nothing shows that float64 was asked for")
    if not incident.requested:
        raise Unfit("how much memory was asked for is not known")
    yield Proposal(
        dose=dose,
        effect=Effect.CHANGES_RESULT,
        saves=incident.requested // 2,
        basis=f"half of the {format_size(incident.requested)} that were asked for in float64",
        caveat="numbers keep 7 digits instead of 16, and what is computed from them becomes float32 as well",
    )


def _line(incident: Incident, evidence: Evidence, is_it: Callable[[str], bool]) -> Dose | None:
    """Return cell and line of the user's that asked for the array, None where no text of a line shows it."""
    for line in (incident.inner, incident.cell):
        if line is not None and line.line is not None and is_it(line.source_line):
            return Dose.of(
                cell=(evidence.code.failing_cell or 0) if line.number is None else line.number, line=line.line
            )
    return None


@refusing
def _patch_mapped(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with the array mapped from its file."""
    place = need(place_at(cells, dose.number("cell"), dose.number("line")))
    statement = need(rewriting.statement_at(place.parsed, place.line), _READS_NONE)
    loads = [call for call in within(statement, cst.Call) if text_of(call.func) in _LOADS]
    if not loads or any(not load.args or any(arg.star for arg in load.args) for load in loads):
        raise Unfit(_READS_NONE)
    for load in loads:
        _check_mappable(cells, load)
    for cell in cells.history:
        for line in _NOT_CODE.sub("", cell.source).splitlines():
            if _SHARES.search(line) and not any(f"{load}(" in line for load in _LOADS):
                raise Unfit(f"`{line.strip()}` of {cell} may share memory with the array, and write to it unchecked")
    changes: dict[cst.CSTNode, rewriting.New] = {load: with_keyword(load, "mmap_mode", '"r"') for load in loads}
    module = rewriting.exchange(place.parsed.module, changes)
    return rewriting.join(cells, [rewriting.edit(cells, place.cell, place.parsed, module)])


def _check_mappable(cells: Cells, load: cst.Call) -> None:
    source, *others = load.args
    if any(arg.keyword is None or arg.keyword.value in {"mmap_mode", "allow_pickle"} for arg in others):
        raise Unfit("the array is mapped already, or may hold Python objects, which cannot be")
    text = text_of(source.value)
    if ".npz" in text:
        raise Unfit("arrays of an .npz file are packed together and cannot be mapped")
    opened = rf"\b{re.escape(text)}\s*=\s*(?:io\.)?(?:BytesIO|open)\(|\bas {re.escape(text)}\b"
    if "open(" in text or "BytesIO" in text or any(re.search(opened, cell.source) for cell in cells.history):
        raise Unfit("the array is read from an open file, which cannot be mapped by its name")
    for cell in cells.history:
        found = _SAVING.finditer(_NOT_CODE.sub("", cell.source))
        if not _OTHER_LANGUAGES.match(cell.source) and any(
            match[1] or qualified_name(cells, match[0]) in _OF_NUMPY for match in found
        ):
            raise Unfit(f"{cell} writes arrays to files, perhaps to the one that is read")


@refusing
def _patch_narrow(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with float32 in the call that asked for float64."""
    place = need(place_at(cells, dose.number("cell"), dose.number("line")))
    statement = rewriting.statement_at(place.parsed, place.line)
    calls = within(statement, cst.Call) if isinstance(statement, cst.SimpleStatementLine) else ()
    narrowed: dict[cst.CSTNode, rewriting.New]
    narrowed = {call: new for call in calls if (new := _narrowed(call)) is not None}
    if len(narrowed) > 1:
        raise Unfit(f"line {place.line} of {place.cell} makes several arrays of float64")
    if not narrowed:
        raise Unfit(_MAKES_NONE)
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
    return with_keyword(call, "dtype", f"{root}.float32")


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


FIXES: Final = (
    Fix(
        id="memmap_array",
        title="Map the array from its file instead of reading it whole",
        effect=Effect.EXACT,
        cost="reads from disk where memory is short",
        propose=_propose_mapped,
        patch=_patch_mapped,
    ),
    Fix(
        id="narrow_dtype",
        title="Make the array of float32 instead of float64",
        effect=Effect.CHANGES_RESULT,
        cost="7 digits instead of 16",
        propose=_propose_narrow,
        patch=_patch_narrow,
    ),
)
