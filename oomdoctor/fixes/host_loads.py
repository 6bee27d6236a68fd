"""What is read or made in host memory as a whole: checkpoints and arrays mapped from their files, or made of float32.

``load_mmap``: ``load_state_dict`` copies from wherever the tensors are, so a checkpoint on the host does as well. With
``mmap=True`` its tensors are pages of the file that the system drops when memory is short; a file that the notebook may
write to is not mapped. Only checkpoints that go into ``load_state_dict`` and nowhere else are followed.

``memmap_array``: ``np.load(path, mmap_mode="r")`` gives the same array over pages of the file. NumPy raises where a
cell writes to it; a tensor that shares the memory would not be told, so cells that make such tensors, or may write the
file, are refused.

``narrow_dtype``: NumPy makes float64 where nothing else is said, which takes twice the memory of float32. Numbers keep
7 digits, and what is computed from them is narrower as well. Only the call in the line that ran out of memory is
changed.

Sources: https://pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html,
https://numpy.org/doc/stable/reference/generated/numpy.load.html, https://numpy.org/doc/stable/user/basics.types
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes._construction_sites import keyword
from oomdoctor.fixes._preconditions import asking_line, check_host, is_opened
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import with_keyword
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.import_lines import qualified_name
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.rewriting import EditPlace, place_at, text_of, within

_LOAD: Final = "torch.load"
_OF_NUMBERS: Final = re.compile(
    r"epoch|step|iter|loss|acc|best|config|args|param|version|seed|lr$|score|metric|history", re.IGNORECASE
)
_FILLS: Final = m.Call(func=m.Attribute(attr=m.Name("load_state_dict")), args=[m.AtLeastN(n=1)])
_ITEMS: Final = m.Call(func=m.Attribute(attr=m.Name("items")), args=[])
_PART: Final = m.Name() | m.Subscript() | m.DictComp(for_in=m.CompFor(iter=_ITEMS))
"""A part of a checkpoint under another name, or with other keys."""
_NOWHERE: Final = "no torch.load was found in what the failing cell runs that reads a checkpoint as a whole"
_SAVES: Final = re.compile(r"\b(?:torch\.save|save_file|save_pretrained|save_checkpoint|save_model)\s*\(")


def _detect_checkpoint(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the ``torch.load`` that puts tensors on a device: told so, or not told where to put them."""
    return tuple(
        site("load", scope, node)
        for scope in program.running
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Call) and call_name(node) == _LOAD and not _loads_to_host(node, objects.namespace)
    )


def _loads_to_host(call: ast.Call, namespace: Mapping[str, Any]) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "map_location"] + call.args[1:2]
    if not given:
        return False
    where = given[0]
    if isinstance(where, ast.Constant):
        return where.value in {"cpu", "meta"}
    if isinstance(where, ast.Name) and where.id in namespace:
        kind, value = type(namespace[where.id]), namespace[where.id]
        is_known = f"{kind.__module__}.{kind.__name__}" in {"builtins.str", "torch.device"}
        return is_known and str(value) in {"cpu", "meta"}
    text = ast.unparse(where)
    return "'cpu'" in text or "'meta'" in text or re.fullmatch(r"lambda \w+, \w+: \w+", text) is not None


