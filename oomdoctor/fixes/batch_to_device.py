"""Leaves a data set in host memory and moves its batches to the device as they are used.

A data set that lies on the device takes its memory in every step. Its tensors stay where they were made; where a batch
is cut from them, or a loader puts one together, the batch goes to the device that the data was on. The values, their
order and every random draw are the same. It is done in the source alone: to take the data off the device, every name
and object that holds it has to be known, and the cells say which these are. Any use of the data as a whole is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _class_calls, _data_places, _host_room
from oomdoctor.fixes._data_places import Page, Uses
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, Scope, site, statements
from oomdoctor.program.ground import Ground, ground
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.rewriting import place_at, text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "detect", "patch", "propose"]

_NOWHERE: Final = "no statement was found that puts a whole data set on the device"
_ROOT: Final = re.compile(r"[^\W\d]\w*")
_HOME: Final = "torch.utils.data"
_COPIES: Final = 1.05
"""Time of a step with the copy of its batch, as a ratio. A round figure, not measured."""

_BEFORE_COLLATE: Final = 6
"""Arguments of ``DataLoader`` before ``collate_fn``. Source: torch/utils/data/dataloader.py."""


_WHOLE: Final = re.compile(r"(^|_)(dataset|data|graph)(_|$)", re.IGNORECASE)
_FACTORIES: Final = re.compile(r"^torch\.(tensor|as_tensor|randn|rand|randint|zeros|ones|empty|load|arange|full)$")
_DATASETS: Final = frozenset({"TensorDataset", "DataLoader", "Subset", "random_split", "StackDataset"})


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the census found the data on the device."""
    del incident
    if evidence.code.first("batch_to_device") is None:
        return Refused(_NOWHERE)
    held = sum(holding.bytes for holding in evidence.census.holdings if _is_data(holding, evidence))
    if not held:
        return Refused("the census found no tensors of a data set on the device")
    if (refused := _host_room.refuse(evidence, held)) is not None:
        return refused
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.EXACT,
            saves=held,
            slowdown=_COPIES,
            basis=f"the census found {format_size(held)} of tensors that batches are cut from",
        ),
    )


def _is_data(holding: Holding, evidence: Evidence) -> bool:
    """Whether the tensors are the program's own and not the batch at hand."""
    match = _ROOT.match(holding.path)
    batch = {name for loop in evidence.code.loops for name in loop.batch}
    named = match is not None and not holding.path.startswith("local ") and match[0] not in batch
    return named and holding.role in {Role.USER_TENSOR, Role.BATCH}


