"""Reads a checkpoint into host memory, mapped from its file, instead of onto the device or into memory as a whole.

``load_state_dict`` copies from wherever the tensors are, so the model gets the same values. With ``mmap=True`` the
tensors are pages of the file that the system drops when memory is short. The parameters are written and not replaced:
pages in their place would change with the file, which a later cell may save to.

Only checkpoints that go into ``load_state_dict`` and nowhere else are followed: what is used by itself would stay on
the host. A file that the notebook may write to is not mapped, since its pages would change or vanish below the tensors.
There is no live form: what a library does with what it loads is not known.

Source: https://pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes._unfit import Unfit, need, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import with_keyword
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.rewriting import EditPlace, place_at, text_of, within

_LOAD: Final = "torch.load"
_NUMBERS: Final = re.compile(
    r"epoch|step|iter|loss|acc|best|config|args|param|version|seed|lr$|score|metric|history", re.IGNORECASE
)
_FILLS: Final = m.Call(func=m.Attribute(attr=m.Name("load_state_dict")), args=[m.AtLeastN(n=1)])
_ITEMS: Final = m.Call(func=m.Attribute(attr=m.Name("items")), args=[])
_PART: Final = m.Name() | m.Subscript() | m.DictComp(for_in=m.CompFor(iter=_ITEMS))
"""A part of a checkpoint under another name, or with other keys."""
_NOWHERE: Final = "no torch.load was found in what the failing cell runs that reads a checkpoint as a whole"
_SAVES: Final = re.compile(r"\b(?:torch\.save|save_file|save_pretrained|save_checkpoint|save_model)\s*\(")


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
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
        value = namespace[where.id]
        known = (type(value).__module__, type(value).__name__) in {("builtins", "str"), ("torch", "device")}
        return known and str(value) in {"cpu", "meta"}
    text = ast.unparse(where)
    return "'cpu'" in text or "'meta'" in text or re.fullmatch(r"lambda \w+, \w+: \w+", text) is not None


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where a checkpoint was loaded, onto the device or in the line that failed."""
    cell, line = need(_where(incident, evidence), _NOWHERE)
    held = evidence.census.bytes_of(Role.USER_TENSOR)
    saves = held or incident.requested or 0
    if not saves:
        raise Unfit("the census found no tensors of a checkpoint, and the failed request has no size")
    basis = (
        f"estimate: the program's own {format_size(held)} of tensors, the checkpoint's among them"
        if held
        else f"estimate: the {format_size(saves)} that the checkpoint asked for"
    )
    yield Proposal(dose=Dose.of(cell=cell, line=line), effect=Effect.EXACT, saves=saves, basis=basis)


def _where(incident: Incident, evidence: Evidence) -> tuple[int, int] | None:
    """Return cell and line of the load."""
    failing = evidence.code.failing_cell or 0
    if (load := evidence.code.first("load_mmap")) is not None:
        return load.cell, load.line
    for line in (incident.inner, incident.cell):
        if line is not None and line.line is not None and f"{_LOAD}(" in line.source_line:
            return (failing if line.number is None else line.number), line.line
    return None


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with the checkpoint read into host memory and mapped where that is safe."""
    place = need(place_at(cells, dose.number("cell"), dose.number("line")))
    statement = need(rewriting.statement_at(place.parsed, place.line), _NOWHERE)
    loads = [call for call in within(statement, cst.Call) if text_of(call.func) == _LOAD]
    if len(loads) != 1 or any(arg.star for arg in loads[0].args):
        raise Unfit(_NOWHERE)
    (load,) = loads
    for call in _destinations(cells, place, statement, load):
        if any(arg.keyword is not None and arg.keyword.value == "assign" for arg in call.args):
            raise Unfit("the checkpoint takes the place of the parameters (`assign`), which would then be on the host")
    module = rewriting.replace(place.parsed.module, load, _to_host(load, _can_map(cells, load)))
    return rewriting.join(cells, [rewriting.edit(cells, place.cell, place.parsed, module)])


def _to_host(call: cst.Call, mapped: bool) -> cst.Call:
    if len([arg for arg in call.args if arg.keyword is None]) > 1:
        second = call.args[1].with_changes(value=cst.SimpleString('"cpu"'))
        call = call.with_changes(args=[call.args[0], second, *call.args[2:]])
    else:
        call = with_keyword(call, "map_location", '"cpu"')
    return with_keyword(call, "mmap", "True") if mapped else call


def _can_map(cells: Cells, load: cst.Call) -> bool:
    """Whether what is loaded is a file by its name that nothing in the notebook writes."""
    source = load.args[0].value
    if isinstance(source, cst.Call) and text_of(source.func).rpartition(".")[2] not in {"join", "Path", "str"}:
        return False
    bound = rf"\b{re.escape(text_of(source))}\b\s*=\s*(?:io\.)?(?:BytesIO|open)\(|\bas {re.escape(text_of(source))}\b"
    return not any(_SAVES.search(cell.source) or re.search(bound, cell.source) for cell in cells.history)


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
    later = [node for node in _below(place.scope) if node in since and since[node].start.line > place.line]
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
            case cst.Subscript(slice=[key]) if _NUMBERS.search(text_of(key)):
                fine |= {id(one) for one in used}
            case cst.Del() | cst.AssignTarget() | cst.Attribute(attr=cst.Name(value="keys")):
                fine |= {id(one) for one in used}
            case cst.Name() if id(node) not in fine:
                line = since[node].start.line
                raise Unfit(f"line {line} of {place.cell} uses what is loaded beside load_state_dict")
    return need(list(into.values()) or None, "what is loaded goes into no load_state_dict")


def _below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        yield child
        yield from _below(child)


FIX: Final = Fix(
    id="load_mmap",
    title="Read the checkpoint into host memory, mapped from its file",
    effect=Effect.EXACT,
    cost="nothing",
    detect=detect,
    propose=propose,
    patch=patch,
)
