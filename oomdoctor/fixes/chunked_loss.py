"""The cross-entropy over many classes taken by chunks of rows, so that log-probabilities exist for one chunk alone.

Over a large vocabulary the loss keeps log-probabilities as large as the logits, and its backward pass makes two
gradients of that size. A row's loss depends on that row alone: taken in chunks that are computed anew in the backward
pass, each of them exists for one chunk at a time. The mean is over all rows that count, weighted by their classes, not
the mean of means of chunks.

What is called becomes ``chunked_loss(F.cross_entropy, 8)``, which reads its options as it runs and refuses what has no
rows of classes. Calls are told by the function's name, or by what is called being such a loss of the namespace. Limits:
the logits themselves are the model's, and stay; a loss that a library takes inside of a model's forward is not seen.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import Final

import libcst as cst

from oomdoctor.fixes._preconditions import HELD, NUMBER_BYTES
from oomdoctor.fixes._unfit import Unfit, proposing, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts
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
"""Relative difference of losses and gradients in float32: the mean over the rows is taken in another order."""

_CHUNKS: Final = (2, 4, 8, 16)

_OVERHEAD: Final = 0.02
"""Time of taking each chunk's log-probabilities twice, as a share of a step. A round figure, not measured."""

_WORTH: Final = 1 / 20
"""What the log-probabilities have to take of the memory found, so that it is worth the while."""

_FUNCTION: Final = "torch.nn.functional.cross_entropy"
_FRAME: Final = re.compile(r"cross_entropy|nll_loss|log_softmax")
_MAKES_LOGITS: Final = re.compile(r"nn/modules/linear\.py")


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find where a cross-entropy is taken: what is called there, and the loss or function that it stands for."""
    known = {loss.path for loss in objects.losses if loss.type_name == "CrossEntropyLoss"}
    found = {site for scope in ground(program).reach for site in _of_scope(program, scope, known)}
    return tuple(sorted(found, key=lambda site: (site.cell, site.line, site.names)))


def _of_scope(program: Program, scope: Scope, known: set[str]) -> Iterator[Site]:
    stands_for = program.given(scope)
    for node in own_nodes(scope.body):
        name = call_name(node) if isinstance(node, ast.Call) else ""
        stands = stands_for.get(name, name)
        if isinstance(node, ast.Call) and name and (stands in known or stands.rpartition(".")[2] == "cross_entropy"):
            yield site("cross_entropy", scope, node, (name, stands))


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose 2 to 16 chunks, no more than there are rows."""
    code = evidence.code
    if code.first("chunked_loss") is None:
        raise Unfit("no cell takes a cross-entropy: what a library does cannot be changed in the source")
    if code.compiles is not None:
        raise Unfit("torch.compile takes the loss together with what is around it")
    if any(one.kind == "create_graph" for one in code.sites.get("drop_retain_graph", ())):
        raise Unfit("a gradient is taken of gradients, which a recomputed loss does not give")
    logits = [_logits(held, code) for held in evidence.census.holdings]
    size, rows = max([_asked_for(incident, evidence), *logits])
    if _in_frame(incident) and (incident.requested or 0) > size:
        size, rows = incident.requested or 0, rows or _CHUNKS[-1]
    if not size:
        raise Unfit("no logits over the classes of a model were found")
    if size < _WORTH * evidence.census.found:
        raise Unfit(f"the log-probabilities take {format_size(size)} of {format_size(evidence.census.found)} found")
    doses = [chunks for chunks in _CHUNKS if chunks <= rows]
    if not doses:
        raise Unfit("the loss is over one row: there is nothing to split")
    for chunks in doses:
        yield Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=size * (chunks - 1) // chunks,
            slowdown=1 + _OVERHEAD,
            basis=f"estimate: 1/{chunks} of {format_size(size)} of log-probabilities at a time",
        )


def _in_frame(incident: Incident) -> bool:
    return _FRAME.search(incident.framework_frame or "") is not None


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


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return each cross-entropy of the failing run as one that is taken in chunks."""
    code, sites = evidence.code, evidence.code.sites.get("chunked_loss", ())
    if code.half_weights and not code.autocast:
        raise Unfit("the loss is taken in half precision: sums of its chunks would round otherwise")
    if any(re.search(r"\bchunked_loss\(", cell.source) for cell in cells.history):
        raise Unfit("the code takes its cross-entropy in chunks already")
    if not sites:
        raise Unfit("no cell takes the cross-entropy: what a library does cannot be changed in the source")
    known = {loss.path for loss in code.losses}

    def changed(parsed: rewriting.ParsedCell, here: list[Site]) -> cst.Module | Refused:
        beside = cells.beside(cells.get(here[0].cell))
        by = import_lines.name_for("oomdoctor", "chunked_loss", beside, "loss_in_chunks")
        new: dict[cst.CSTNode, rewriting.New] = {}
        for one in here:
            called, stands_for = one.names
            if stands_for not in known and import_lines.qualified_name(beside, called) != _FUNCTION:
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
    cost="each chunk's log-probabilities once more",
    propose=propose,
    patch=patch,
    detect=detect,
)
