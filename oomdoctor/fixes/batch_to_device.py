"""Leaves a data set in host memory and moves its batches to the device as they are used.

Its tensors stay where they were made; where a batch is cut from them, or a loader puts one together, the batch goes to
the device that the data was on. Values, their order and every draw are the same. It is done in the source alone: every
name and object that holds the data has to be known, and any use of the data as a whole is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes._construction_sites import keyword, last_name
from oomdoctor.fixes._data_set_uses import Pages, Uses
from oomdoctor.fixes._preconditions import check_host_room
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing, root_of, sites_of
from oomdoctor.model import Cells, Dose, Edit, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Site
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import arguments, import_lines, rewriting
from oomdoctor.program.dataflow import assigned
from oomdoctor.program.definitions import Program, Scope, site, statements
from oomdoctor.program.dependencies import ground
from oomdoctor.program.names import call_name, names_in, own_nodes
from oomdoctor.program.rewriting import place_at, text_of, within

_NOWHERE: Final = "no statement was found that puts a whole data set on the device"
_HOME: Final = "torch.utils.data"
_COPIES: Final = 1.05
"""Time of a step with the copy of its batch, as a ratio. A round figure, not measured."""
_WHOLE: Final = re.compile(r"(^|_)(dataset|data|graph)(_|$)", re.IGNORECASE)
_FACTORIES: Final = re.compile(r"^torch\.(tensor|as_tensor|randn|rand|randint|zeros|ones|empty|load|arange|full)$")
_SAME: Final = frozenset({"tensor", "as_tensor", "zeros", "ones", "arange"})
"""What makes the same values on every device; random numbers are others."""
_DEVICE: Final = re.compile(r"""['"](cuda|mps|xpu)|\w*dev\w*$""", re.IGNORECASE)
"""The text of a device, or a name that custom gives to one."""
_DATASETS: Final = frozenset({"TensorDataset", "DataLoader", "Subset", "random_split", "StackDataset"})


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where the census found the data on the device."""
    sites_of(evidence, "batch_to_device", _NOWHERE)
    held = sum(holding.bytes for holding in evidence.census.holdings if _is_data(holding, evidence))
    check_host_room(evidence, need(held, "the census found no tensors of a data set on the device"))
    yield Proposal(
        effect=Effect.EXACT,
        saves=held,
        slowdown=_COPIES,
        basis=f"the census found {format_size(held)} of tensors that batches are cut from",
    )


def _is_data(holding: Holding, evidence: Evidence) -> bool:
    """Whether the tensors are the program's own and not the batch at hand."""
    batch = {name for loop in evidence.code.loops for name in loop.batch}
    named = not holding.path.startswith("local ") and root_of(holding.path) not in {"", *batch}
    return named and holding.role in {Role.USER_TENSOR, Role.BATCH}


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the statement that puts a whole data set on the device: by its name, or as batches are cut from it."""
    under = ground(program)
    data = {name for scope in under.basis for name in _data_sets(scope)}
    for scope in under.basis:
        for node in (one.node for one in statements(scope.body) if not one.loops):
            for target, value in assigned(node):
                if isinstance(target, ast.Name | ast.Attribute) and _puts_on_device(value):
                    name = ast.unparse(target)
                    if _WHOLE.search(name) or name in data:
                        return (site("placed", scope, value, (name,)),)
            made = (one for one in ast.walk(node) if isinstance(one, ast.Call) and _tail(one) == "TensorDataset")
            if any(any(map(_puts_on_device, one.args)) for one in made):
                return (site("handed over", scope, node),)
    return ()


def _data_sets(scope: Scope) -> Iterator[str]:
    """Yield what batches are cut from by an index that varies, and what is handed to a ``Dataset``."""
    nodes = list(own_nodes(scope.body))
    loops = (node for node in nodes if isinstance(node, ast.For | ast.While))
    repeated = {id(inner) for loop in loops for inner in ast.walk(loop)}
    for node in nodes:
        if isinstance(node, ast.Call) and _tail(node) in _DATASETS:
            yield from map(ast.unparse, node.args)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and (scope.function is not None or id(node) in repeated)
            and names_in(node.slice)
        ):
            yield ast.unparse(node.value)


def _tail(call: ast.Call) -> str:
    return call_name(call).rpartition(".")[2]


def _puts_on_device(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    given = [keyword.value for keyword in value.keywords if keyword.arg == "device"]
    if _FACTORIES.match(call_name(value)):
        return any(map(_is_device, given))
    if value.func.attr == "to":
        return any(map(_is_device, [*value.args[:1], *given]))
    return value.func.attr == "cuda" or _puts_on_device(value.func.value)  # moved, and then cast or shaped


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str | int) and value.value not in {"cpu", "meta"}
    text = ast.unparse(value)
    return re.search(r"device|cuda|^dev$|^gpu", text, re.IGNORECASE) is not None and "'cpu'" not in text


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the data left on the host and its batches moved."""
    found = need(evidence.code.first("batch_to_device"), _NOWHERE)
    told = need(place_at(cells, found.cell, found.line))
    if isinstance(told.scope, cst.FunctionDef):
        raise Unfit("the data is put on the device in a function: which of its callers use it is not known")
    last = {cell.source: cell for cell in cells.history}  # one that is run again stands for its earlier runs
    kept = [(cell, rewriting.read(cell.source)) for cell in cells.history if last[cell.source] is cell]
    pages = [(cell, parsed) for cell, parsed in kept if not isinstance(parsed, Refused)]
    page = next(at for at, (cell, _) in enumerate(pages) if cell.source == told.cell.source)
    statement = need(rewriting.statement_at(told.parsed, told.line), _NOWHERE)
    body = told.parsed.module.body
    need(statement in body, "the data is put on the device in a block: whether that is run is not known")
    uses, device, off = Uses(pages), None, list[tuple[str | None, list[cst.Call]]]()
    for one in (statement, *(other for other in body if other is not statement)):
        for name, calls in _placed(one):
            mine, wanted = Uses(pages), [taken[1] for call in calls if (taken := _taken_off(call)) is not None]
            device = device or wanted[0]
            try:
                mine.follow_placed(page, name, calls[0])
            except Unfit:
                if one is statement:
                    raise
            else:
                uses.add(mine)
                off.append((name, calls))
    uses.check()
    device = need(device, "the statement that puts the data on the device is not one that is followed")
    return _moved(cells, pages, page, off, uses, device)


def _placed(statement: cst.CSTNode) -> Iterator[tuple[str | None, list[cst.Call]]]:
    """Yield the names that a statement puts on a device, with the call; None for the parts of a ``TensorDataset``."""
    simple = within(statement, cst.Assign) if isinstance(statement, cst.SimpleStatementLine) else ()
    for assign in (one for one in simple if len(one.targets) == 1):
        target, value = assign.targets[0].target, assign.value
        pairs: list[tuple[cst.BaseExpression, cst.BaseExpression]] = [(target, value)]
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            pairs = [(a.value, b.value) for a, b in zip(target.elements, value.elements, strict=False)]
        for name, made in pairs:
            if isinstance(name, cst.Name) and isinstance(made, cst.Call) and _taken_off(made):
                yield name.value, [made]
    for call in within(statement, cst.Call):
        if last_name(call) == "TensorDataset":
            parts = [arg.value for arg in call.args if isinstance(arg.value, cst.Call) and _taken_off(arg.value)]
            yield from [(None, parts)] if parts else []


def _taken_off(call: cst.Call) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return ``call`` without the device that it puts its result on, and the device; None where it names none."""
    if not isinstance(call.func, cst.Attribute):
        return None
    name = call.func.attr.value
    if name == "cuda" and not call.args:
        return call.func.value, cst.SimpleString('"cuda"')
    if name == "to" and len(call.args) == 1 and call.args[0].keyword is None:
        return (call.func.value, call.args[0].value) if _DEVICE.match(text_of(call.args[0].value)) else None
    given = keyword(call, "device")
    if name in _SAME and given is not None and _DEVICE.match(text_of(given)):
        return arguments.without_keyword(call, "device"), given
    return None


def _moved(
    cells: Cells,
    pages: Pages,
    home: int,
    off: list[tuple[str | None, list[cst.Call]]],
    uses: Uses,
    device: cst.BaseExpression,
) -> Patch | Refused:
    """Return the cells with the data where it was made, and the batches moved that are cut or put together."""
    to = text_of(device)
    collate = import_lines.name_for(_HOME, "default_collate", cells, "collate")
    text = f"lambda rows: [part.to({to}) for part in {collate}(rows)]"
    nodes: dict[int, dict[cst.CSTNode, rewriting.New]] = {home: {}}
    live: dict[int, list[str]] = {home: []}
    for name, calls in off:
        nodes[home] |= {call: taken[0] for call in calls if (taken := _taken_off(call)) is not None}
        live[home] += [f"{name}.data = {name}.data.cpu()"] if name is not None else []
    for one in uses.cut:
        nodes.setdefault(one.page, {})[one.node] = partial(arguments.called_on, call=f".to({to})")
    for page, path in uses.sets:  # the objects stay, so that whatever else holds them follows
        live.setdefault(page, []).append(f"[setattr(one, 'data', one.data.cpu()) for one in {path}.tensors]")
    for one in uses.loaders:
        nodes.setdefault(one.page, {})[one.node] = partial(arguments.with_keyword, name="collate_fn", text=text)
        live.setdefault(one.page, []).extend(f"{name}.collate_fn = {text}" for name in [one.name] if name)
    loading, edits = {one.page for one in uses.loaders}, list[Edit | Refused]()
    for page in {**nodes, **live}:
        cell, parsed = pages[page]
        module = _without_idle(parsed.module, rewriting.exchange(parsed.module, nodes.get(page, {})))
        imports = [import_lines.source_of(_HOME, "default_collate", collate)] if page in loading else []
        module = import_lines.insert_at_top(parsed, module, imports)
        edits.append(rewriting.edit(cells, cell, parsed, module, live.get(page, [])))
    return rewriting.join(cells, edits)


def _without_idle(before: cst.Module, after: cst.Module) -> cst.Module:
    """Return ``after`` without the statements that now bind names to themselves; comments above them stay."""
    body: list[rewriting.Statement] = []
    pending: list[cst.EmptyLine] = []
    for old, new in zip(before.body, after.body, strict=True):
        pending += new.leading_lines
        small = new.body[0] if isinstance(new, cst.SimpleStatementLine) else new
        name, _, value = text_of(small).partition(" = ")
        if old.deep_equals(new) or name != value:  # not ``x = x``, nor ``x, y = x, y``
            body.append(new.with_changes(leading_lines=pending))
            pending = []
    return after.with_changes(body=body, footer=[*pending, *after.footer])


FIX: Final = Fix(
    id="batch_to_device",
    title="Keep the data set in host memory and move batches to the device",
    effect=Effect.EXACT,
    cost="a copy of each batch to the device",
    propose=propose,
    detect=detect,
    patch=patch,
)