@dataclass(slots=True, kw_only=True)
class _Changes:
    """What becomes of one cell.

    Attributes:
        live: what does the same to objects that are there already.
    """

    page: Page
    nodes: dict[cst.CSTNode, rewriting.New] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the data left on the host and its batches moved."""
    del dose
    found = evidence.code.first("batch_to_device")
    told = Refused(_NOWHERE) if found is None else place_at(cells, found.cell, found.line)
    if isinstance(told, Refused):
        return told
    if told.around is not None:
        return Refused("the data is put on the device in a function: which of its callers use it is not known")
    pages = _data_places.read(cells)
    page = next((one for one in pages if one.cell.source == told.cell.source), None)
    statement = None if page is None else rewriting.statement_at(page.parsed, told.line)
    if page is None or statement is None:
        return Refused(_NOWHERE)
    if statement not in page.parsed.module.body:
        return Refused("the data is put on the device in a block: whether that is run is not known")
    moved = _placing(pages, page, statement)
    if isinstance(moved, Refused):
        return moved
    changes, used, device = moved
    if (why := _unfit(used)) is not None:
        return Refused(why)
    _move_batches(cells, changes, used, device)
    return rewriting.join(cells, [_edit(cells, change) for change in changes.values()])


def _placing(
    pages: tuple[Page, ...], page: Page, statement: cst.CSTNode
) -> tuple[dict[int, _Changes], Uses, cst.BaseExpression] | Refused:
    """Take all data off the device that the cell puts there; what ``statement`` puts there has to be data."""
    change, found = _Changes(page=page), Uses()
    device: cst.BaseExpression | None = None
    for one in (statement, *(other for other in page.parsed.module.body if other is not statement)):
        for name, calls in _candidates(page, one):
            mine, where = Uses(), (page, page.line(calls[0]))
            why = (
                _data_places.handed_over(pages, page, _parent_call(page, calls[0]), where, mine)
                if name is None
                else _data_places.uses(pages, name, where, mine)
            )
            if why is None and not (mine.cut or mine.loaders):
                why = "nothing was found that takes batches from the data"
            wanted = [taken[1] for call in calls if (taken := _data_places.take_off(call)) is not None]
            device = device or wanted[0]
            if why is None and not all(device.deep_equals(other) for other in wanted):
                why = "the data is put on several devices"
            if why is not None and one is statement:
                return Refused(why)
            if why is None:
                change.nodes |= dict.fromkeys(calls, _without_device)
                change.live += [f"{name}.data = {name}.data.cpu()"] if name is not None else []
                found.add(mine)
    if device is None:
        return Refused("the statement that puts the data on the device is not one that is followed")
    return {page.cell.number: change}, found, device


def _candidates(page: Page, statement: cst.CSTNode) -> list[tuple[str | None, list[cst.Call]]]:
    """Return the names that a statement puts on a device; None stands for the parts of a ``TensorDataset``."""
    named: list[tuple[str | None, list[cst.Call]]] = [(name, [call]) for name, call in _data_places.placed(statement)]
    for call in within(statement, cst.Call):
        if _class_calls.last_name(call) == "TensorDataset":
            parts = [a.value for a in call.args if isinstance(a.value, cst.Call) and _data_places.take_off(a.value)]
            named += [(None, parts)] if parts else []
    return named


def _parent_call(page: Page, node: cst.CSTNode) -> cst.Call:
    return next(one for one in page.above(node) if isinstance(one, cst.Call))


def _without_device(call: cst.CSTNode) -> cst.CSTNode:
    taken = _data_places.take_off(cst.ensure_type(call, cst.Call))
    return call if taken is None else taken[0]


def _unfit(found: Uses) -> str | None:
    """Return why a batch would not be what it was, None if it would."""
    for page, part in found.cut:
        where = f"line {page.line(part)} of {page.cell}"
        index = page.parsed.module.code_for_node(part.slice[0].slice)
        if re.search(r"\bdevice\b|\.cuda\(", index + _bound_to(page, index)):
            return f"{where} takes batches by an index that is on the device"
        name = _data_places.bound(page, part)
        writes = name is not None and re.search(
            rf"\b{name}(\[.*\])?\s*[-+*/@%&|^]+=|\b{name}\.\w+_\(", page.cell.source
        )
        parent = page.parents[part]
        if writes or (isinstance(parent, cst.Attribute) and parent.attr.value.endswith("_")):
            return f"{where} takes a batch that is written to, and the data with it"
    for page, call in found.loaders:
        options = {arg.keyword.value for arg in call.args if arg.keyword is not None}
        unnamed = [arg for arg in call.args if arg.keyword is None]
        if "collate_fn" in options or any(arg.star for arg in call.args) or len(unnamed) > _BEFORE_COLLATE:
            return f"line {page.line(call)} of {page.cell} puts batches together in a way of its own"
    return None


def _bound_to(page: Page, name: str) -> str:
    """Return the lines of the cell that bind ``name``."""
    if not name.isidentifier():
        return ""
    binds = rf"^[ \t]*(?:for\s+)?{re.escape(name)}\b(?:\s+in\s|\s*=(?!=)).*$"
    return "\n".join(re.findall(binds, page.cell.source, re.MULTILINE))


def _move_batches(cells: Cells, changes: dict[int, _Changes], found: Uses, device: cst.BaseExpression) -> None:
    """Move the batches that are cut from the data, and those that loaders put together."""

    def moved(part: cst.CSTNode) -> cst.CSTNode:
        return cst.Call(func=cst.Attribute(value=part, attr=cst.Name("to")), args=[cst.Arg(device)])  # type: ignore[arg-type]

    for page, part in found.cut:
        changes.setdefault(page.cell.number, _Changes(page=page)).nodes[part] = moved
    for page, _, path in found.sets:
        change = changes.setdefault(page.cell.number, _Changes(page=page))
        # The objects stay, so that whatever else holds them follows.
        change.live.append(f"[setattr(one, 'data', one.data.cpu()) for one in {path}.tensors]")
    collate = import_lines.name_for(_HOME, "default_collate", cells, "collate")
    text = f"lambda rows: [part.to({text_of(device)}) for part in {collate}(rows)]"

    def collating(call: cst.CSTNode) -> cst.CSTNode:
        new = _class_calls.with_keyword(cst.ensure_type(call, cst.Call), "collate_fn", text)
        assert not isinstance(new, Refused)  # no argument is unpacked, as was seen before
        return new

    for page, call in found.loaders:
        change = changes.setdefault(page.cell.number, _Changes(page=page))
        change.nodes[call] = collating
        change.imports = [import_lines.source_of(_HOME, "default_collate", collate)]
        if (name := _data_places.bound(page, call)) is not None:
            change.live.append(f"{name}.collate_fn = {text}")


def _edit(cells: Cells, change: _Changes) -> Edit | Refused:
    cell, parsed = change.page.cell, change.page.parsed
    module = _without_idle(parsed.module, rewriting.exchange(parsed.module, change.nodes))
    return rewriting.edit(cells, cell, parsed, import_lines.insert_at_top(parsed, module, change.imports), change.live)


def _without_idle(before: cst.Module, after: cst.Module) -> cst.Module:
    """Return ``after`` without the statements that now bind names to themselves; comments above them stay."""
    body: list[rewriting.Statement] = []
    pending: list[cst.EmptyLine] = []
    for old, new in zip(before.body, after.body, strict=True):
        pending += new.leading_lines
        if old.deep_equals(new) or not _is_idle(new):
            body.append(new.with_changes(leading_lines=pending))
            pending = []
    return after.with_changes(body=body, footer=[*pending, *after.footer])


def _is_idle(statement: cst.CSTNode) -> bool:
    """Whether it is ``x = x`` or ``x, y = x, y``."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return False

    return text_of(small.targets[0].target).strip() == text_of(small.value).strip()


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the statement that puts a whole data set on the device, outside of any loop.

    What is put there counts as a data set if batches are cut from it, if it is handed to a ``Dataset``, or if it is
    called one.
    """
    del objects
    under = ground(program)
    for scope in under.basis:
        for statement in statements(scope.body):
            if statement.loops:
                continue
            for name, value in _placed(statement.node):
                if _WHOLE.search(name) or _is_data_set(under, name):
                    return (site("placed", scope, value, (name,)),)
            if _hands_over(statement.node):
                return (site("handed over", scope, statement.node),)
    return ()


def _placed(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is bound to something that is put on a device as a whole."""
    if not isinstance(node, ast.Assign):
        return
    pairs = [(target, node.value) for target in node.targets]
    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
    for target, value in pairs:
        if isinstance(target, ast.Name | ast.Attribute) and _puts_on_device(value):
            yield ast.unparse(target), value


