"""What waits in host memory while nobody reads it: tensors saved for the backward pass, and optimizer state.

``save_on_cpu``: every tensor that an operation saves is packed. Plain copies come back with the same strides, so the
same kernels run on the same numbers. Through page-locked memory the copies run beside the computation, but tensors come
back contiguous, so that dose promises results up to rounding. In the source, the ``with`` stands around the statement
of the cell that was running, whatever that calls.

``offload_optimizer_state``: Adam's two moments take twice the memory of the parameters, through every forward and
backward pass in which nobody reads them. They are brought to the device before a step and taken back after it, bit for
bit. Live, tensors change their memory and stay the objects that they are, and are back on leaving. In the source, two
hooks stand where the optimizer is made; one that an earlier cell made, with its state, is changed live alone.

The virtual accelerator knows what ``save_on_cpu`` keeps for host memory.
Source: https://pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu, and its ``pack_to_cpu``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _construction_sites
from oomdoctor.fixes._construction_sites import changed, under
from oomdoctor.fixes._preconditions import check_host_room, check_not_stepping, found_or_asked, in_the_step
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.fixes.gradients import tell_watchers
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session, Site
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.definitions import Program, site

_HOME: Final = "torch.autograd.graph"
_NAME: Final = "save_on_cpu"
_VALUED: Final = Dose.of(value=True)
"""For a cell that ends with a value, which it would not show where its last line stands in a block."""
_HOOKED: Final = re.compile(r"\bsave_on_cpu\b|\bsaved_tensors_hooks\b")

_SLOWDOWN: Final = {True: 1.5, False: 2.5}
"""Time of a step by whether the copies are page-locked, as a ratio. Round figures, not measured."""

_CONTIGUOUS: Final = "tensors come back contiguous, so that results are equal up to the rounding of other kernels"

_COPIED: Final = 1.5
"""Time of a step with its state copied there and back, as a ratio. A round figure, not measured."""


_HOOKS: Final = """\
def {move}(optimizer, to_host):
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim():
                state[name] = value.to("cpu" if to_host else parameter.device)
"""
_REGISTER: Final = """\
{name}.register_step_pre_hook(lambda optimizer, *_: {move}(optimizer, to_host=False))
{name}.register_step_post_hook(lambda optimizer, *_: {move}(optimizer, to_host=True))
"""


@proposing
def _propose_saved(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code = evidence.code
    need(not code.grad_disabled, "gradients are off: nothing is kept for a backward pass")
    need(code.cuda_graphs is None, f"{code.cuda_graphs} captures a graph, in which nothing can be copied to the host")
    check_not_stepping(incident, evidence)
    why = "the census found no activations that could wait in host memory"
    activations = need(found_or_asked(incident, evidence), why)
    how = "the census found {} of activations" if evidence.census.bytes_of(Role.ACTIVATION) else "a layer asked for {}"
    check_host_room(evidence, activations, is_simulated=True)
    doses = (True, False) if evidence.device.tensor_device.startswith("cuda") else (False,)
    for pinned in doses:
        yield Proposal(
            dose=Dose.of(pin_memory=pinned),
            effect=Effect.EQUIVALENT if pinned else Effect.EXACT,
            saves=activations,
            slowdown=_SLOWDOWN[pinned],
            crosses=True,
            basis=f"{how.format(format_size(activations))}, which would wait in host memory",
            caveat=_CONTIGUOUS if pinned else None,
        )


@contextmanager
def _apply_saved(session: Session, dose: Dose) -> Iterator[None]:
    from torch.autograd.graph import save_on_cpu

    with save_on_cpu(pin_memory=bool(dose["pin_memory"])):
        yield


def _detect_saved(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the statement of the failing cell that was running."""
    (cell,) = [one for one in program.scopes if one.cell == program.failing and one.function is None]
    running = (one for one in cell.body if one.lineno <= (objects.line or 0) <= (one.end_lineno or 0))
    # Nothing can stand above the magic of a whole cell.
    return tuple(
        site("statement", cell, one) for one in running if not (program.magic_at(one.lineno) or "").startswith("%%")
    )


@refusing
def _patch_saved(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    running = need(evidence.code.first("save_on_cpu"), "which statement of the cell was running is not known")
    need(not _HOOKED.search(cells.failing.source), "the code says already where saved tensors are kept")
    beside, name, imports = cells.beside(cells.failing), f"{_HOME}.{_NAME}", list[str]()
    if not import_lines.knows_torch(beside):
        name = import_lines.name_for(_HOME, _NAME, beside, "keep_on_host")
        imports = [import_lines.source_of(_HOME, _NAME, name)]
    parsed = need(rewriting.read(cells.failing.source))
    (statement, *_) = rewriting.path_to(parsed, running.line)
    several = rewriting.apart(statement) if isinstance(statement, cst.SimpleStatementLine) else [statement]
    *lines, last = several
    behind: list[rewriting.Statement] = []
    if "value" in dict(dose.values) and statement is parsed.module.body[-1]:
        last, behind = _bound(parsed, last, rewriting.fresh_name("result", cells))
    block = under(parsed, f"{name}({'pin_memory=True' if dose['pin_memory'] else ''})", [*lines, last])
    return changed(cells, cells.failing, {statement: [block, *behind]}, imports)


def _bound(
    parsed: rewriting.ParsedCell, line: rewriting.Statement, name: str
) -> tuple[rewriting.Statement, list[rewriting.Statement]]:
    """Return the last line of a cell with a name for its value, and a line that shows it as that one did."""
    value = line.body[-1] if isinstance(line, cst.SimpleStatementLine) else None
    if not isinstance(value, cst.Expr) or parsed.module.code.rstrip().endswith(";"):
        return line, []
    bound = cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))], value=value.value)
    return rewriting.exchange(line, {value: bound}), [*rewriting.statements(f"{name}\n", parsed)]


