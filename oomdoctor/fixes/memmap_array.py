"""Maps an array from its file instead of reading all of it into memory.

``np.load(path, mmap_mode="r")`` gives the same array over pages of the file, which the system brings in as they are
read and drops when memory is short; processes that read the same file share them. It is done where every use of the
array in the cells only reads: its size, sums over it, parts that are copied into new arrays or tensors. A part that
could be written to, or that a tensor would share its memory with, is refused, and so is a file that the notebook may
write. Should something else write to the array after all, NumPy raises an error: no number is changed silently.

There is no live form: an array that was read as a whole has other holders, and what they do is not known.
Source: https://numpy.org/doc/stable/reference/generated/numpy.load.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _data_places, _host_room, _optimizer_source
from oomdoctor.fixes._data_places import Page, is_label
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import call_name
from oomdoctor.program.rewriting import EditPlace, place_at, text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import CellLine, Incident
    from oomdoctor.model.session import Cell, Cells

__all__ = ["FIX", "patch", "propose"]

_LOADS: Final = frozenset({"np.load", "numpy.load"})
_NOWHERE: Final = "the line that ran out of memory reads no array as a whole with np.load"
_SLOWER: Final = 1.1
"""Time of a step that reads from pages of a file, as a ratio. A round figure, not measured."""

_SIZES: Final = frozenset({"shape", "dtype", "ndim", "size", "nbytes", "itemsize"})
_NEW: Final = frozenset({"all", "any", "argmax", "argmin", "astype", "copy", "max", "mean", "min", "std", "sum", "var"})
"""Methods that give a new array or a number."""
_COPIES: Final = frozenset(
    {
        *("len", "float", "int", "torch.tensor", "torch.FloatTensor"),
        *(f"{root}.{name}" for root in ("np", "numpy") for name in (*_NEW, "array", "unique", "bincount", "isnan")),
    }
)
"""Functions that give a new array, a tensor of its own, or a number."""

_FUNCTIONS: Final = ("save", "savez", "savez_compressed", "savetxt", "memmap")
_ANYWHERE: Final = frozenset({"tofile", "open_memmap"})
"""Names that only what writes arrays has."""
_TEXT: Final = re.compile(r"\b(save\w*|memmap|open_memmap|tofile)\(")
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
    for line in (incident.inner, incident.cell):
        if line is not None and line.line is not None and any(f"{name}(" in line.source_line for name in _LOADS):
            return line
    return None


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with the array mapped from its file."""
    del evidence
    place = place_at(cells, dose.number("cell"), dose.number("line"))
    if isinstance(place, Refused):
        return place
    statement = rewriting.statement_at(place.parsed, place.line)
    loads = [] if statement is None else [call for call in within(statement, cst.Call) if text_of(call.func) in _LOADS]
    if len(loads) != 1 or not loads[0].args or any(arg.star for arg in loads[0].args):
        return Refused(_NOWHERE)
    pages = _data_places.read(cells)
    page = next(one for one in pages if one.cell.source == place.cell.source)
    (load,) = (one for one in within(page.parsed.module, cst.Call) if _stands_at(page, one, place, loads[0]))
    why = _unmappable(cells, load) or _written(pages, page, load)
    if why is not None:
        return Refused(why)
    mapped = _optimizer_source.with_keyword(load, "mmap_mode", '"r"')
    assert not isinstance(mapped, Refused)  # nothing is unpacked, as was seen before
    module = rewriting.exchange(page.parsed.module, {load: mapped})
    return rewriting.join(cells, [rewriting.edit(cells, place.cell, page.parsed, module)])


def _stands_at(page: Page, call: cst.Call, place: EditPlace, wanted: cst.Call) -> bool:
    return page.parsed.positions[call] == place.parsed.positions[wanted]


def _unmappable(cells: Cells, load: cst.Call) -> str | None:
    """Return why what is loaded cannot be mapped, or should not be, None if it can."""
    source, *others = load.args
    given = {arg.keyword.value if arg.keyword is not None else "" for arg in others}
    if given & {"mmap_mode", "", "allow_pickle"}:
        return "the array is mapped already, or may hold Python objects, which cannot be"
    text = text_of(source.value)
    if ".npz" in text:
        return "arrays of an .npz file are packed together and cannot be mapped"
    opened = rf"\b{re.escape(text)}\s*=\s*(?:io\.)?(?:BytesIO|open)\(|\bas {re.escape(text)}\b"
    if "open(" in text or "BytesIO" in text or any(re.search(opened, cell.source) for cell in cells.history):
        return "the array is read from an open file, which cannot be mapped by its name"
    writing = _writer(cells)
    return None if writing is None else f"{writing} writes arrays to files, perhaps to the one that is read"


