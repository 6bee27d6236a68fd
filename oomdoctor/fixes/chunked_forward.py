"""The forward of a model run over parts of the batch, each recomputed in the backward pass.

The loss and its one backward stay as they are, so what couples the samples in the loss is kept: only the activations of
one part exist at a time. Without gradients the forward is split and nothing is recomputed.

The promise of equal results holds where a sample's output does not depend on the others, which the trial of both
programs shows. A forward that draws random numbers without dropout that was announced, changes state of its own, or
returns what is not made of rows for the samples (a loss) is refused as it runs. BatchNorm in training mode is refused
before.

In the source, ``model(x)`` becomes ``in_parts(model, 4)(x)`` wherever the failing cell calls a model, in functions and
modules of the user's as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomdoctor.fixes._activations import found_or_asked, why_not_short, why_not_training
from oomdoctor.fixes._chunks import called_in_parts, couples, no_more_than_samples, takes_note
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: sums over the batch are taken in another order."""

_CHUNKS: Final = (2, 4, 8, 16)

_FORWARD_SHARE: Final = 1 / 3
"""A forward's share of a step: the backward pass costs about two. Source: Korthikanti et al., arXiv:2205.05198."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose 2 to 16 parts, no more than the batch has samples where that is known."""
    code = evidence.code
    models = [model for model in code.models if model.parameter_bytes]
    if not models:
        return Refused("no model was found among the names of the notebook")
    for model in models:
        if (why := couples(model)) is not None:
            return Refused(why)
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    activations = found_or_asked(incident, evidence)
    if not activations:
        return Refused("no activations were found that splitting the batch could save")
    doses = no_more_than_samples(_CHUNKS, evidence)
    if isinstance(doses, Refused):
        return doses
    dropout = next((name for model in models if model.training for name in model.dropout), None)
    return tuple(
        Proposal(
            dose=Dose.of(chunks=chunks),
            effect=Effect.CHANGES_RESULT if dropout else Effect.EQUIVALENT,
            saves=activations * (chunks - 1) // chunks,
            slowdown=1.0 if code.grad_disabled else 1 + _FORWARD_SHARE,
            basis=f"estimate: 1/{chunks} of {format_size(activations)} of activations at a time",
            caveat=dropout and f"{dropout} draws other random numbers for parts of a batch than for the whole",
        )
        for chunks in doses
    )


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Have the calls of models in what the failing cell runs made over parts of the batch."""
    for model in evidence.code.models:
        if (why := couples(model) or takes_note(model, own=True)) is not None:
            return Refused(why)
    if (why := why_not_training(evidence)) is not None:
        return Refused(why)
    return called_in_parts(cells, evidence.code.sites.get(FIX.id, ()), dose.number("chunks"))


FIX: Final = Fix(
    id="chunked_forward",
    title="Run the forward over parts of the batch, recomputed in the backward pass",
    effect=Effect.EQUIVALENT,
    draws=True,
    tolerance=TOLERANCE,
    cost="one more forward",
    propose=propose,
    apply=None,
    patch=patch,
    detect=detect_runs,
)