@proposing
def _propose_state(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    state = need(evidence.census.bytes_of(Role.OPTIMIZER_STATE), "the census found no optimizer state on the device")
    need(not in_the_step(incident), "the memory ran out in the step itself, where the state has to be on the device")
    for one in evidence.code.steppers:
        if one.type_name == "LBFGS" or not one.home.startswith("torch.optim."):
            raise Unfit(f"`{one.path}` is a {one.type_name}, whose state is kept in a way that is not followed")
    need(evidence.code.distributed is None, f"{evidence.code.distributed} may keep the state of the optimizer itself")
    check_host_room(evidence, state)
    yield Proposal(
        effect=Effect.EXACT,
        saves=state,
        slowdown=_COPIED,
        crosses=True,
        basis=f"the census found {format_size(state)} of optimizer state, which would wait in host memory",
    )


@contextmanager
def _apply_state(session: Session, dose: Dose) -> Iterator[None]:
    """Keep the state of every optimizer in host memory except while it steps; undone on exit."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim import optimizer as optim

    known = {id(optimizer): optimizer for _, optimizer in session.optimizers}
    for path, optimizer in session.optimizers:
        if any(not isinstance(held, dict) for held in optimizer.state.values()) or type(optimizer).__name__ == "LBFGS":
            raise OomDoctorError(f"`{path}` keeps its state in a way that is not followed")

    def before_step(optimizer: Any, *_: Any) -> None:
        _move(optimizer, to_host=False)

    def after_step(optimizer: Any, *_: Any) -> None:
        known[id(optimizer)] = optimizer
        _move(optimizer, to_host=True)

    def before_forward(*_: Any) -> None:
        handles[0].remove()
        for optimizer in known.values():
            if any(not _is_on_host(tensor) for _, tensor in _state(optimizer)):
                tell_watchers(optimizer, but=before_step)
                _move(optimizer, to_host=True)

    handles = [
        register_module_forward_pre_hook(before_forward),
        optim.register_optimizer_step_pre_hook(before_step),
        optim.register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for optimizer in known.values():
            try:
                _move(optimizer, to_host=False)
            except RuntimeError:  # the failure that ends the cell may still hold the device's memory
                _move_at_next_step(optimizer)


def _move(optimizer: Any, *, to_host: bool) -> None:
    """Take the state of ``optimizer`` to host memory, or to where its parameters are; tensors stay the same objects."""
    for parameter, tensor in _state(optimizer):
        if _is_on_host(tensor) is not to_host:
            tensor.data = _on_host(tensor.data) if to_host else _on_device(tensor.data, parameter.device)


def _move_at_next_step(optimizer: Any) -> None:
    def bring(*_: Any) -> None:
        _move(optimizer, to_host=False)
        handle.remove()

    handle = optimizer.register_step_pre_hook(bring)


def _state(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the tensors of the state that are as many as elements of a parameter, counters left out, with those."""
    import torch

    for parameter, held in optimizer.state.items():
        for value in held.values() if isinstance(held, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim():
                yield parameter, value


def _is_on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")


def _on_host(data: Any) -> Any:
    return data.to("cpu")


def _on_device(data: Any, device: Any) -> Any:
    return data.to(device)


@refusing
def _patch_state(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    found = [_construction_sites.made(cells, facts) for facts in evidence.code.steppers]
    for one in need(found, "no optimizer was found among the notebook's objects"):
        if one.is_live(cells):
            raise Unfit(f"`{one.target}` was made by an earlier cell and may have state: that is moved on the object")
    need("register_step_pre_hook" not in cells.failing.source, "the cell sets hooks around its steps already")
    parsed = need(rewriting.read(cells.failing.source))
    move = rewriting.fresh_name("move_state", cells)
    at = {id(node): index for index, node in enumerate(parsed.module.body)}
    changes: dict[cst.CSTNode, list[rewriting.Statement]] = {}
    for one in sorted(found, key=lambda one: at.get(id(one.bound_by), -1)):
        if one.bound_by is None or id(one.bound_by) not in at:
            raise Unfit(f"`{one.target}` is made in a block: whether that is run is not known")
        text = _REGISTER.format(name=one.target, move=move)
        if not changes:
            text = f"\n{_HOOKS.format(move=move)}\n{text}"
        _, *hooks = rewriting.statements(f"pass\n{text}", parsed)  # blank lines stay with what they stand above
        changes[one.bound_by] = [one.bound_by, *hooks]
    return changed(cells, cells.failing, changes, [] if import_lines.knows_torch(cells) else ["import torch"])


FIXES: Final = (
    Fix(
        id="save_on_cpu",
        title="Offload saved activations to host memory",
        effect=Effect.EXACT,
        joins=True,
        cost="a copy to the host and back of everything that is saved",
        detect=_detect_saved,
        propose=_propose_saved,
        apply=_apply_saved,
        patch=_patch_saved,
        ways=(_VALUED,),
    ),
    Fix(
        id="offload_optimizer_state",
        title="Offload optimizer state to host memory between steps",
        effect=Effect.EXACT,
        frees=(Role.OPTIMIZER_STATE,),
        cost="a copy of the state to the device and back at each step",
        propose=_propose_state,
        apply=_apply_state,
        patch=_patch_state,
    ),
)
