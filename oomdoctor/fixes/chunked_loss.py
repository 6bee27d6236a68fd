"""A cross-entropy over a large vocabulary taken in chunks of rows, with the output layer where a model takes its loss.

The loss keeps log-probabilities as large as the logits, and its backward pass makes two gradients of that size. A row's
loss depends on that row alone: what is called becomes ``chunked_loss(F.cross_entropy, 8)``, which reads its options as
it runs and refuses what has no rows of classes. The mean is over all rows that count, weighted by their classes, not
the mean of means of chunks. Where a linear layer made the logits, there is no gradient of all of them either (see
``_chunked_loss``). Calls are told by the function's name, or by what is called being such a loss of the namespace. A
model whose forward takes the loss, of a library or written by hand, gets a line where it is made:
``chunked_head(model, 8)``. Limit: the logits themselves are the model's, and stay.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import Final

import libcst as cst

from oomdoctor.fixes._placement import placed
from oomdoctor.fixes._terms import HELD, NUMBER_BYTES, Unfit, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.ground import ground
from oomdoctor.program.names import call_name, own_nodes

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: the sum over rows is taken in another order."""
_CHUNKS: Final = (2, 4, 8, 16)
_OVERHEAD: Final = 0.02
"""Time of taking each chunk's log-probabilities twice, as a share of a step. A round figure, not measured."""
_OVERHEAD_OF_HEAD: Final = 0.1
"""Time of making its logits twice as well. A round figure, not measured."""

_WORTH: Final = 1 / 20
"""What the log-probabilities have to take of the memory found, so that it is worth the while."""

_FUNCTION: Final = "torch.nn.functional.cross_entropy"
_FRAME: Final = re.compile(r"cross_entropy|nll_loss|log_softmax")
_MAKES_LOGITS: Final = re.compile(r"nn/modules/linear\.py")


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
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
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose 2 to 16 chunks, no more than there are rows."""
    code = evidence.code
    if code.first("chunked_loss") is None and not _heads(code):
        raise Unfit("neither a cell nor the forward of a model takes a cross-entropy")
    if code.compiles is not None:
        raise Unfit("torch.compile takes the loss together with what is around it")
    if any(one.kind == "create_graph" for one in code.sites.get("drop_retain_graph", ())):
        raise Unfit("a gradient is taken of gradients, which a recomputed loss does not give")
    logits = [_logits(held, code) for held in evidence.census.holdings]
    size, rows = max([_asked_for(incident, evidence), *logits])
    if _FRAME.search(incident.framework_frame or "") and (incident.requested or 0) > size:
        size, rows = incident.requested or 0, rows or _CHUNKS[-1]
    if not size:
        raise Unfit("no logits over the classes of a model were found")
    if size < _WORTH * evidence.census.found:
        raise Unfit(f"the log-probabilities take {format_size(size)} of {format_size(evidence.census.found)} found")
    doses = [chunks for chunks in _CHUNKS if chunks <= rows]
    if not doses:
        raise Unfit("the loss is over one row: there is nothing to split")
    # The output layer in chunks has no gradient of all logits either.
    kept, slowdown = (2 * size, 1 + _OVERHEAD_OF_HEAD) if _heads(code) else (size, 1 + _OVERHEAD)
    for chunks in doses:
        yield Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=kept * (chunks - 1) // chunks,
            slowdown=slowdown,
            basis=f"estimate: 1/{chunks} of {format_size(size)} of log-probabilities at a time",
        )


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
    fit = [one for one in code.classes if rows * one * each <= requested <= _most_asked_for(rows * one * each)]
    return (rows * max(fit) * _loss_bytes(each, code), rows) if fit else (0, 0)


def _most_asked_for(nbytes: int) -> int:
    """Return the largest segment that the caching allocator asks for so as to serve ``nbytes``.

    Source: ``get_allocation_size`` with ``kMinLargeAlloc``, ``kLargeBuffer`` and ``kRoundLarge``.
    """
    return max(nbytes + (2 << 20), 20 << 20 if nbytes < 10 << 20 else 0)


def _loss_bytes(each: int, code: CodeFacts) -> int:
    """Return the bytes of one log-probability, given those of a logit: autocast takes losses in float32.

    Source: the functions listed so in docs.pytorch.org/docs/stable/amp.html.
    """
    return max(each, 4) if code.autocast else each


def _heads(code: CodeFacts) -> list[ModelFacts]:
    """Return the models whose forward takes their loss; none where the cells take one outside of a forward."""
    if any("forward" not in one.names for one in code.sites.get("chunked_loss", ())):
        return []
    return [model for model in (*code.models, *code.local_models) if model.takes_loss]


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return each cross-entropy of the failing run as one that is taken in chunks."""
    code, sites = evidence.code, evidence.code.sites.get("chunked_loss", ())
    if code.half_weights and not code.autocast:
        raise Unfit("the loss is taken in half precision: sums of its chunks would round otherwise")
    if any(re.search(r"\bchunked_(loss|head)\(", cell.source) for cell in cells.history):
        raise Unfit("the code takes its cross-entropy in chunks already")
    if heads := _heads(code):
        name = import_lines.name_for("oomdoctor", "chunked_head", cells, "head_in_chunks")
        lines = [(model, f"{name}({model.path}, {dose.number('chunks')})\n") for model in heads]
        return placed(cells, lines, [import_lines.source_of("oomdoctor", "chunked_head", name)])
    if not sites:
        raise Unfit("neither a cell nor the forward of a model takes a cross-entropy")
    known = {loss.path for loss in code.losses}

    def changed(parsed: rewriting.ParsedCell, here: list[Site]) -> cst.Module | Refused:
        beside = cells.beside(cells.get(here[0].cell))
        by = import_lines.name_for("oomdoctor", "chunked_loss", beside, "loss_in_chunks")
        new: dict[cst.CSTNode, rewriting.New] = {}
        for one in here:
            called, stands_for, *_ = one.names
            is_known = stands_for in known or one.kind == "made"  # which is asked when it is called
            if not is_known and import_lines.qualified_name(beside, called) != _FUNCTION:
                raise Unfit(f"whether `{called}` is torch's cross_entropy cannot be told from the cells")
            for call in rewriting.within(parsed.module, cst.Call):
                if parsed.code(call.func) == called and parsed.positions[call].start.line == one.line:
                    new[call.func] = cst.parse_expression(f"{by}({called}, {dose.number('chunks')})")
        module = rewriting.exchange(parsed.module, new)
        return import_lines.insert_at_top(parsed, module, [import_lines.source_of("oomdoctor", "chunked_loss", by)])

    return rewriting.at_sites(cells, sites, changed)


FIX: Final = Fix(
    id="chunked_loss",
    title="Take the cross-entropy by chunks of rows, recomputed in the backward pass",
    effect=Effect.EQUIVALENT,
    tolerance=TOLERANCE,
    joins=True,
    cost="each chunk's log-probabilities once more, and its logits where a linear layer made them",
    propose=propose,
    patch=patch,
    detect=detect,
    leaves=(".forward",),
)
