"""Reads a checkpoint into host memory, mapped from its file, instead of onto the device or into memory as a whole.

``load_state_dict`` copies from wherever the tensors are, so the model gets the same values. With ``mmap=True`` the
tensors are pages of the file that the system drops when memory is short. Where the model was made just before, its
fresh parameters are replaced and not written over, ``assign=True``, and only one copy of the weights is ever there; a
guard refuses that while the changed cell runs if type, layout or sharing of a parameter would change.

Only checkpoints that go into ``load_state_dict`` and nowhere else are followed: what is used by itself would stay on
the host. A file that the notebook may write to is not mapped, since its pages would change or vanish below the tensors.
There is no live form: what a library does with what it loads is not known.

Source: https://pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _optimizer_source
from oomdoctor.fixes._data_places import Page, is_label, names, pages_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.definitions import site
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.rewriting import EditPlace, place_at, text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.session import Cells, Session
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

__all__ = ["FIX", "detect", "guard", "patch", "propose"]

_LOAD: Final = "torch.load"
_NUMBERS: Final = re.compile(
    r"epoch|step|iter|loss|acc|best|config|args|param|version|seed|lr$|score|metric|history", re.IGNORECASE
)
_INTO: Final = "load_state_dict"
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


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a checkpoint was loaded, onto the device or in the line that failed."""
    where = _where(incident, evidence)
    if where is None:
        return Refused(_NOWHERE)
    held = evidence.census.bytes_of(Role.USER_TENSOR)
    saves = held or incident.requested or 0
    if not saves:
        return Refused("the census found no tensors of a checkpoint, and the failed request has no size")
    basis = (
        f"estimate: the program's own {format_size(held)} of tensors, the checkpoint's among them"
        if held
        else f"estimate: the {format_size(saves)} that the checkpoint asked for"
    )
    cell, line = where
    return (Proposal(dose=Dose.of(cell=cell, line=line), effect=Effect.EXACT, saves=saves, slowdown=1.0, basis=basis),)


