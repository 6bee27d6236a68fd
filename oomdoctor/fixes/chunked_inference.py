"""A prediction over a large batch made over parts of it, its results put together as they come.

Without gradients nothing is kept of a part but its result. So the batch is cut, its parts take the device one after
the other, and each result is written into the whole one. Where the code moves the batch to the device in the call, the
parts are moved one by one.

The results are equal up to rounding, not to the bit: libraries choose other kernels for other numbers of rows. That
samples do not depend on one another is shown by the trial of both programs; a model in training mode whose layers do,
or that drops values, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._chunks import called_in_parts, couples, no_more_than_samples
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

TOLERANCE: Final = 1e-5
"""Relative difference of outputs in float32: kernels for other numbers of rows add up in another order."""

_CHUNKS: Final = (2, 4, 16, 64)

_OVERHEAD: Final = 0.001
"""Time lost per part to launching the same kernels again, as a share of the whole. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose 2 to 64 parts, no more than the batch has samples where that is known."""
    if (through := _trainer_terms.proposed("chunked_inference", incident, evidence)) is not None:
        return through
    code = evidence.code
    if not code.grad_disabled:
        return Refused("the failing line runs with gradients on, so that activations of every part would be kept")
    models = [model for model in code.models if model.parameter_bytes]
    if not models:
        return Refused("no model was found among the names of the notebook")
    for model in models:
        if (why := _couples(model)) is not None:
            return Refused(why)
    size = evidence.census.bytes_of(Role.ACTIVATION) + (incident.requested or 0)
    if not size:
        return Refused("no activations were found that splitting the batch could save")
    doses = no_more_than_samples(_CHUNKS, evidence)
    if isinstance(doses, Refused):
        return doses
    return tuple(
        Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.EQUIVALENT,
            saves=size * (chunks - 1) // chunks,
            slowdown=1 + _OVERHEAD * chunks,
            basis=f"estimate: 1/{chunks} of {format_size(size)} of activations and request at a time",
        )
        for chunks in doses
    )


def _couples(model: ModelFacts) -> str | None:
    """Return why the samples of a batch cannot be run apart with the same results."""
    if model.training and model.dropout and not model.batch_norm:
        return f"{child_path(model.path, model.dropout[0])} drops values: `{model.path}` is in training mode"
    return couples(model)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Have the calls of models in what the failing cell runs made over parts of the batch, moved one by one."""
    code = evidence.code
    if (through := _trainer_source.patched("chunked_inference", cells, evidence, dose)) is not None:
        return through
    if not code.grad_disabled:
        return Refused("the failing line runs with gradients on")
    for model in code.models:
        if (why := _couples(model)) is not None:
            return Refused(why)
    sites = code.sites.get(FIX.id, ())
    if any(loop.in_failing_run for loop in code.loops):
        sites = tuple(one for one in sites if one.kind == "prediction")
        if not sites:
            return Refused("the failing cell trains as well: which of its calls are predictions cannot be told")
    return called_in_parts(cells, sites, dose.number("chunks"), moves=True)


FIX: Final = Fix(
    id="chunked_inference",
    title="Predict over parts of the batch, and put the results together as they come",
    effect=Effect.EQUIVALENT,
    tolerance=TOLERANCE,
    cost="the same arithmetic in smaller pieces",
    propose=propose,
    apply=None,
    patch=patch,
    detect=detect_runs,
)