def _written(pages: tuple[Page, ...], page: Page, load: cst.Call) -> str | None:
    """Return which use of the array may write to it, None where all of them only read."""
    around = page.parents[load]
    if isinstance(around, cst.Subscript | cst.Attribute | cst.Arg):
        return _use(page, load)
    assign = page.parents[load]
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    if not isinstance(target, cst.Name | cst.Attribute):
        return f"line {page.line(load)} of {page.cell} reads an array into something that is not followed"
    name = target.value if isinstance(target, cst.Name) else target.attr.value
    function = page.function(load) if isinstance(target, cst.Name) else None
    scopes = [(page, function)] if function is not None else [(one, one.parsed.module) for one in pages]
    for where, scope in scopes:
        if any(re.search(rf"\b{re.escape(name)}\b", original) for _, original in where.parsed.masked.hidden):
            return f"{where.cell} uses `{name}` in a line of IPython's own, which is not followed"
        for node in within(scope, type(target)):
            named = node.attr if isinstance(node, cst.Attribute) else node
            if named.value != name or node is target or (named is node and is_label(where, named)):
                continue
            if (why := _use(where, node)) is not None:
                return why
    return None


def _use(page: Page, node: cst.BaseExpression) -> str | None:
    """Return what may write to the array, or keep a part of it, in one use of it; None where it is only read."""
    outer: cst.CSTNode = node
    while isinstance(parent := page.parents[outer], cst.Subscript) and parent.value is outer:
        outer = parent
    parent, cut = page.parents[outer], outer is not node
    if isinstance(parent, cst.AssignTarget | cst.Del) and not cut:
        return None
    if isinstance(parent, cst.Attribute) and parent.attr.value in _SIZES:
        return None
    around = page.parents.get(parent)
    if isinstance(parent, cst.Attribute) and isinstance(around, cst.Call) and around.func is parent:
        names = {arg.keyword.value for arg in around.args if arg.keyword is not None}
        if parent.attr.value in _NEW and not names & {"out", "copy"}:
            return None
    if isinstance(parent, cst.Arg) and isinstance(around, cst.Call) and text_of(around.func) in _COPIES:
        names = {arg.keyword.value for arg in around.args if arg.keyword is not None}
        if parent.keyword is None and around.args[0] is parent and not names & {"out", "copy"}:
            return None
    if isinstance(parent, cst.BinaryOperation | cst.UnaryOperation | cst.Comparison):
        return None
    return f"line {page.line(node)} of {page.cell} may write to the array, or share its memory"


def _writer(cells: Cells) -> Cell | None:
    """Return the first cell that writes arrays to files, None where none does."""
    trees = {cell.number: parsed(cell.source) for cell in cells.history}
    names = {name for tree in trees.values() if tree is not None for name in _names(tree)}
    names |= {f"{module}.{name}" for module in ("np", "numpy") for name in _FUNCTIONS}
    return next((cell for cell in cells.history if _writes(cell.source, trees[cell.number], names)), None)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what the imports of a cell let it call the functions of NumPy that write arrays."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = (one.asname for one in node.names if one.name == "numpy" and one.asname is not None)
            yield from (f"{module}.{name}" for module in modules for name in _FUNCTIONS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "numpy":
            for one in node.names:
                if one.name == "*":
                    yield from _FUNCTIONS
                elif one.name in {*_FUNCTIONS, *_ANYWHERE}:
                    yield one.asname or one.name


def _writes(source: str, tree: ast.Module | None, names: set[str]) -> bool:
    lines = [line for _, line in mask(source).hidden if not line.startswith("!")]
    if not _OTHER_LANGUAGES.match(source) and any(map(_TEXT.search, lines)):
        return True
    if tree is None:
        return _TEXT.search(source) is not None
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _ANYWHERE)
        or (isinstance(node, ast.Attribute | ast.Name) and _is_named(node, names))
        or (isinstance(node, ast.Call) and call_name(node) in names)
        for node in ast.walk(tree)
    )


def _is_named(node: ast.Attribute | ast.Name, names: set[str]) -> bool:
    """Whether a function that writes is called here or handed over; ``np.memmap`` alone may be there as a type."""
    name = call_name(node)
    return isinstance(node.ctx, ast.Load) and name in names and not name.endswith("memmap")


FIX: Final = Fix(
    id="memmap_array",
    title="Map the array from its file instead of reading it whole",
    effect=Effect.EXACT,
    cost="reads from disk where memory is short",
    propose=propose,
    apply=None,
    patch=patch,
)
