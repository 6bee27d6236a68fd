"""Settings of an optimizer that take memory: a step that goes through lists, and gradients that are kept as zeros.

``optimizer_foreach_off``: on CUDA the optimizers of torch take the foreach implementation unless they are told
otherwise: each operation of the step works on a list of all parameters, and so do its intermediate results. The loop
over parameters needs the largest of them alone. It is offered where the memory ran out in the step itself. The kernels
for lists may round differently from those for single tensors, so on a device the results are equal up to rounding.
Source: pytorch/pytorch issue 114165 (a maintainer: foreach operations need not be bitwise equal to single-tensor ones).

``set_to_none``: ``zero_grad(set_to_none=False)`` keeps tensors of zeros as large as the parameters for the whole
forward pass. Without them, the first gradient of a step is taken as it is and not added to zeros. The results differ in
one case: a parameter that had a gradient before and gets none in a step is passed over by the optimizer and not stepped
with zeros. While the changed code runs, a guard watches for that and refuses when it happens.
Source: https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import ref

import libcst as cst
import libcst.matchers as m

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _class_calls
from oomdoctor.fixes._terms import Unfit, proposing, refusing, sites_of
from oomdoctor.fixes.optimizer_in_backward import weights_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells, Session
from oomdoctor.model.site import Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting, words
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.ground import ground
from oomdoctor.program.names import own_nodes
from oomdoctor.program.rewriting import within

TOLERANCE: Final = 1e-5
"""Relative difference of parameters in float32: single and list kernels may contract operations differently."""

_FRAME: Final = re.compile(r"torch/optim/|_multi_tensor_|_foreach_")
_STEP: Final = re.compile(r"\.step\(")

_LAUNCHES: Final = 1.05
"""Time of a step with more and smaller kernels, as a ratio. A round figure, not measured."""

_NOWHERE: Final = "no call of zero_grad was found that keeps the gradients"
_KEEPING: Final = m.Call(
    func=m.Attribute(attr=m.Name("zero_grad")),
    args=[m.Arg(keyword=None, value=m.Name("False"), star="") | m.Arg(m.Name("False"), m.Name("set_to_none"))],
)


@proposing
def _propose_one_by_one(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where the memory ran out in a step that goes through lists."""
    listed = _listed(evidence)
    if not listed:
        raise Unfit("no optimizer was found whose step goes through lists of all parameters at once")
    if not in_the_step(incident):
        raise Unfit("the memory did not run out in an optimizer's step, where the lists are made")
    # Optimizers step one after the other.
    most = max(listed, key=_spared)
    if _spared(most) <= 0:
        raise Unfit("most of what the optimizer steps is one or two parameters: a list is hardly larger")
    yield Proposal(
        effect=Effect.EQUIVALENT,
        saves=_spared(most),
        slowdown=_LAUNCHES,
        basis=f"estimate: an intermediate result of the {format_size(most.parameter_bytes)} of parameters of "
        f"`{most.path}`, less two of the largest",
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


@refusing
def _patch_one_by_one(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with ``foreach=False`` where the optimizers are made."""
    found = {_class_calls.made(cells, facts): facts for facts in _listed(evidence)}
    if not found:
        raise Unfit("no optimizer was found whose step goes through lists of all parameters at once")
    told = {one: _class_calls.with_keyword(one.node, "foreach", "False") for one in found}
    # A comprehension leaves no name behind.
    lines = "{0}.defaults.update(foreach=False)", "[group.update(foreach=False) for group in {0}.param_groups]"
    live = {one: [line.format(facts.path) for line in lines] for one, facts in found.items() if one.is_live(cells)}
    return _class_calls.exchanged(cells, told, live=live)


def _detect_kept(program: Program, objects: Objects) -> tuple[Site, ...]:
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


@proposing
def _propose_none(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where a call keeps the gradients and the census saw some."""
    if evidence.code.first("set_to_none") is None:
        raise Unfit(_NOWHERE)
    if (incident.framework_frame or "").startswith("torch/optim/"):
        raise Unfit("memory ran out in the optimizer's step, where the gradients have to be there")
    gradients = evidence.census.bytes_of(Role.GRADIENT)
    if not gradients:
        raise Unfit("the census found no gradients that setting them to None would free")
    yield Proposal(
        effect=Effect.EXACT,
        saves=gradients,
        basis=f"the census found {format_size(gradients)} of gradients, which would not be there in a forward pass",
    )


@contextmanager
def _guard_none(session: Session, dose: Dose) -> Iterator[None]:
    """Watch that each parameter which had a gradient has one again in every further step of its optimizer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        note(weights_of(optimizer))

    for _, module in session.modules:
        note(module.parameters())
    for _, optimizer in session.optimizers:
        note(weights_of(optimizer))
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


@refusing
def _patch_none(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the gradients let go of where they are known to be kept."""
    sites = sites_of(evidence, "set_to_none", _NOWHERE)

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New]:
        lines = {one.line for one in here}
        calls = [call for call in within(parsed.module, cst.Call) if m.matches(call, _KEEPING)]
        return {call.args[0].value: cst.Name("True") for call in calls if parsed.lines_of(call)[0] in lines}

    return rewriting.at_sites(cells, sites, change)


FIXES: Final = (
    Fix(
        id="optimizer_foreach_off",
        title="Step the parameters one by one instead of in lists of all of them",
        effect=Effect.EQUIVALENT,
        tolerance=TOLERANCE,
        joins=True,
        cost="more and smaller kernels in the optimizer's step",
        propose=_propose_one_by_one,
        patch=_patch_one_by_one,
    ),
    Fix(
        id="set_to_none",
        title="Let go of gradients where they are zeroed",
        effect=Effect.EXACT,
        frees=(Role.GRADIENT,),
        joins=True,
        cost="nothing",
        propose=_propose_none,
        patch=_patch_none,
        detect=_detect_kept,
        guard=_guard_none,
        leaves=(".grad",),
    ),
)
