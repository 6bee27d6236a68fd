"""A model run over parts of the batch, and a cross-entropy over chunks of rows, both recomputed in the backward pass.

``chunked_forward``: ``model(x)`` becomes ``in_parts(model, 4)(x)`` where the failing cell calls a model, in functions
and modules of the user's as well. The loss and its one backward stay as they are, so what couples the samples in the
loss is kept, and so are the random draws of the whole batch. ``chunked_inference``: without gradients nothing is kept
of a part but its result, which is written into the whole one. Of a ``generate``, each part's keys and values are let go
of before the next one's. Where the code moves the batch to the device in the call, the parts are moved one by one. The
results are equal up to rounding; that samples do not depend on each other is shown by the trial.

``chunked_loss``: a cross-entropy keeps log-probabilities as large as the logits, and its backward pass makes two
gradients of that size. What is called becomes ``chunked_loss(F.cross_entropy, 8)``, which refuses what has no rows of
classes. Where a linear layer made the logits, there is no gradient of all of them either (see ``_chunked_loss``). A
model whose forward takes the loss gets a line where it is made: ``chunked_head(model, 8)``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._construction_sites import placed
from oomdoctor.fixes._preconditions import (
    HELD,
    NUMBER_BYTES,
    check_short,
    check_training,
    couples,
    found_or_asked,
    passing,
    takes_note,
)
from oomdoctor.fixes._refusals import FORWARD_SHARE, Unfit, check, fitting, in_parts_of, need, proposing, refusing
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Site
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.dependencies import ground
from oomdoctor.program.names import call_name, own_nodes

TOLERANCE: Final = 1e-5
"""Relative difference of losses, gradients and outputs in float32: sums over the batch are taken in another order."""
_CHUNKS: Final = (2, 4, 8, 16)
_CHUNKS_OF_PREDICTIONS: Final = (2, 4, 16, 64)
_OVERHEAD: Final = 0.001
"""Time lost per part to launching the same kernels again, as a share of the whole. A round figure, not measured."""
_OVERHEAD_OF_LOSS: Final = 0.02
"""Time of taking each chunk's log-probabilities twice, as a share of a step. A round figure, not measured."""
_OVERHEAD_OF_HEAD: Final = 0.1
"""Time of making its logits twice as well. A round figure, not measured."""

_WORTH: Final = 1 / 20
"""What the log-probabilities have to take of the memory found, so that it is worth the while."""

_FUNCTION: Final = "torch.nn.functional.cross_entropy"
_FRAME: Final = re.compile(r"cross_entropy|nll_loss|log_softmax")
_MAKES_LOGITS: Final = re.compile(r"nn/modules/linear\.py")
_NOTHING: Final = "no activations were found that splitting the batch could save"
_TO_DEVICE: Final = m.Call(func=m.Attribute(attr=m.Name("cuda")), args=[]) | m.Call(
    func=m.Attribute(attr=m.Name("to")),
    args=[m.Arg(m.SimpleString() | m.Name(m.MatchRegex(r"(?i)(\w*_)?dev(ice)?")), keyword=None)],
)
_OTHERWISE: Final = (".generate", ".forward")
"""Ends of what is called where a model is not simply called."""