def _where(incident: Incident, evidence: Evidence) -> tuple[int, int] | None:
    """Return cell and line of the load."""
    failing = evidence.code.failing_cell or 0
    if (load := evidence.code.first("load_mmap")) is not None:
        return load.cell, load.line
    for line in (incident.inner, incident.cell):
        if line is not None and line.line is not None and f"{_LOAD}(" in line.source_line:
            return (failing if line.number is None else line.number), line.line
    return None


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cell with the checkpoint read into host memory and mapped where that is safe."""
    place = place_at(cells, dose.number("cell"), dose.number("line"))
    if isinstance(place, Refused):
        return place
    (page,) = pages_of([(place.cell, place.parsed)])
    statement = rewriting.statement_at(place.parsed, place.line)
    loads = [] if statement is None else [call for call in within(statement, cst.Call) if text_of(call.func) == _LOAD]
    if len(loads) != 1 or any(arg.star for arg in loads[0].args):
        return Refused(_NOWHERE)
    (load,) = loads
    into = _destinations(cells, page, place, load)
    if isinstance(into, Refused):
        return into
    mapped = _can_map(cells, load)
    nodes: dict[cst.CSTNode, rewriting.New] = {load: lambda call: _to_host(call, mapped)}
    models = {model.path for model in evidence.code.models}
    nodes |= {call: _assigning for call in into if mapped and _is_fresh(page, call, models)}
    return rewriting.join(
        cells, [rewriting.edit(cells, place.cell, place.parsed, rewriting.exchange(place.parsed.module, nodes))]
    )


def _to_host(node: cst.CSTNode, mapped: bool) -> cst.CSTNode:
    call = cst.ensure_type(node, cst.Call)
    unnamed = [arg for arg in call.args if arg.keyword is None]
    new: cst.Call | Refused
    if len(unnamed) > 1:
        second = call.args[1].with_changes(value=cst.SimpleString('"cpu"'))
        new = call.with_changes(args=[call.args[0], second, *call.args[2:]])
    else:
        new = _optimizer_source.with_keyword(call, "map_location", '"cpu"')
    if mapped and not isinstance(new, Refused):
        new = _optimizer_source.with_keyword(new, "mmap", "True")
    assert not isinstance(new, Refused)  # no argument is unpacked, as was seen before
    return new


def _assigning(node: cst.CSTNode) -> cst.CSTNode:
    new = _optimizer_source.with_keyword(cst.ensure_type(node, cst.Call), "assign", "True")
    return node if isinstance(new, Refused) else new


def _can_map(cells: Cells, load: cst.Call) -> bool:
    """Whether what is loaded is a file by its name that nothing in the notebook writes."""
    source = load.args[0].value
    if isinstance(source, cst.Call) and text_of(source.func).rpartition(".")[2] not in {"join", "Path", "str"}:
        return False
    bound = rf"\b{re.escape(text_of(source))}\b\s*=\s*(?:io\.)?(?:BytesIO|open)\(|\bas {re.escape(text_of(source))}\b"
    return not any(_SAVES.search(cell.source) or re.search(bound, cell.source) for cell in cells.history)


def _destinations(cells: Cells, page: Page, place: EditPlace, load: cst.Call) -> list[cst.Call] | Refused:
    """Return the calls of ``load_state_dict`` that the checkpoint goes into, or what else is done with it."""
    node: cst.CSTNode = load
    while isinstance(page.parents[node], cst.Subscript):
        node = page.parents[node]
    if (direct := _into(page, node)) is not None:
        return [direct]
    assign = page.parents[node]
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    if not isinstance(target, cst.Name):
        return Refused(f"line {place.line} of {place.cell} loads something that is not followed")
    if place.around is None and any(
        re.search(rf"\b{target.value}\b", cell.source)
        for cell in cells.history
        if cell.number > place.cell.number and cell.source != place.cell.source
    ):
        return Refused(f"`{target.value}` is used in other cells than the one that loads it")
    return _followed(page, place, target.value, page.line(load))


def _followed(page: Page, place: EditPlace, name: str, since: int) -> list[cst.Call] | Refused:
    found: list[cst.Call] = []
    waiting, done = [name], set[str]()
    while waiting:
        name = waiting.pop()
        done.add(name)
        for node in names(place.scope):
            if node.value != name or page.line(node) <= since or is_label(page, node):
                continue
            if _is_derived(page, node, done | {*waiting}):
                continue
            use = _use(page, node)
            if isinstance(use, Refused):
                return use
            if isinstance(use, cst.Call):
                found.append(use)
            elif isinstance(use, str) and use not in done:
                waiting.append(use)
    return found or Refused("what is loaded goes into no load_state_dict")


def _is_derived(page: Page, node: cst.Name, known: set[str]) -> bool:
    """Whether ``node`` is bound to something made of ``known``."""
    target = page.parents[node]
    assign = page.parents[target] if isinstance(target, cst.AssignTarget) else None
    return isinstance(assign, cst.Assign) and any(one.value in known for one in names(cst.Expr(assign.value)))


def _use(page: Page, node: cst.Name) -> cst.Call | str | Refused | None:
    """Return the ``load_state_dict`` that a use is for, or another name for a part of the checkpoint; None for less."""
    outer: cst.CSTNode = node
    key = ""
    while isinstance(page.parents[outer], cst.Subscript) and page.parents[outer].value is outer:  # type: ignore[attr-defined]
        outer = page.parents[outer]
        key = text_of(outer.slice[-1]).strip("\"'")  # type: ignore[attr-defined]
    parent = page.parents[outer]
    if (call := _into(page, outer)) is not None:
        return call
    if isinstance(parent, cst.Del) or (key and _NUMBERS.search(key)):
        return None
    if isinstance(parent, cst.Attribute) and parent.attr.value == "keys":
        return None
    above = [*page.above(outer)]
    assign = next((one for one in above if isinstance(one, cst.Assign)), None)
    renames = isinstance(parent, cst.Attribute) and parent.attr.value == "items" and isinstance(above[2], cst.CompFor)
    target = assign.targets[0].target if assign is not None and len(assign.targets) == 1 else None
    value = assign.value if assign is not None else None
    if isinstance(target, cst.Name) and (value is outer or (renames and isinstance(value, cst.DictComp))):
        return target.value
    return Refused(f"line {page.line(node)} of {page.cell} uses what is loaded beside load_state_dict")


def _into(page: Page, node: cst.CSTNode) -> cst.Call | None:
    """Return the call of ``load_state_dict`` that ``node`` is the first argument of."""
    arg = page.parents[node]
    call = page.parents[arg] if isinstance(arg, cst.Arg) else None
    is_it = isinstance(call, cst.Call) and _optimizer_source.last_name(call) == _INTO and call.args[0] is arg
    return call if is_it and isinstance(call, cst.Call) else None


def _is_fresh(page: Page, call: cst.Call, models: set[str]) -> bool:
    """Whether it is a model that was made in the same block before, and not touched since."""
    model = call.func.value if isinstance(call.func, cst.Attribute) else None
    statement = page.statement(call)
    block = page.parents.get(statement)
    if not isinstance(model, cst.Name) or model.value not in models:
        return False
    if not isinstance(block, cst.Module | cst.IndentedBlock):
        return False
    for one in reversed(block.body[: list(block.body).index(statement)]):  # type: ignore[arg-type]
        if not any(node.value == model.value for node in names(one)):
            continue
        small = one.body[0] if isinstance(one, cst.SimpleStatementLine) and len(one.body) == 1 else None
        made = isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.value, cst.Call)
        if not made or not isinstance(small, cst.Assign) or not isinstance(small.value, cst.Call):
            return False
        is_target = isinstance(small.targets[0].target, cst.Name) and small.targets[0].target.value == model.value
        maker = small.value.func
        moved = isinstance(maker, cst.Attribute) and not _is_path(maker.value)
        return is_target and not moved and sum(node.value == model.value for node in names(one)) == 1
    return False


def _is_path(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) or (isinstance(node, cst.Attribute) and _is_path(node.value))


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Watch that a parameter which is replaced by a checkpoint's is so by one like it.

    Raises:
        OomDoctorError: where one would differ, share its memory, or is stepped by an optimizer.
    """
    from torch import nn

    del dose
    original = nn.Module.load_state_dict
    optimizers = [optimizer for _, optimizer in session.optimizers]

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign and (why := _differs(self, state_dict, optimizers)) is not None:
            raise OomDoctorError(f"the checkpoint cannot stand in the place of the parameters: {why}")
        return original(self, state_dict, strict=strict, assign=assign)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]


