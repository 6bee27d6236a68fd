"""Graphs that are kept though no gradient is taken through them: by ``retain_graph=True``, and in evaluation.

``drop_retain_graph``: with it, the activations of a step live on until its loss is bound anew, after the next forward.
Gradients of gradients, and another backward in the step, need it, and are refused; so is a state carried over steps.
Where the graph is used again otherwise, torch raises, and the attempt is rolled back.

``no_grad_eval``: ``model.eval()`` does not stop autograd from saving activations for a backward pass that never comes.
The loops and statements of which the cells show that no gradient is taken of anything they make stand in a ``with``. A
function that gives something with a graph to whoever calls it stays as it is. ``no_grad`` and not ``inference_mode``:
what it makes may be part of a later computation that is differentiated. Values stay bit for bit what they were, but for
the fast path of torch's attention layers, which rounds otherwise: there the change is offered as one that changes the
result. So it is where a name keeps what a model in training mode made: a later cell may train on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Final

import libcst as cst

from oomdoctor.fixes._construction_sites import keyword, under
from oomdoctor.fixes._preconditions import found_or_asked
from oomdoctor.fixes._refusals import Unfit, listed, need, proposing, refusing, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Site
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.containers import items_of
from oomdoctor.objects.kinds import Kind, kind_of, members_of, mro_of, name_of
from oomdoctor.objects.known import Objects
from oomdoctor.objects.named import is_users
from oomdoctor.program import import_lines, rewriting, torch_functions
from oomdoctor.program.arguments import without_keyword
from oomdoctor.program.dataflow import ancestors
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.dependencies import ground
from oomdoctor.program.gradients import graphs_of
from oomdoctor.program.kept_tensors import outliving, undifferentiated
from oomdoctor.program.names import blocks_of, own_nodes

_NOTHING: Final = "no backward keeps its graph"
_CARRIED: Final = "a state carried over steps needs the graphs of the steps before: it has to be cut first"
_LOSS: Final = re.compile(r"[^\W\d]\w*")
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_DROPS: Final = "retain_graph"


def _detect_kept(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find each ``backward`` that keeps its graph: ``retain_graph`` where that can be dropped, else named why not."""
    sites: list[Site] = []
    for scope, node in ((reached, node) for reached in ground(program).reach for node in own_nodes(reached.body)):
        if isinstance(node, ast.Call) and torch_functions.last_name(node) == "backward":
            values = [one.value for one in node.keywords if one.arg in {_DROPS, "create_graph"}] + node.args[1:2]
            if any(isinstance(value, ast.Constant) and value.value is True for value in values):
                sites.append(site(_kind(program, scope, node), scope, node))
    return tuple(sites)


def _kind(program: Program, scope: Scope, call: ast.Call) -> str:
    """Return ``retain_graph`` where no further gradient is taken in the step of a call, else why it is kept."""
    keywords = {one.arg: one.value for one in call.keywords}
    if "create_graph" in keywords and ast.unparse(keywords["create_graph"]) != "False":
        return "create_graph"
    if "retain_graph" not in keywords:
        return "the argument is not given by name: it is not known what else uses the graph"
    path = ancestors(ast.Module(body=list(scope.body), type_ignores=[]), call)
    loops = [outer for outer, inner in pairwise(path) if isinstance(outer, _LOOPS) and inner in outer.body]
    for node in _later(path, loops[-1] if loops else path[0]):
        every = [node, *(part for one in graphs_of(program, {}).called([node]) for part in one.body)]
        calls = (one for part in every for one in ast.walk(part) if isinstance(one, ast.Call))
        if any(torch_functions.last_name(one) in torch_functions.TAKES_GRADIENT | {"fit"} for one in calls):
            return "another gradient is taken after it in the same step"
    return _DROPS


