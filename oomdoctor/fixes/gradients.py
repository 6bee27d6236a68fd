"""Gradients that are held no longer than they are needed.

``optimizer_in_backward``: a hook on each parameter runs the optimizer's own step on that parameter alone, as soon as
its gradient is there, with the state and the options that it has. The results are the same bits where an optimizer
treats each element by itself and the program uses gradients for the step alone: what clips, scales, sums up or reads
them is refused; what looks at parameters before the step is for the trial to find. There is no patch: a cell that set
the hooks would set them anew each time that it is run.

``set_to_none``: ``zero_grad(set_to_none=False)`` keeps tensors of zeros as large as the parameters for the whole
forward pass. The results differ where a parameter that had a gradient gets none in a step: it is passed over and not
stepped with zeros. While the changed code runs, a guard watches for that and refuses when it happens.

Sources: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html,
https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final
from weakref import ref

import libcst as cst
import libcst.matchers as m

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._preconditions import running_loops
from oomdoctor.fixes._refusals import Unfit, need, proposing, refused, refusing, sites_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session, Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import submodules
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting, torch_functions
from oomdoctor.program.definitions import Program, site
from oomdoctor.program.dependencies import ground
from oomdoctor.program.names import own_nodes
from oomdoctor.program.rewriting import within

ELEMENTWISE: Final = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
)
"""Optimizers of torch whose step treats each parameter by itself. Source: their modules in ``torch.optim``."""

_LAUNCHES: Final = 1.1
"""Time of a step with the optimizer called once per parameter, as a ratio. A round figure, not measured."""

_USES_GRADIENTS: Final = re.compile(r"\.grad\b(?!\s*=\s*None)|clip_grad|get_total_norm|GradScaler")
_REPLICATES: Final = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@proposing
def _propose_early(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code = evidence.code
    loops = running_loops(evidence)
    if any("clip" in loop.order for loop in loops):
        raise Unfit("gradients are clipped, for which all of them have to be there")
    need(not any(loop.accumulates for loop in loops), "gradients are accumulated over several batches before a step")
    if any("schedule" in "".join(loop.order).partition("backward")[2].partition("step")[0] for loop in loops):
        raise Unfit("a scheduler changes settings between the backward pass and the step")
    need(code.first("set_to_none") is None, "gradients are kept as zeros, with which parameters would be stepped")
    gradients = evidence.census.bytes_of(Role.GRADIENT)
    saves = max(0, gradients - max((one.largest_bytes for one in code.steppers), default=gradients))
    need(saves, "the census found no gradients, or no more than the largest, which has to be there at its time")
    yield Proposal(
        effect=Effect.EXACT,
        saves=saves,
        slowdown=_LAUNCHES,
        basis=f"the census found {format_size(gradients)} of gradients; the largest alone would be there at a time",
    )


@contextmanager
def _apply_early(session: Session, dose: Dose) -> Iterator[None]:
    """Step the parameters of the session's optimizers within ``backward``; undone on exit."""
    _check(session)
    early = [_Early(path, optimizer) for path, optimizer in session.optimizers]
    with ExitStack() as undo:
        for one in early:
            one.begin(undo)
        yield
        for one in early:
            if one.stepped:
                raise OomDoctorError(f"a backward pass was not followed by a step of `{one.path}`")


class _Early:
    """One optimizer whose parameters are stepped as their gradients come: those in ``stepped``, until it steps."""

    def __init__(self, path: str, optimizer: Any) -> None:
        self.path, self.optimizer = path, optimizer
        self.stepped: set[int] = set()
        # The same state by another object, whose only parameter is the one at hand. Hooks and what a scheduler has put
        # around ``step`` stay with the optimizer, whose own ``step`` is called as often as ever.
        self.alone = object.__new__(type(optimizer))
        vars(self.alone).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self._told = False

    def begin(self, undo: ExitStack) -> None:
        """Set the hooks and stand before ``step``."""
        for weight in (one for one in weights_of(self.optimizer) if one.requires_grad):
            undo.callback(_take_off, weight, weight.register_post_accumulate_grad_hook(self._on_gradient))
        undo.callback(_in_order, self.optimizer)
        held, before = vars(self.optimizer), dict(vars(self.optimizer))
        undo.callback(lambda: held.update(step=before["step"]) if "step" in before else held.pop("step"))
        held["step"] = self._step(self.optimizer.step)

    def _on_gradient(self, weight: Any) -> None:
        import torch

        if id(weight) in self.stepped:
            raise OomDoctorError("a parameter gets its gradient in several parts before the step")
        if weight.grad.requires_grad:
            raise OomDoctorError("the backward pass makes a graph of the gradients")
        if not self._told:
            self._told = True
            tell_watchers(self.optimizer)
        self.alone.state = self.optimizer.state  # another one where a checkpoint was loaded
        (group,) = [group for group in self.optimizer.param_groups if any(one is weight for one in group["params"])]
        self.alone.param_groups = [{**group, "params": [weight]}]
        step = type(self.optimizer).step  # the program steps once, and not once for each parameter
        with torch.no_grad():
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.alone)
        weight.grad = None
        self.stepped.add(id(weight))

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if any(value is not None for value in (*args, *kwargs.values())):
                raise OomDoctorError("the optimizer calls a closure, or is told by arguments how to step")
            self.stepped.clear()
            return original()  # without gradients it steps nothing, and schedulers and hooks see their step

        return step


