"""Steps the parameters one by one instead of in lists, whose temporaries are as large as all parameters together.

On CUDA the optimizers of torch take the foreach implementation unless they are told otherwise: each operation of the
step works on a list of all parameters, and so do its intermediate results. The loop over parameters needs the largest
of them alone. It is offered where the memory ran out in the step itself. The arithmetic is the same; the kernels for
lists may round differently from those for single tensors, so on a device the results are equal up to rounding. Where
both run the same code, as on the CPU, they are bit-identical.

Source: pytorch/pytorch issue 114165 (a maintainer: foreach operations need not be bitwise equal to single-tensor ones).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _class_calls
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "TOLERANCE", "apply", "in_the_step", "patch", "propose"]

TOLERANCE: Final = 1e-5
"""Relative difference of parameters in float32: single and list kernels may contract operations differently."""

_FRAME: Final = re.compile(r"torch/optim/|_multi_tensor_|_foreach_")
_STEP: Final = re.compile(r"\.step\(")
_ABSENT: Final = object()

_LAUNCHES: Final = 1.05
"""Time of a step with more and smaller kernels, as a ratio. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the memory ran out in a step that goes through lists."""
    listed = _listed(evidence)
    if not listed:
        return Refused("no optimizer was found whose step goes through lists of all parameters at once")
    if not in_the_step(incident):
        return Refused("the memory did not run out in an optimizer's step, where the lists are made")
    # Optimizers step one after the other.
    most = max(listed, key=_spared)
    if _spared(most) <= 0:
        return Refused("most of what the optimizer steps is one or two parameters: a list is hardly larger")
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.EQUIVALENT,
            saves=_spared(most),
            slowdown=_LAUNCHES,
            basis=f"estimate: an intermediate result of the {format_size(most.parameter_bytes)} of parameters of "
            f"`{most.path}`, less two of the largest",
        ),
    )


def in_the_step(incident: Incident) -> bool:
    """Whether the memory ran out within an optimizer's step."""
    if incident.framework_frame is not None and _FRAME.search(incident.framework_frame):
        return True
    lines = [line.source_line for line in (incident.inner, incident.cell) if line is not None]
    return any(map(_STEP.search, lines))


def _spared(optimizer: OptimizerFacts) -> int:
    """Return what a list of one intermediate result takes beyond the two that a single parameter needs.

    Source: ``torch.optim.adam``: ``_multi_tensor_adam`` makes one list of square roots, ``_single_tensor_adam`` a root
    and a quotient of it.
    """
    return optimizer.parameter_bytes - 2 * optimizer.largest_bytes


def _listed(evidence: Evidence) -> list[OptimizerFacts]:
    return [one for one in evidence.code.steppers if one.foreach]


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Have every optimizer that steps in the context go through its parameters one by one; undone on exit.

    Raises:
        OomDoctorError: the optimizers of the session have no such choice.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    del dose
    known = [optimizer for _, optimizer in session.optimizers]
    if known and not any("foreach" in group for optimizer in known for group in optimizer.param_groups):
        raise OomDoctorError("no optimizer was found that can step its parameters one by one")
    changed: list[tuple[dict[str, Any], Any]] = []

    def one_by_one(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        # Not in the defaults: a group that is added later would begin, and stay, with what is undone here.
        for group in optimizer.param_groups:
            if group.get("foreach", False) is not False and not group.get("fused"):
                changed.append((group, group["foreach"]))
                group["foreach"] = False

    handle = register_optimizer_step_pre_hook(one_by_one)
    try:
        yield
    finally:
        handle.remove()
        for group, before in reversed(changed):
            if group.get("foreach", _ABSENT) is False:
                group["foreach"] = before


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with ``foreach=False`` where the optimizers are made."""
    listed = _listed(evidence)
    if not listed:
        return Refused("no optimizer was found whose step goes through lists of all parameters at once")
    found = _class_calls.made(cells, listed)
    if isinstance(found, Refused):
        return found
    told, live = dict[_class_calls.Call, cst.Call](), dict[_class_calls.Call, tuple[str, ...]]()
    for facts, one in found.items():
        new = _class_calls.with_keyword(one.node, "foreach", "False")
        if isinstance(new, Refused):
            return new
        told[one] = new
        live |= {one: _told_now(facts.path)} if one.is_live(cells) else {}
    return _class_calls.exchanged(cells, told, live=live)


def _told_now(path: str) -> tuple[str, str]:
    groups = f"[group.update(foreach=False) for group in {path}.param_groups]"  # a comprehension leaves no name behind
    return f"{path}.defaults.update(foreach=False)", groups


FIX: Final = Fix(
    id="optimizer_foreach_off",
    title="Step the parameters one by one instead of in lists of all of them",
    effect=Effect.EQUIVALENT,
    tolerance=TOLERANCE,
    cost="more and smaller kernels in the optimizer's step",
    propose=propose,
    apply=apply,
    patch=patch,
)