def _later(path: Sequence[ast.AST], step: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of ``step`` that come after the last of ``path``."""
    for outer, inner in pairwise(path[path.index(step) :]):
        for block in blocks_of(outer):
            if inner in block:
                yield from block[block.index(inner) + 1 :]


@proposing
def _propose_drop(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code, census = evidence.code, evidence.census
    place = need(code.first("drop_retain_graph"), _NOTHING)
    need(code.first("detach_state") is None, _CARRIED)
    loss = _LOSS.match(place.text)
    held = sum(one.bytes for one in census.holdings if loss and one.path.startswith(f"{loss[0]} → graph"))
    kept = held + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    basis = f"measured: the census found {format_size(kept)} of graphs that earlier results keep"
    if not kept:
        kept = census.bytes_of(Role.ACTIVATION) // 2
        basis = f"estimate: half of the {format_size(2 * kept)} of activations, as two steps share the device"
    need(kept, "the census found no graphs or activations that a backward keeps")
    yield Proposal(effect=Effect.EXACT, saves=kept, basis=basis)


@refusing
def _patch_drop(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    sites = sites_of(evidence, "drop_retain_graph", _NOTHING)
    dropped = [one for one in sites if one.kind == _DROPS]
    need(evidence.code.first("detach_state") is None, _CARRIED)
    if not dropped:
        why = "the gradients are differentiated themselves (create_graph)"
        raise Unfit(f"line {sites[-1].line}: {why if sites[-1].kind == 'create_graph' else sites[-1].kind}")

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New]:
        lines = {(one.line, one.end_line) for one in here}
        calls = [call for call in rewriting.within(parsed.module, cst.Call) if keyword(call, _DROPS) is not None]
        where = {call: parsed.lines_of(call) for call in calls}
        return {call: without_keyword(call, _DROPS) for call, at in where.items() if (at.start, at.stop - 1) in lines}

    return rewriting.at_sites(cells, dropped, change)


_NO_PLACE: Final = (
    "the failing cell runs no model with gradients on where it is certain that nothing is differentiated afterwards"
)

_NAMED: Final = 4
"""Names that a caveat gives; of more, their number."""

_CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.TUPLE})
_LOOKED_AT: Final = 64
_OF_STEP: Final = re.compile(r"local `[^`]*` of (forward|backward) at ")
"""A tensor that a layer or a backward pass is at work on."""


def _detect_undifferentiated(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find what runs a model and is never differentiated, with the names that keep a graph when the cell has ended.

    It is ``trainable`` where a later cell may train on what is kept: a model that is run is in training mode, or may be
    as it is not among those that are known, or an input requires a gradient, whatever the mode.
    """
    places = undifferentiated(program, objects.kinds)
    kept, paths = outliving(program, objects.kinds, places)
    known = {model.path: model for model in objects.models}
    met = [known.get(path) for path in paths]
    models = met if met and all(met) else list(objects.models)
    trainable = not models or any(one is not None and one.training for one in models) or _has_inputs(objects.namespace)
    kind = "trainable" if trainable else "idle"
    return tuple(site(kind, scope, node, kept) for scope, node in places)


def _has_inputs(namespace: Mapping[str, Any]) -> bool:
    """Whether a name holds a tensor that requires a gradient and is no parameter, or a container of one."""
    for name, value in namespace.items():
        kind = kind_of(type(value))
        items = items_of(value, kind, _LOOKED_AT) if kind in _CONTAINERS else (value,)
        if is_users(name) and any(map(_wants_grad, items)):
            return True
    return False


def _wants_grad(value: Any) -> bool:
    if kind_of(type(value)) is not Kind.TENSOR:
        return False
    bases = {name_of(base): base for base in mro_of(type(value))}
    if "Parameter" in bases:
        return False
    # Past a class of the user's, which may answer itself.
    members = members_of(bases["TensorBase"])
    return bool(members["is_leaf"].__get__(value) and members["requires_grad"].__get__(value))


@proposing
def _propose_no_grad(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code = evidence.code
    need(not code.grad_disabled, "gradients are off already at the line that failed")
    sites = sites_of(evidence, "no_grad_eval", _NO_PLACE)
    found = evidence.census.bytes_of(Role.ACTIVATION)
    why = "the census found no activations that are kept for a backward pass"
    kept = need(found or found_or_asked(incident, evidence), why)
    if (loop := _only_trains(evidence)) is not None:
        raise Unfit(f"the activations that were found are those of a step of the training loop of line {loop.line}")
    fused, kept_on = _fused(code), _kept_on(sites)
    is_trained_on = kept_on is not None and sites[0].kind == "trainable"
    yield Proposal(
        effect=Effect.CHANGES_RESULT if fused or is_trained_on else Effect.EXACT,
        saves=kept,
        basis=f"at most the {format_size(kept)} of activations that the census found kept for a backward pass"
        if found
        else f"an estimate: {format_size(kept)} of Jittor's graph"
        if evidence.jittor is not None
        else f"at least the {format_size(kept)} that a layer asked for",
        caveat="; ".join(filter(None, (kept_on, fused))) or None,
    )


def _fused(code: CodeFacts) -> str | None:
    path = next(
        (f"{model.path}.{name}".rstrip(".") for model in code.models for name in model.fused_without_grad), None
    )
    return path and (
        f"`{path}` takes a fused kernel in evaluation without gradients, "
        "whose results differ by rounding and are zero at padded positions"
    )


def _kept_on(sites: Sequence[Site]) -> str | None:
    """Return what holds results with their graph when the cell has ended, and would hold them without one."""
    kept = list(dict.fromkeys(name for one in sites for name in one.names))
    if not kept:
        return None
    some = ", ".join(f"`{name}`" for name in kept[:_NAMED])
    named = listed(kept) if len(kept) <= _NAMED else f"{some} and {len(kept) - _NAMED} more"
    return f"{named} will hold values without gradients; backward() on them will not train the model"


def _only_trains(evidence: Evidence) -> TrainingLoop | None:
    """Return the training loop that was running where it holds all activations, None where evaluation may hold some."""
    sites = evidence.code.sites["no_grad_eval"]
    loop = next((one for one in evidence.code.loops if one.in_failing_run and one.was_running and one.end_line), None)
    held = [one for one in evidence.census.holdings if one.role is Role.ACTIVATION]
    if loop is None or loop.end_line is None or not held:
        return None
    lines = range(loop.line, loop.end_line + 1)
    is_beside = all(one.cell == loop.cell and one.line not in lines for one in sites)
    is_of_step = all(_OF_STEP.match(one.path) or one.expression == loop.loss for one in held)
    return loop if is_beside and is_of_step else None


@refusing
def _patch_no_grad(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    return rewriting.at_sites(cells, sites_of(evidence, "no_grad_eval", _NO_PLACE), partial(_changed, cells))


def _changed(cells: Cells, parsed: rewriting.ParsedCell, sites: list[Site]) -> cst.Module:
    cell = cells.get(sites[0].cell)
    name, imports = need(import_lines.library_name(cells.beside(cell), import_lines.framework_of(cells)))
    blocks: list[Any] = [parsed.module.body, *(one.body for one in rewriting.within(parsed.module, cst.IndentedBlock))]
    wrapped = [_starting_at(parsed, one.line, one.text) for one in sites]
    for node, one in zip(wrapped, sites, strict=True):
        if node is None or not any(node is other for block in blocks for other in block):
            raise Unfit(f"line {one.line} of {cell} is no statement of its own")
        if isinstance(node, cst.SimpleStatementLine) and len(node.body) > 1:
            raise Unfit(f"line {one.line} of {cell} has several statements")
        if imports and parsed.code(node) in dict(parsed.masked.hidden):
            raise Unfit(f"{name} would have to be imported before a line of IPython's own syntax")
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    for block in blocks:
        for is_wrapped, group in groupby(block, key=lambda node: any(node is one for one in wrapped)):
            if is_wrapped:
                first, *rest = group
                changes |= {first: [under(parsed, f"{name}.no_grad()", [first, *rest])], **dict.fromkeys(rest, ())}
    return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)


def _starting_at(parsed: rewriting.ParsedCell, line: int, text: str) -> rewriting.Statement | None:
    """Return the outermost statement that begins on ``line``, None if it is not the one that ``text`` begins like."""
    path = rewriting.path_to(parsed, line)
    found = next((node for node in path if parsed.positions[node].start.line == line), None)
    is_block = re.match(r"(?:async |for |while |if |with |try:|def )", text) is not None
    return found if is_block == isinstance(found, cst.BaseCompoundStatement) else None


FIXES: Final = (
    Fix(
        id="drop_retain_graph",
        title="Drop retain_graph=True",
        effect=Effect.EXACT,
        cost="nothing",
        propose=_propose_drop,
        patch=_patch_drop,
        detect=_detect_kept,
    ),
    Fix(
        id="no_grad_eval",
        title="Evaluate under torch.no_grad()",
        effect=Effect.EXACT,
        cost="nothing: it is faster",
        propose=_propose_no_grad,
        patch=_patch_no_grad,
        detect=_detect_undifferentiated,
    ),
)