def _puts_on_device(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if _FACTORIES.match(call_name(value)):
        return any(keyword.arg == "device" and _is_device(keyword.value) for keyword in value.keywords)
    if value.func.attr == "cuda":
        return True
    if value.func.attr == "to":
        return any(
            _is_device(part) for part in [*value.args[:1], *(k.value for k in value.keywords if k.arg == "device")]
        )
    return _puts_on_device(value.func.value)  # moved, and then cast or shaped


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str | int) and value.value not in {"cpu", "meta"}
    text = ast.unparse(value)
    return re.search(r"device|cuda|^dev$|^gpu", text, re.IGNORECASE) is not None and "'cpu'" not in text


def _is_data_set(ground: Ground, name: str) -> bool:
    """Whether batches are cut from ``name`` by an index that varies, or it is handed to a ``Dataset``."""
    for scope in ground.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name and isinstance(node.ctx, ast.Load):
                inside = list(ast.walk(node.slice))
                if any(isinstance(part, ast.Name) for part in inside) and _in_loop_or_function(scope, node):
                    return True
            if _is_handed_over(node, name):
                return True
    return False


def _is_handed_over(node: ast.AST, name: str) -> bool:
    makes = isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in _DATASETS
    return makes and isinstance(node, ast.Call) and name in map(ast.unparse, node.args)


def _in_loop_or_function(scope: Scope, node: ast.AST) -> bool:
    if scope.function is not None:
        return True
    loops = (n for n in own_nodes(scope.body) if isinstance(n, ast.For | ast.While))
    return any(node is inner for loop in loops for inner in ast.walk(loop))


def _hands_over(node: ast.stmt) -> bool:
    """Whether a data set is made of what is moved on the way."""
    return any(
        isinstance(call, ast.Call)
        and call_name(call).rpartition(".")[2] == "TensorDataset"
        and any(map(_puts_on_device, call.args))
        for call in ast.walk(node)
    )


FIX: Final = Fix(
    id="batch_to_device",
    title="Leave the data set in host memory and move its batches to the device",
    effect=Effect.EXACT,
    cost="a copy of each batch to the device",
    propose=propose,
    apply=None,
    detect=detect,
    patch=patch,
)
