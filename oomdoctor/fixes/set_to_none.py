"""Lets go of gradients where they are zeroed, so that they are not there while activations grow.

``zero_grad(set_to_none=False)`` keeps tensors of zeros as large as the parameters for the whole forward pass. Without
them, the first gradient of a step is taken as it is and not added to zeros. The results differ in one case: a parameter
that had a gradient before and gets none in a step is passed over by the optimizer and not stepped with zeros. While the
changed code runs, both forms watch for that and refuse when it happens.

Source: https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting, words
from oomdoctor.program.definitions import site
from oomdoctor.program.ground import ground
from oomdoctor.program.names import own_nodes

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

__all__ = ["FIX", "apply", "detect", "guard", "patch", "propose"]

_NOWHERE: Final = "no call of zero_grad was found that keeps the gradients"


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find each ``zero_grad`` that fills gradients with zeros and does not free them."""
    return tuple(
        site("zeroed", scope, node)
        for scope in ground(program).reach
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Call) and words.last_name(node) == "zero_grad" and _keeps(node)
    )


def _keeps(call: ast.Call) -> bool:
    values = [one.value for one in call.keywords if one.arg == "set_to_none"] + call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a call keeps the gradients and the census saw some."""
    if evidence.code.first("set_to_none") is None:
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
    """Return the cells with the gradients let go of where they are known to be kept."""
    del dose
    sites = evidence.code.sites.get("set_to_none", ())
    if not sites:
        return Refused(_NOWHERE)

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New]:
        lines = {one.line for one in here}
        there = [node for node, at in parsed.positions.items() if at.start.line in lines and isinstance(node, cst.Call)]
        return {call: new for call in there if (new := _freed(call)) is not None}

    return rewriting.at_sites(cells, sites, change)


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
    detect=detect,
    guard=guard,
    leaves=(".grad",),
)