@proposing
def _propose_checkpoint(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    load = evidence.code.first("load_mmap")
    there = Dose.of(cell=load.cell, line=load.line) if load is not None else None
    dose = need(there or asking_line(incident, evidence, lambda text: f"{_LOAD}(" in text), _NOWHERE)
    held = evidence.census.bytes_of(Role.USER_TENSOR)
    why = "the census found no tensors of a checkpoint, and the failed request has no size"
    saves = need(held or incident.requested, why)
    basis = (
        f"estimate: the program's own {format_size(held)} of tensors, the checkpoint's among them"
        if held
        else f"estimate: the {format_size(saves)} that the checkpoint asked for"
    )
    yield Proposal(dose=dose, effect=Effect.EXACT, saves=saves, basis=basis)


@refusing
def _patch_checkpoint(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    place, statement, loads = calls_in_line(cells, dose, {_LOAD}, _NOWHERE)
    need(len(loads) == 1, _NOWHERE)
    (load,) = loads
    for call in _destinations(cells, place, statement, load):
        if keyword(call, "assign") is not None:
            raise Unfit("the checkpoint takes the place of the parameters (`assign`), which would then be on the host")
    source = load.args[0].value
    # A file by its name that nothing in the notebook writes.
    names_one = not isinstance(source, cst.Call) or text_of(source.func).rpartition(".")[2] in {"join", "Path", "str"}
    is_written = any(_SAVES.search(cell.source) for cell in cells.history)
    can_map = names_one and not is_written and not is_opened(cells, text_of(source))
    return rewriting.edited(cells, place, {load: _to_host(load, can_map)})


def calls_in_line(
    cells: Cells, dose: Dose, names: Collection[str], why: str
) -> tuple[EditPlace, cst.BaseStatement, list[cst.Call]]:
    """Return the place and the statement that a dose tells, and its calls of these functions; ``why`` is for none."""
    place = need(place_at(cells, dose.number("cell"), dose.number("line")))
    statement = need(rewriting.statement_at(place.parsed, place.line), why)
    calls = need([call for call in within(statement, cst.Call) if text_of(call.func) in names], why)
    need(not any(not call.args or any(arg.star for arg in call.args) for call in calls), why)
    return place, statement, calls


def _to_host(call: cst.Call, mapped: bool) -> cst.Call:
    if len([arg for arg in call.args if arg.keyword is None]) > 1:
        second = call.args[1].with_changes(value=cst.SimpleString('"cpu"'))
        call = call.with_changes(args=[call.args[0], second, *call.args[2:]])
    else:
        call = with_keyword(call, "map_location", '"cpu"')
    return with_keyword(call, "mmap", "True") if mapped else call


def _destinations(cells: Cells, place: EditPlace, statement: cst.CSTNode, load: cst.Call) -> list[cst.Call]:
    """Return the calls of ``load_state_dict`` that the checkpoint goes into, or what else is done with it."""
    calls = [call for call in within(statement, cst.Call) if m.matches(call, _FILLS)]
    if direct := [call for call in calls if load in within(call.args[0], cst.Call)]:
        return direct
    match statement:
        case cst.SimpleStatementLine(body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]):
            pass
        case _:
            raise Unfit(f"line {place.line} of {place.cell} loads something that is not followed")
    others = [cell for cell in cells.history if cell.number > place.cell.number and cell.source != place.cell.source]
    if isinstance(place.scope, cst.Module) and any(re.search(rf"\b{name}\b", cell.source) for cell in others):
        raise Unfit(f"`{name}` is used in other cells than the one that loads it")
    return _followed(place, name)


def _followed(place: EditPlace, name: str) -> list[cst.Call]:
    """Follow the checkpoint and its parts by their names to the calls that they go into."""
    since = place.parsed.positions
    nodes = within(place.scope, cst.CSTNode)  # type: ignore[type-abstract]
    later = [node for node in nodes if node in since and since[node].start.line > place.line]
    labels = {id(one.attr) for one in later if isinstance(one, cst.Attribute)}
    labels |= {id(one.keyword) for one in later if isinstance(one, cst.Arg) and one.keyword is not None}
    known, into, fine = {name}, dict[int, cst.Call](), set(labels)
    for node in later:
        used = [one for one in m.findall(node, m.Name()) if id(one) not in labels]
        if not any(one.value in known for one in used):  # type: ignore[attr-defined]
            continue
        match node:
            case cst.Call() if m.matches(node, _FILLS):
                into[id(node)] = node
                fine |= {id(one) for one in m.findall(node.args[0], m.Name())}
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=other))]) if m.matches(node.value, _PART):
                known.add(other)
                fine |= {id(one) for one in used}
            case cst.Subscript(slice=[key]) if _OF_NUMBERS.search(text_of(key)):
                fine |= {id(one) for one in used}
            case cst.Del() | cst.AssignTarget() | cst.Attribute(attr=cst.Name(value="keys")):
                fine |= {id(one) for one in used}
            case cst.Name() if id(node) not in fine:
                line = since[node].start.line
                raise Unfit(f"line {line} of {place.cell} uses what is loaded beside load_state_dict")
    return need(list(into.values()), "what is loaded goes into no load_state_dict")


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
    check_host(incident)
    dose = need(asking_line(incident, evidence, lambda text: any(f"{name}(" in text for name in _LOADS)), _READS_NONE)
    asked = need(incident.requested, "how large the array is that was read is not known")
    basis = f"the array asked for {format_size(asked)}, which stay in its file"
    yield Proposal(dose=dose, effect=Effect.EXACT, saves=asked, slowdown=_SLOWER, basis=basis)