def _differs(module: Any, state_dict: Any, optimizers: list[Any]) -> str | None:
    import torch

    from oomdoctor.fixes._forward import is_shadow_run

    stepped = {id(weight) for one in optimizers for group in one.param_groups for weight in group["params"]}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    if len({id(tensor) for _, tensor in held}) < len(held):
        return "some of them are one"
    seen: set[int] = set()
    for name, tensor in held:
        new = state_dict.get(name)
        if id(tensor) in stepped:
            return f"an optimizer steps `{name}` already"
        if not isinstance(new, torch.Tensor):
            continue
        for what in ("dtype", "device", "layout"):
            if getattr(new, what) != getattr(tensor, what):
                return f"`{name}` has another {what}"
        if new.stride() != tensor.stride() and new.shape == tensor.shape:
            return f"`{name}` has other strides"
        if not is_shadow_run() and new.numel():
            if new.data_ptr() in seen:
                return f"`{name}` shares its memory with another one in the file"
            seen.add(new.data_ptr())
    return None


FIX: Final = Fix(
    id="load_mmap",
    title="Read the checkpoint into host memory, mapped from its file",
    effect=Effect.EXACT,
    cost="nothing",
    detect=detect,
    propose=propose,
    apply=None,
    patch=patch,
    guard=guard,
)
