"""Mixed precision: matrix products and convolutions in 16 bits, weights and their updates in 32.

Activations of these layers take half the memory. bfloat16 is taken where the device computes in it: it has the range of
float32, so nothing else changes. Where it does not, float16 needs its gradients scaled, which is put in together with
what belongs to it. ``BCELoss`` under autocast is refused by torch on CUDA, and only there: it is refused here, so that
what was tried on a CPU holds on a GPU.

There is no live form: loops that a library owns take their precision from its settings.
"""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import why_not_training
from oomdoctor.fixes._precision_dtype import ROUNDS, kind_of_device, native
from oomdoctor.fixes._precision_step import under_autocast
from oomdoctor.fixes._unfit import Unfit, refusing
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting

_BCE: Final = re.compile(r"\bBCELoss\b|\bbinary_cross_entropy\b")
_NO_BCE: Final = (
    "torch refuses `BCELoss` under autocast: let the model return logits and take `BCEWithLogitsLoss` first"
)


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one precision that the device is made for."""
    if (through := _trainer_terms.proposed("autocast", incident, evidence)) is not None:
        return through
    code = evidence.code
    trainer = _trainer_source.owner(code, "autocast")
    if trainer is None and (why := _why_not(evidence)) is not None:
        return Refused(why)
    dtype = native(evidence)
    if isinstance(dtype, Refused):
        return dtype
    if trainer is None and not any(loop.in_failing_run for loop in code.loops):
        return Refused("no training loop was found in what the failing cell runs")
    activations, weights = evidence.census.bytes_of(Role.ACTIVATION), _trainer_terms.weights(code)
    saves = activations // 2 - weights // 2
    if saves <= 0:
        return Refused(
            f"16-bit copies of {format_size(weights)} of weights would take no less than halving "
            f"{format_size(activations)} of activations gives"
        )
    once = trainer is not None and trainer.library == "accelerate"
    caveat = "accelerate keeps the precision that a process began with: restart the kernel; " if once else ""
    return (
        Proposal(
            dose=Dose.of(dtype=dtype),
            effect=Effect.ADVICE if once else Effect.CHANGES_RESULT,
            saves=saves,
            basis=f"analytic estimate: half of {format_size(activations)} of activations, less 16-bit copies of "
            f"{format_size(weights)} of weights",
            caveat=caveat + ROUNDS[dtype],
        ),
    )


def _why_not(evidence: Evidence) -> str | None:
    code = evidence.code
    if code.autocast:
        return "mixed precision is in force already"
    if code.half_weights:
        return "most of the weights take 2 bytes already"
    if code.grad_disabled:
        return "autograd is off, so no activations are kept that a smaller type would halve"
    if not code.models:
        return "no model was found among the notebook's objects"
    if (why := why_not_training(evidence)) is not None:
        return why
    called = " ".join(filter(None, (loop.loss_call for loop in code.loops if loop.in_failing_run)))
    if any(loss.type_name == "BCELoss" for loss in code.losses) or _BCE.search(called):
        return _NO_BCE
    return None


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with their steps under autocast."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    through = _trainer_source.patched("autocast", cells, evidence, dose)
    if not loops and through is None:
        raise Unfit("no training loop was found in what the failing cell runs")
    for cell in cells.history:
        if re.search(r"\bautocast\b|\bGradScaler\b", cell.source):
            raise Unfit(f"{cell} has to do with mixed precision already")
        if _BCE.search(cell.source):
            raise Unfit(_NO_BCE)
    if through is not None:
        return through
    dtype, kind, edits = str(dose["dtype"]), kind_of_device(evidence), []
    for number in dict.fromkeys(loop.cell for loop in loops):
        here = [loop for loop in loops if loop.cell == number]
        edits.append(under_autocast(cells, cells.get(number), here, kind, dtype))
    return rewriting.join(cells, edits)


FIX: Final = Fix(
    id="autocast",
    title="Compute in 16 bits where that is enough (mixed precision)",
    effect=Effect.CHANGES_RESULT,
    cost="results rounded to 16 bits within the network; most often faster on a GPU",
    propose=propose,
    patch=patch,
)
