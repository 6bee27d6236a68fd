"""Mixed precision: matrix products and convolutions in 16 bits, weights and their updates in 32.

Activations of these layers take half the memory. bfloat16 is taken where the device computes in it: it has the range of
float32, so nothing else changes. Where it does not, float16 needs its gradients scaled, which is put in together with
what belongs to it. ``BCELoss`` under autocast is refused by torch on CUDA, and only there: it is refused here, so that
what was tried on a CPU holds on a GPU.

On live objects, for loops that a library owns, the forward of each model runs under bfloat16 autocast and gives its
results in float32, so that the loss is computed as before. There is no live form with float16: its gradients would have
to be scaled in a backward pass that is not ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import why_not_training
from oomdoctor.fixes._precision_dtype import ROUNDS, kind_of_device, native
from oomdoctor.fixes._precision_step import under_autocast
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "apply", "patch", "propose"]

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
    if trainer is None and dtype == "float16" and not any(loop.in_failing_run for loop in code.loops):
        return Refused("float16 needs its gradients scaled, and no training loop was found to do it in")
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
            slowdown=1.0,
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


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with their steps under autocast."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    through = _trainer_source.patched("autocast", cells, evidence, dose)
    if not loops and through is None:
        return Refused("no training loop was found in what the failing cell runs")
    for cell in cells.history:
        if re.search(r"\bautocast\b|\bGradScaler\b", cell.source):
            return Refused(f"{cell} has to do with mixed precision already")
        if _BCE.search(cell.source):
            return Refused(_NO_BCE)
    if through is not None:
        return through
    numbers = dict.fromkeys(loop.cell for loop in loops)
    dtype, kind = str(dose["dtype"]), kind_of_device(evidence)
    return rewriting.join(
        cells,
        [
            under_autocast(cells, cells.get(number), [loop for loop in loops if loop.cell == number], kind, dtype)
            for number in numbers
        ],
    )


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Run the forward of every model under bfloat16 autocast, and give its results in float32.

    Raises:
        OomDoctorError: on entering, where that would not be right.
    """
    import torch

    from oomdoctor.fixes._forward import refuse_unless_plain, replaced

    if dose["dtype"] != "bfloat16":
        raise OomDoctorError("float16 needs its gradients scaled, which only the loop that steps can do")
    for name, value in session.namespace.items():
        if type(value).__name__ == "GradScaler" and vars(value).get("_enabled"):
            raise OomDoctorError(f"`{name}` scales gradients: mixed precision is in force already")
    models = [(path, model) for path, model in session.modules if any(True for _ in model.parameters())]
    if not models:
        raise OomDoctorError("no model with parameters was found among the notebook's objects")
    for path, model in models:
        refuse_unless_plain(path, model)
        if any(type(part).__name__ == "BCELoss" for part in model.modules()):
            raise OomDoctorError(f"{path}: {_NO_BCE}")

    def run(module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = next(module.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            return forward(*args, **kwargs)
        with torch.autocast(kind, dtype=torch.bfloat16):
            out = forward(*args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, _in_float32, out)

    with replaced([model for _, model in models], run):
        yield


def _in_float32(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


FIX: Final = Fix(
    id="autocast",
    title="Compute in 16 bits where that is enough (mixed precision)",
    effect=Effect.CHANGES_RESULT,
    cost="results rounded to 16 bits within the network; most often faster on a GPU",
    propose=propose,
    apply=apply,
    patch=patch,
)
