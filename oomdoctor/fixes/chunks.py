"""A model run over parts of the batch, recomputed in the backward pass where there is one.

``chunked_forward``: ``model(x)`` becomes ``in_parts(model, 4)(x)`` where the failing cell calls a model, in functions
and modules of the user's as well. The loss and its one backward stay as they are, so what couples the samples in the
loss is kept, and so are the random draws of the whole batch. A forward that changes state of its own, or returns what
is not made of rows for the samples (a loss), is refused as it runs; BatchNorm in training mode before.
``chunked_inference``: without gradients nothing is kept of a part but its result, which is written into the whole one.
Of a ``generate``, each part's keys and values are let go of before the next one's, and shorter texts are padded.
Where the code moves the batch to the device in the call, the parts are moved one by one. The results are equal up to
rounding: libraries choose other kernels for other numbers of rows. That a sample's output does not depend on the
others is shown by the trial of both programs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _trainers
from oomdoctor.fixes._terms import (
    Unfit,
    check,
    check_short,
    check_training,
    couples,
    found_or_asked,
    proposing,
    refusing,
    takes_note,
)
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting

TOLERANCE: Final = 1e-5
"""Relative difference of losses, gradients and outputs in float32: sums over the batch are taken in another order."""
_CHUNKS: Final = (2, 4, 8, 16)
_CHUNKS_OF_PREDICTIONS: Final = (2, 4, 16, 64)
_FORWARD_SHARE: Final = 1 / 3
"""A forward's share of a step: the backward pass costs about two. Source: Korthikanti et al., arXiv:2205.05198."""
_OVERHEAD: Final = 0.001
"""Time lost per part to launching the same kernels again, as a share of the whole. A round figure, not measured."""
_TO_DEVICE: Final = m.Call(func=m.Attribute(attr=m.Name("cuda")), args=[]) | m.Call(
    func=m.Attribute(attr=m.Name("to")),
    args=[m.Arg(m.SimpleString() | m.Name(m.MatchRegex(r"(?i)(\w*_)?dev(ice)?")), keyword=None)],
)
_OTHERWISE: Final = (".generate", ".forward")
"""Ends of what is called where a model is not simply called."""


@proposing
def _propose_forward(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose 2 to 16 parts, no more than the batch has samples where that is known."""
    models = _models(evidence)
    for model in models:
        check(couples(model))
    check_short(incident, evidence)
    activations = found_or_asked(incident, evidence)
    for chunks in _doses(_CHUNKS, activations, evidence):
        yield Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=activations * (chunks - 1) // chunks,
            slowdown=1.0 if evidence.code.grad_disabled else 1 + _FORWARD_SHARE,
            basis=f"estimate: 1/{chunks} of {format_size(activations)} of activations at a time",
        )


@_trainers.first("chunked_inference")
@proposing
def _propose_inference(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose 2 to 64 parts, no more than the batch has samples where that is known."""
    _check_without_gradients(evidence.code)
    _check_apart(_models(evidence))
    size = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    for chunks in _doses(_CHUNKS_OF_PREDICTIONS, size, evidence):
        yield Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=size * (chunks - 1) // chunks,
            slowdown=1 + _OVERHEAD * chunks,
            basis=f"estimate: 1/{chunks} of {format_size(size)} of activations and request at a time",
        )


def _models(evidence: Evidence) -> list[ModelFacts]:
    models = [model for model in evidence.code.models if model.parameter_bytes]
    if not models:
        raise Unfit("no model was found among the names of the notebook")
    return models


def _doses(counts: Sequence[int], size: int, evidence: Evidence) -> list[int]:
    """Return those of ``counts`` that the largest batch found has samples for, all where no batch was found."""
    if not size:
        raise Unfit("no activations were found that splitting the batch could save")
    batches = [one.shape[0] for one in evidence.census.holdings if one.role is Role.BATCH and one.shape]
    fitting = [count for count in counts if not batches or count <= max(batches)]
    if not fitting:
        raise Unfit("the batch has one sample: there is nothing to split")
    return fitting


def _check_without_gradients(code: CodeFacts) -> None:
    """Raise ``Unfit`` where the graph of each part would be kept; what is generated, token ids, has none."""
    trains = any(loop.in_failing_run for loop in code.loops)
    if not code.grad_disabled and (code.generates is None or trains):
        raise Unfit("the failing line runs with gradients on, so that activations of every part would be kept")


def _check_apart(models: Sequence[ModelFacts]) -> None:
    """Raise ``Unfit`` where the samples of a batch cannot be run apart with the same results."""
    for model in models:
        check(couples(model))


@refusing
def _patch_forward(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Have the calls of models in what the failing cell runs made over parts of the batch."""
    for model in evidence.code.models:
        check(couples(model) or takes_note(model, own=True))
    check_training(evidence)
    return _in_parts(cells, evidence.code.sites.get("chunked_forward", ()), dose)


@refusing
def _patch_inference(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Have the calls of models in what the failing cell runs made over parts of the batch, moved one by one."""
    code = evidence.code
    if (through := _trainers.patched("chunked_inference", cells, evidence, dose)) is not None:
        return through
    _check_without_gradients(code)
    _check_apart(code.models)
    sites = code.sites.get("chunked_inference", ())
    if any(loop.in_failing_run for loop in code.loops):
        sites = tuple(one for one in sites if one.kind == "prediction")
        if not sites:
            raise Unfit("the failing cell trains as well: which of its calls are predictions cannot be told")
    return _in_parts(cells, sites, dose, moves=True)


def _in_parts(cells: Cells, found: Sequence[Site], dose: Dose, *, moves: bool = False) -> Patch | Refused:
    """Return the cells with ``in_parts(model, parts)(x)`` for each call of a model in what the failing cell runs.

    Args:
        found: by ``inference_precision.detect_runs``.
        moves: predictions: let it move the parts of what a call moves to the device, and generate in parts.
    """
    otherwise = ".forward" if moves else _OTHERWISE
    sites = [one for one in found if one.kind != "numpy" and not one.names[-1].endswith(otherwise)]
    if any("in_parts(" in cell.source for cell in cells.history):
        raise Unfit("a model is given parts of the batch already")
    if not sites:
        raise Unfit("no call of a model was found in what the failing cell runs")

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> cst.Module:
        name = import_lines.name_for("oomdoctor", "in_parts", cells.beside(cells.get(here[0].cell)), "model_in_parts")
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for call in rewriting.within(parsed.module, cst.Call):
            called = {one.names[-1] for one in here if one.line == parsed.lines_of(call)[0]}
            model = rewriting.text_of(call.func) if called else ""
            if called and ast.unparse(ast.parse(model, mode="eval")) in called:
                changes[call.func] = cst.parse_expression(f"{name}({model}, {dose.number('chunks')})")
                first = call.args[0].value if call.args else None
                if moves and isinstance(first, cst.Call) and m.matches(first, _TO_DEVICE):
                    changes[first] = cst.ensure_type(first.func, cst.Attribute).value
        imports = [import_lines.source_of("oomdoctor", "in_parts", name)]
        return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)

    return rewriting.at_sites(cells, sites, change)


FIXES: Final = (
    Fix(
        id="chunked_forward",
        title="Run the forward over parts of the batch, recomputed in the backward pass",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        cost="one more forward",
        propose=_propose_forward,
        patch=_patch_forward,
        detect=detect_runs,
    ),
    Fix(
        id="chunked_inference",
        title="Predict over parts of the batch, and put the results together as they come",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        cost="the same arithmetic in smaller pieces",
        propose=_propose_inference,
        patch=_patch_inference,
        detect=detect_runs,
    ),
)
