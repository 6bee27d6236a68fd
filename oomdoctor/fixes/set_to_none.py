"""Lets go of gradients where they are zeroed, so that they are not there while activations grow.

``zero_grad(set_to_none=False)`` keeps tensors of zeros as large as the parameters for the whole forward pass. Without
them, the first gradient of a step is taken as it is and not added to zeros. The results differ in one case: a parameter
that had a gradient before and gets none in a step is passed over by the optimizer and not stepped with zeros. While the
changed code runs, both forms watch for that and refuse when it happens.

Source: https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _optimizer_source, _told
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "apply", "guard", "patch", "propose"]

_NOWHERE: Final = "no call of zero_grad was found that keeps the gradients"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a call keeps the gradients and the census saw some."""
    if evidence.code.keeps_gradients is None:
        return Refused(_NOWHERE)
    if (incident.framework_frame or "").startswith("torch/optim/"):
        return Refused("memory ran out in the optimizer's step, where the gradients have to be there")
    gradients = evidence.census.bytes_of(Role.GRADIENT)
    if not gradients:
        return Refused("the census found no gradients that setting them to None would free")
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.EXACT,
            saves=gradients,
            slowdown=1.0,
            basis=f"the census found {format_size(gradients)} of gradients, which would not be there in a forward pass",
        ),
    )


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Have ``zero_grad`` of every optimizer and module free gradients; undone on exit.

    Raises:
        OomDoctorError: in the step, where a parameter has no gradient that would have one of zeros.
    """
    from torch import nn
    from torch.optim import Optimizer

    classes: tuple[Any, ...] = (Optimizer, nn.Module)
    originals = [cls.__dict__["zero_grad"] for cls in classes]
    with guard(session, dose):
        for cls, original in zip(classes, originals, strict=True):
            cls.zero_grad = _freeing(original)
        try:
            yield
        finally:
            for cls, original in zip(classes, originals, strict=True):
                cls.zero_grad = original


def _freeing(original: Any) -> Any:
    @wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        del set_to_none
        original(self, set_to_none=True)

    return zero_grad


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Watch that each parameter which had a gradient has one again in every further step of its optimizer.

    Raises:
        OomDoctorError: in the step, where one has none.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    del dose
    had: dict[int, ref[Any]] = {}

    def note(weights: Iterable[Any]) -> None:
        for weight in weights:
            if weight.grad is not None:
                had[id(weight)] = ref(weight)
            elif id(weight) in had and had[id(weight)]() is weight:
                raise OomDoctorError(
                    "a parameter gets no gradient in some steps: the optimizer steps it with zeros, and with None not"
                )

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        note(_weights(optimizer))

    for _, module in session.modules:
        note(module.parameters())
    for _, optimizer in session.optimizers:
        note(_weights(optimizer))
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _weights(optimizer: Any) -> list[Any]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the gradients let go of, in the function or the cell in which one is known to be kept."""
    del dose
    if evidence.code.keeps_gradients is None:
        return Refused(_NOWHERE)
    place = _told.found(cells, evidence.code.keeps_gradients)
    if isinstance(place, Refused):
        return place
    changes: dict[cst.CSTNode, cst.CSTNode] = {
        call: new for call in _optimizer_source.calls(place.scope) if (new := _freed(call)) is not None
    }
    return rewriting.join(
        cells, [rewriting.edit(cells, place.cell, place.parsed, rewriting.exchange(place.parsed.module, changes))]
    )


def _freed(call: cst.Call) -> cst.Call | None:
    """Return a ``zero_grad(set_to_none=False)`` with True in its place, None where it is something else."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "zero_grad" or len(call.args) != 1:
        return None
    (arg,) = call.args
    named = arg.keyword is None or arg.keyword.value == "set_to_none"
    if arg.star or not named or not isinstance(arg.value, cst.Name) or arg.value.value != "False":
        return None
    return cst.ensure_type(call.with_deep_changes(arg.value, value="True"), cst.Call)


FIX: Final = Fix(
    id="set_to_none",
    title="Let go of gradients where they are zeroed",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=apply,
    patch=patch,
    guard=guard,
)