def tell_watchers(optimizer: Any, *, but: Any = None) -> None:
    """Tell those who watch optimizers, a snapshot among them, that parameters or state are about to change."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    for hook in [one for one in _global_optimizer_pre_hooks.values() if one is not but]:
        hook(optimizer, (), {})


def _check(session: Session) -> None:
    if not session.optimizers:
        raise OomDoctorError("no optimizer was found among the notebook's objects")
    seen: set[int] = set()
    for path, optimizer in session.optimizers:
        cls = type(optimizer)
        if cls.__name__ not in ELEMENTWISE or not cls.__module__.startswith("torch.optim."):
            raise OomDoctorError(f"`{path}` is a {cls.__name__}, which is not known to step each parameter by itself")
        if optimizer._optimizer_step_pre_hooks:
            raise OomDoctorError(f"`{path}` has hooks of its own before its step")
        for weight in weights_of(optimizer):
            if id(weight) in seen:
                raise OomDoctorError(f"`{path}` steps a parameter that another optimizer steps as well")
            seen.add(id(weight))
            if weight._post_accumulate_grad_hooks:
                raise OomDoctorError(f"a parameter of `{path}` has a hook of its own for its gradient")
    for name, module in (part for path, root in session.modules for part in submodules(root, path)):
        if _REPLICATES & {base.__name__ for base in type(module).__mro__}:
            raise OomDoctorError(f"{name} gathers gradients before the step")
    for cell in session.cells.history:
        if _USES_GRADIENTS.search(cell.source):
            raise OomDoctorError(f"{cell} uses gradients by itself, which would be gone")


def weights_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer steps."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _in_order(optimizer: Any) -> None:
    """Put the states of the parameters in the order of these, in which a step makes them."""
    for weight in weights_of(optimizer):
        if weight in optimizer.state:
            optimizer.state[weight] = optimizer.state.pop(weight)


def _take_off(weight: Any, handle: Any) -> None:
    handle.remove()
    if not weight._post_accumulate_grad_hooks:
        weight._post_accumulate_grad_hooks = None  # as it was before the first one


_NOWHERE: Final = "no call of zero_grad was found that keeps the gradients"
_KEEPING: Final = m.Call(
    func=m.Attribute(attr=m.Name("zero_grad")),
    args=[m.Arg(keyword=None, value=m.Name("False"), star="") | m.Arg(m.Name("False"), m.Name("set_to_none"))],
)


def _detect_kept(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find each ``zero_grad`` that fills gradients with zeros and does not free them."""
    sites: list[Site] = []
    for scope, node in ((reached, node) for reached in ground(program).reach for node in own_nodes(reached.body)):
        if isinstance(node, ast.Call) and torch_functions.last_name(node) == "zero_grad":
            values = [one.value for one in node.keywords if one.arg == "set_to_none"] + node.args[:1]
            if any(isinstance(value, ast.Constant) and value.value is False for value in values):
                sites.append(site("zeroed", scope, node))
    return tuple(sites)


@proposing
def _propose_none(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    sites_of(evidence, "set_to_none", _NOWHERE)
    if (incident.framework_frame or "").startswith("torch/optim/"):
        raise Unfit("memory ran out in the optimizer's step, where the gradients have to be there")
    why = "the census found no gradients that setting them to None would free"
    gradients = need(evidence.census.bytes_of(Role.GRADIENT), why)
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

    for _, module in session.modules:
        note(module.parameters())
    for _, optimizer in session.optimizers:
        note(weights_of(optimizer))
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: note(weights_of(optimizer)))
    try:
        yield
    finally:
        handle.remove()


@refusing
def _patch_none(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    sites = sites_of(evidence, "set_to_none", _NOWHERE)

    def change(parsed: rewriting.ParsedCell, here: list[Site]) -> dict[cst.CSTNode, rewriting.New]:
        lines = {one.line for one in here}
        calls = [call for call in within(parsed.module, cst.Call) if m.matches(call, _KEEPING)]
        return {call.args[0].value: cst.Name("True") for call in calls if parsed.lines_of(call)[0] in lines}

    return rewriting.at_sites(cells, sites, change)


FIXES: Final = (
    Fix(
        id="optimizer_in_backward",
        title="Step each parameter during the backward pass",
        effect=Effect.EXACT,
        frees=(Role.GRADIENT,),
        cost="the optimizer is called once for each parameter",
        propose=_propose_early,
        apply=_apply_early,
        patch=refused("the hooks belong to the live parameters: a cell that set them would set them anew at each run"),
        leaves=(".grad",),
    ),
    Fix(
        id="set_to_none",
        title="Set gradients to None instead of zero",
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
