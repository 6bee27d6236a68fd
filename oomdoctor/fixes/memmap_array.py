"""Maps an array from its file instead of reading all of it into memory.

``np.load(path, mmap_mode="r")`` gives the same array over pages of the file, which the system brings in as they are
read and drops when memory is short; processes that read the same file share them. Nothing can be written to them: NumPy
raises an error where a cell tries, so no number is changed silently. A tensor that shares the memory would not be told
of it, so cells that make such tensors are refused, as are cells that may write the file.

There is no live form: an array that was read as a whole has other holders, and what they do is not known.
Source: https://numpy.org/doc/stable/reference/generated/numpy.load.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _host_room
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import with_keyword
from oomdoctor.program.import_lines import qualified_name
from oomdoctor.program.rewriting import place_at, text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import CellLine, Incident
    from oomdoctor.model.session import Cell, Cells

__all__ = ["FIX", "patch", "propose"]

_LOADS: Final = frozenset({"np.load", "numpy.load"})
_NOWHERE: Final = "the line that ran out of memory reads no array as a whole with np.load"
_SLOWER: Final = 1.1
"""Time of a step that reads from pages of a file, as a ratio. A round figure, not measured."""

_SHARES: Final = re.compile(r"\b(from_numpy|as_tensor|frombuffer)\s*\(")
_WRITES: Final = r"(?<![\w.]){0}(\[.*\]\s*\S{{0,2}}|\s*[-+*/%|&^@]{{1,2}})=(?!=)|\b{0}\.(sort|fill|put)\(|\bout={0}\b"
"""An assignment to a part of an array, one that works in place, and methods that do so."""
_NOT_CODE: Final = re.compile(r"^\s*!.*$|#.*$|'[^'\n]*'|\"[^\"\n]*\"", re.MULTILINE)
_SAVING: Final = re.compile(r"\b(savez|savez_compressed|savetxt|open_memmap|tofile)\b|[\w.]*\b(?:save|memmap\()")
_OF_NUMPY: Final = frozenset(f"{root}.{name}" for root in ("np", "numpy") for name in ("save", "memmap("))
_OTHER_LANGUAGES: Final = re.compile(r"\s*%%(bash|sh|script|system|writefile|html|javascript|js|markdown|latex|svg)\b")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where reading the array is what failed."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    line = _line(incident)
    if line is None:
        return Refused(_NOWHERE)
    if not incident.requested:
        return Refused("how large the array is that was read is not known")
    cell = line.number if line.number is not None else evidence.code.failing_cell or 0
    return (
        Proposal(
            dose=Dose.of(cell=cell, line=line.line or 0),
            effect=Effect.EXACT,
            saves=incident.requested,
            slowdown=_SLOWER,
            basis=f"the array asked for {format_size(incident.requested)}, which stay in its file",
        ),
    )


def _line(incident: Incident) -> CellLine | None:
    """Return the line of the user's that reads the array."""
    lines = (line for line in (incident.inner, incident.cell) if line is not None and line.line is not None)
    return next((line for line in lines if any(f"{name}(" in line.source_line for name in _LOADS)), None)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with the array mapped from its file."""
    del evidence
    place = place_at(cells, dose.number("cell"), dose.number("line"))
    if isinstance(place, Refused):
        return place
    statement = rewriting.statement_at(place.parsed, place.line)
    loads = [] if statement is None else [call for call in within(statement, cst.Call) if text_of(call.func) in _LOADS]
    if not loads or any(not load.args or any(arg.star for arg in load.args) for load in loads):
        return Refused(_NOWHERE)
    names = [text_of(one.target) for one in within(statement, cst.AssignTarget)] if statement is not None else []
    why = next(filter(None, (_unmappable(cells, load) for load in loads)), None) or _used_otherwise(cells, names)
    if why is not None:
        return Refused(why)
    changes: dict[cst.CSTNode, rewriting.New] = {load: with_keyword(load, "mmap_mode", '"r"') for load in loads}
    module = rewriting.exchange(place.parsed.module, changes)
    return rewriting.join(cells, [rewriting.edit(cells, place.cell, place.parsed, module)])


def _unmappable(cells: Cells, load: cst.Call) -> str | None:
    """Return why what is loaded cannot be mapped, or should not be, None if it can."""
    source, *others = load.args
    if any(arg.keyword is None or arg.keyword.value in {"mmap_mode", "allow_pickle"} for arg in others):
        return "the array is mapped already, or may hold Python objects, which cannot be"
    text = text_of(source.value)
    if ".npz" in text:
        return "arrays of an .npz file are packed together and cannot be mapped"
    opened = rf"\b{re.escape(text)}\s*=\s*(?:io\.)?(?:BytesIO|open)\(|\bas {re.escape(text)}\b"
    if "open(" in text or "BytesIO" in text or any(re.search(opened, cell.source) for cell in cells.history):
        return "the array is read from an open file, which cannot be mapped by its name"
    writing = next((cell for cell in cells.history if _writes_arrays(cells, cell)), None)
    return None if writing is None else f"{writing} writes arrays to files, perhaps to the one that is read"


def _used_otherwise(cells: Cells, names: list[str]) -> str | None:
    """Return what writes to the array by its name, or makes a tensor that shares its memory."""
    writes = [re.compile(_WRITES.format(re.escape(name))) for name in names]
    for cell in cells.history:
        code = _NOT_CODE.sub("", cell.source)
        others = [line for line in code.splitlines() if not any(f"{load}(" in line for load in _LOADS)]
        for line in others:
            if _SHARES.search(line) or any(one.search(line) for one in writes):
                return f"`{line.strip()}` of {cell} may write to the array, or share its memory"
    return None


def _writes_arrays(cells: Cells, cell: Cell) -> bool:
    if _OTHER_LANGUAGES.match(cell.source):
        return False
    found = _SAVING.finditer(_NOT_CODE.sub("", cell.source))
    return any(match[1] or qualified_name(cells, match[0]) in _OF_NUMPY for match in found)


FIX: Final = Fix(
    id="memmap_array",
    title="Map the array from its file instead of reading it whole",
    effect=Effect.EXACT,
    cost="reads from disk where memory is short",
    propose=propose,
    apply=None,
    patch=patch,
)