@proposing
def _propose_forward(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    _check_apart(_models(evidence))
    check_short(incident, evidence)
    activations = need(found_or_asked(incident, evidence), _NOTHING)
    slowdown = 1.0 if evidence.code.grad_disabled else 1 + FORWARD_SHARE
    yield from in_parts_of(fitting(_CHUNKS, evidence), "chunks", activations, "activations", slowdown=slowdown)


@_trainers.first("chunked_inference")
@proposing
def _propose_inference(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    _check_without_gradients(evidence.code)
    _check_apart(_models(evidence))
    size = need(passing(incident, evidence, batch=False), _NOTHING)
    counts = fitting(_CHUNKS_OF_PREDICTIONS, evidence)
    yield from in_parts_of(counts, "chunks", size, "activations and request", each=_OVERHEAD)


def _models(evidence: Evidence) -> list[ModelFacts]:
    models = [model for model in evidence.code.models if model.parameter_bytes]
    return need(models, "no model was found among the names of the notebook")


def _check_without_gradients(code: CodeFacts) -> None:
    """Raise ``Unfit`` where the graph of each part would be kept; what is generated, token ids, has none."""
    trains = any(loop.in_failing_run for loop in code.loops)
    if not code.grad_disabled and (code.generates is None or trains):
        raise Unfit("the failing line runs with gradients on, so that activations of every part would be kept")


def _check_apart(models: Sequence[ModelFacts]) -> None:
    for model in models:
        check(couples(model))


@refusing
def _patch_forward(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    for model in evidence.code.models:
        check(couples(model) or takes_note(model, own=True))
    check_training(evidence)
    return _in_parts(cells, evidence.code.sites.get("chunked_forward", ()), dose)


@refusing
def _patch_inference(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    code = evidence.code
    if (through := _trainers.patched("chunked_inference", cells, evidence, dose)) is not None:
        return through
    _check_without_gradients(code)
    _check_apart(code.models)
    sites = code.sites.get("chunked_inference", ())
    if any(loop.in_failing_run for loop in code.loops):
        why = "the failing cell trains as well: which of its calls are predictions cannot be told"
        sites = need(tuple(one for one in sites if one.kind == "prediction"), why)
    return _in_parts(cells, sites, dose, moves=True)


def _in_parts(cells: Cells, found: Sequence[Site], dose: Dose, *, moves: bool = False) -> Patch | Refused:
    """Return the cells with ``in_parts(model, parts)(x)`` for each call of a model that ``detect_runs`` found.

    Predictions have it move the parts of what a call ``moves`` to the device, and generate in parts.
    """
    otherwise = ".forward" if moves else _OTHERWISE
    sites = [one for one in found if one.kind != "numpy" and not one.names[-1].endswith(otherwise)]
    need(not any("in_parts(" in cell.source for cell in cells.history), "a model is given parts of the batch already")
    need(sites, "no call of a model was found in what the failing cell runs")
    named = {one: one.names[-1] for one in sites}
    return _wrapped(cells, named, "in_parts", "model_in_parts", dose.number("chunks"), moves=moves)


def _wrapped(
    cells: Cells, named: Mapping[Site, str], helper: str, otherwise: str, chunks: int, *, moves: bool = False
) -> Patch | Refused:
    """Return the cells with ``helper(f, chunks)(x)`` for each call ``f(x)`` of what is ``named`` at each site.

    The helper is called ``otherwise`` where its name is taken; ``moves``: what moves the first argument is taken away.
    """

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> cst.Module:
        by = import_lines.name_for("oomdoctor", helper, cells.beside(cells.get(here[0].cell)), otherwise)
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for call in rewriting.within(parsed.module, cst.Call):
            called = {named[one] for one in here if one.line == parsed.lines_of(call)[0]}
            text = rewriting.text_of(call.func) if called else ""
            if called and ast.unparse(ast.parse(text, mode="eval")) in called:
                changes[call.func] = cst.parse_expression(f"{by}({text}, {chunks})")
                first = call.args[0].value if call.args else None
                if moves and isinstance(first, cst.Call) and m.matches(first, _TO_DEVICE):
                    changes[first] = cst.ensure_type(first.func, cst.Attribute).value
        imports = [import_lines.source_of("oomdoctor", helper, by)]
        return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)

    return rewriting.at_sites(cells, list(named), change)


def _detect_loss(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find where a cross-entropy is taken: what is called there, and the loss or function that it stands for."""
    known = {loss.path for loss in objects.losses if loss.type_name == "CrossEntropyLoss"}
    reach = ground(program).reach
    made = {name for scope in reach for name in _made_in(scope)}
    found = {site for scope in reach for site in _of_scope(program, scope, known, made)}
    return tuple(sorted(found, key=lambda site: (site.cell, site.line, site.names)))


def _made_in(scope: Scope) -> Iterator[str]:
    """Yield what a function binds to a cross-entropy that it makes: names, and attributes of its object."""
    for node in own_nodes(scope.body):
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Call) and call_name(one).rpartition(".")[2] == "CrossEntropyLoss"
            for one in ast.walk(node.value)
        ):
            yield from map(ast.unparse, node.targets)


def _of_scope(program: Program, scope: Scope, known: set[str], made: set[str]) -> Iterator[Site]:
    stands_for = program.given(scope)
    for node in own_nodes(scope.body):
        name = call_name(node) if isinstance(node, ast.Call) else ""
        stands = stands_for.get(name, name)
        is_loss = stands in known | made or stands.rpartition(".")[2] == "cross_entropy"
        if isinstance(node, ast.Call) and name and is_loss:
            within = ("forward",) if getattr(scope.function, "name", "") == "forward" else ()
            yield site("made" if stands in made - known else "cross_entropy", scope, node, (name, stands, *within))


@proposing
def _propose_loss(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code = evidence.code
    if code.first("chunked_loss") is None and not _heads(code):
        raise Unfit("neither a cell nor the forward of a model takes a cross-entropy")
    need(code.compiles is None, "torch.compile takes the loss together with what is around it")
    if any(one.kind == "create_graph" for one in code.sites.get("drop_retain_graph", ())):
        raise Unfit("a gradient is taken of gradients, which a recomputed loss does not give")
    logits = [_logits(held, code) for held in evidence.census.holdings]
    size, rows = max([_asked_for(incident, evidence), *logits])
    if _FRAME.search(incident.framework_frame or "") and (incident.requested or 0) > size:
        size, rows = incident.requested or 0, rows or _CHUNKS[-1]
    need(size, "no logits over the classes of a model were found")
    if size < _WORTH * evidence.census.found:
        raise Unfit(f"the log-probabilities take {format_size(size)} of {format_size(evidence.census.found)} found")
    doses = [chunks for chunks in _CHUNKS if chunks <= rows]
    need(doses, "the loss is over one row: there is nothing to split")
    # The output layer in chunks has no gradient of all logits either.
    kept, slowdown = (2 * size, 1 + _OVERHEAD_OF_HEAD) if _heads(code) else (size, 1 + _OVERHEAD_OF_LOSS)
    what = "logits' gradients and log-probabilities" if _heads(code) else "log-probabilities"
    yield from in_parts_of(doses, "chunks", kept, what, slowdown=slowdown)


def _logits(held: Holding, code: CodeFacts) -> tuple[int, int]:
    """Return bytes of the log-probabilities and rows, where the largest tensor that is held is logits."""
    shape, each = held.shape or (), NUMBER_BYTES.get(held.dtype or "", 0)
    if held.role not in HELD or len(shape) < 2 or not each:
        return 0, 0
    classes = next((size for size in (shape[-1], shape[1]) if size in code.classes), None)
    is_scores = len(shape) == 4 and shape[-1] == shape[-2] == classes  # of attention, over as many positions
    if classes is None or is_scores:
        return 0, 0
    return math.prod(shape) * _loss_bytes(each, code), math.prod(shape) // classes


def _asked_for(incident: Incident, evidence: Evidence) -> tuple[int, int]:
    """Return bytes of the log-probabilities and rows, where a linear layer asked for the memory of the logits."""
    code, requested = evidence.code, incident.requested or 0
    targets = [
        math.prod(held.shape)
        for held in evidence.census.holdings
        if held.role is Role.BATCH and held.dtype == "int64" and held.shape
    ]
    if not targets or _MAKES_LOGITS.search(incident.framework_frame or "") is None:
        return 0, 0
    rows, each = max(targets), 2 if code.autocast or code.half_weights else 4
    fit = [one for one in code.classes if rows * one * each <= requested]
    return (rows * max(fit) * _loss_bytes(each, code), rows) if fit else (0, 0)


def _loss_bytes(each: int, code: CodeFacts) -> int:
    """Return the bytes of one log-probability, given those of a logit: autocast takes losses in float32."""
    return max(each, 4) if code.autocast else each


def _heads(code: CodeFacts) -> list[ModelFacts]:
    """Return the models whose forward takes their loss; none where the cells take one outside of a forward."""
    if any("forward" not in one.names for one in code.sites.get("chunked_loss", ())):
        return []
    return [model for model in (*code.models, *code.local_models) if model.takes_loss]


@refusing
def _patch_loss(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    code, sites = evidence.code, evidence.code.sites.get("chunked_loss", ())
    if code.half_weights and not code.autocast:
        raise Unfit("the loss is taken in half precision: sums of its chunks would round otherwise")
    if any(re.search(r"\bchunked_(loss|head)\(", cell.source) for cell in cells.history):
        raise Unfit("the code takes its cross-entropy in chunks already")
    if heads := _heads(code):
        name = import_lines.name_for("oomdoctor", "chunked_head", cells, "head_in_chunks")
        lines = [(model, f"{name}({model.path}, {dose.number('chunks')})\n") for model in heads]
        return placed(cells, lines, [import_lines.source_of("oomdoctor", "chunked_head", name)])
    need(sites, "neither a cell nor the forward of a model takes a cross-entropy")
    known = {loss.path for loss in code.losses}
    for one in sites:
        called, stands_for, *_ = one.names
        is_known = stands_for in known or one.kind == "made"  # which is asked when it is called
        if not is_known and import_lines.qualified_name(cells.beside(cells.get(one.cell)), called) != _FUNCTION:
            raise Unfit(f"whether `{called}` is torch's cross_entropy cannot be told from the cells")
    named = {one: one.names[0] for one in sites}
    return _wrapped(cells, named, "chunked_loss", "loss_in_chunks", dose.number("chunks"))


FIXES: Final = (
    Fix(
        id="chunked_forward",
        title="Run forward on chunks of the batch and recompute them in the backward pass",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        cost="one more forward",
        propose=_propose_forward,
        patch=_patch_forward,
        detect=detect_runs,
    ),
    Fix(
        id="chunked_inference",
        title="Predict in chunks of the batch",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        cost="the same arithmetic in smaller pieces",
        propose=_propose_inference,
        patch=_patch_inference,
        detect=detect_runs,
    ),
    Fix(
        id="chunked_loss",
        title="Compute logits and cross-entropy in chunks",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        joins=True,
        cost="each chunk's log-probabilities once more, and its logits where a linear layer made them",
        propose=_propose_loss,
        patch=_patch_loss,
        detect=_detect_loss,
        leaves=(".forward",),
    ),
)