@proposing
def _propose_narrow(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    check_host(incident)
    need(not _WHOLE.search(incident.message), "whether all whole numbers of the array fit a narrower type is not known")
    dose = asking_line(incident, evidence, lambda text: bool(_DOUBLE.search(incident.message) or _SAID.search(text)))
    dose = need(dose, "nothing shows that float64 was asked for")
    asked = need(incident.requested, "how much memory was asked for is not known")
    yield Proposal(
        dose=dose,
        effect=Effect.CHANGES_RESULT,
        saves=asked // 2,
        basis=f"half of the {format_size(asked)} that were asked for in float64",
        caveat="numbers keep 7 digits instead of 16, and what is computed from them becomes float32 as well",
    )


@refusing
def _patch_mapped(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    place, _, loads = calls_in_line(cells, dose, _LOADS, _READS_NONE)
    for load in loads:
        _check_mappable(cells, load)
    for cell in cells.history:
        for line in _NOT_CODE.sub("", cell.source).splitlines():
            if _SHARES.search(line) and not any(f"{load}(" in line for load in _LOADS):
                raise Unfit(f"`{line.strip()}` of {cell} may share memory with the array, and write to it unchecked")
    return rewriting.edited(cells, place, {load: with_keyword(load, "mmap_mode", '"r"') for load in loads})


def _check_mappable(cells: Cells, load: cst.Call) -> None:
    source, *others = load.args
    if any(arg.keyword is None or arg.keyword.value in {"mmap_mode", "allow_pickle"} for arg in others):
        raise Unfit("the array is mapped already, or may hold Python objects, which cannot be")
    text = text_of(source.value)
    need(".npz" not in text, "arrays of an .npz file are packed together and cannot be mapped")
    if "open(" in text or "BytesIO" in text or is_opened(cells, text):
        raise Unfit("the array is read from an open file, which cannot be mapped by its name")
    for cell in cells.history:
        found = _SAVING.finditer(_NOT_CODE.sub("", cell.source))
        if not _OTHER_LANGUAGES.match(cell.source) and any(
            match[1] or qualified_name(cells, match[0]) in _OF_NUMPY for match in found
        ):
            raise Unfit(f"{cell} writes arrays to files, perhaps to the one that is read")


@refusing
def _patch_narrow(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    place = need(place_at(cells, dose.number("cell"), dose.number("line")))
    statement = rewriting.statement_at(place.parsed, place.line)
    calls = within(statement, cst.Call) if isinstance(statement, cst.SimpleStatementLine) else ()
    narrowed: dict[cst.CSTNode, rewriting.New]
    narrowed = {call: new for call in calls if (new := _narrowed(call)) is not None}
    need(len(narrowed) <= 1, f"line {place.line} of {place.cell} makes several arrays of float64")
    return rewriting.edited(cells, place, need(narrowed, _MAKES_NONE))


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
    place = _AT[name] if root != "torch" else None
    for at, arg in enumerate(call.args):
        is_type = at == place if arg.keyword is None else arg.keyword.value == "dtype"
        if is_type:
            return _exchanged(call, at)
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
        id="load_mmap",
        title="Memory-map the checkpoint into host memory",
        effect=Effect.EXACT,
        cost="nothing",
        detect=_detect_checkpoint,
        propose=_propose_checkpoint,
        patch=_patch_checkpoint,
    ),
    Fix(
        id="memmap_array",
        title="Memory-map the array instead of reading it whole",
        effect=Effect.EXACT,
        cost="reads from disk where memory is short",
        propose=_propose_mapped,
        patch=_patch_mapped,
    ),
    Fix(
        id="narrow_dtype",
        title="Use float32 instead of float64 for the array",
        effect=Effect.CHANGES_RESULT,
        cost="7 digits instead of 16",
        propose=_propose_narrow,
        patch=_patch_narrow,
    ),
)
