"""What a fix asks of the evidence first: what is short, whether the loop was training, what a model allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Final

from oomdoctor.fixes._refusals import Unfit, need
from oomdoctor.model import Cells, Dose, Evidence, Incident, Refused, Role
from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
from oomdoctor.model.incident import Family
from oomdoctor.model.memory import Holding
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path

HELD: Final = (Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE, Role.TRACEBACK)
"""Roles in which a tensor of a step is held."""

NUMBER_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number of a type."""

_OPTIMIZERS: Final = "torch/optim/"
_OF_STEP: Final = re.compile(r"torch/optim/|_multi_tensor_|_foreach_")
_LAYERS: Final = "torch/nn/"
_OF_LIBRARY: Final = re.compile(r"[\w.+-]+[/\\]")
"""A file of an installed package, which may run a model that the cells do not show."""
_LEAST_RATIO: Final = 0.05
"""Of what was found: fewer activations than this, in an optimizer's step, are not what that step is short of."""


def check_short(incident: Incident, evidence: Evidence) -> None:
    """Raise ``Unfit`` where fewer activations of a model would not have helped."""
    frame, code = incident.framework_frame or "", evidence.code
    # What a trainer of a library does is not seen in the cells.
    runs_none = code.runs_model is False and not code.trainers and not any(loop.in_failing_run for loop in code.loops)
    if runs_none and frame and not _OF_LIBRARY.match(frame):
        raise Unfit("the failing cell calls no model, as far as can be seen")
    check_not_stepping(incident, evidence)


def check_not_stepping(incident: Incident, evidence: Evidence) -> None:
    """Raise ``Unfit`` in an optimizer's step, which asks for state of its own when the activations are freed."""
    held, found = evidence.census.bytes_of(Role.ACTIVATION), evidence.census.found
    if (incident.framework_frame or "").startswith(_OPTIMIZERS) and held <= _LEAST_RATIO * found:
        holding = f"when activations held {format_size(held)} of {format_size(found)}"
        raise Unfit(f"memory ran out in the optimizer's step, {holding}")


def in_the_step(incident: Incident) -> bool:
    """Whether the memory ran out within an optimizer's step."""
    lines = [line.source_line for line in (incident.inner, incident.cell) if line is not None]
    return _OF_STEP.search(incident.framework_frame or "") is not None or any(".step(" in line for line in lines)


def check_training(evidence: Evidence) -> None:
    """Raise ``Unfit`` where memory ran out in an evaluation, when the last training step had freed what it took."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if loops and not any(loop.was_running for loop in loops):
        raise Unfit(f"the failure was outside the training loop ({loops[0].where})")


def hangs_on(holding: Holding, name: str) -> bool:
    """Whether what the census found hangs on ``name``, a global or a local one."""
    path = holding.path.removeprefix("local `")
    return path.startswith(name) and path[len(name) :][:1] in {"", "[", "`", " "}


def running_loops(evidence: Evidence) -> list[TrainingLoop]:
    """Return the training loops of the failing run, at least one."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    return need(loops, "no training loop was found in what the cell runs")


def passing(incident: Incident, evidence: Evidence, *, batch: bool = True) -> int:
    """Return the bytes of what grows with the inputs: activations, the batch itself, and what was asked for."""
    held = evidence.census.bytes_of(Role.ACTIVATION) + (evidence.census.bytes_of(Role.BATCH) if batch else 0)
    return held + (incident.requested or 0)


def found_or_asked(incident: Incident, evidence: Evidence) -> int:
    """Return the bytes of activations that were found, or of the request where a model may have made it.

    A forward pass that fails at its first layer holds no activations yet.
    """
    if found := evidence.census.bytes_of(Role.ACTIVATION):
        return found
    if evidence.jittor is not None and (found := evidence.jittor.graph_bytes):
        return found
    is_training = any(loop.in_failing_run and loop.was_running for loop in evidence.code.loops)
    is_layer = (incident.framework_frame or "").startswith(_LAYERS)
    return (incident.requested or 0) if is_training or is_layer else 0


def model_facts(code: CodeFacts, loop: TrainingLoop, text: str) -> ModelFacts | None:
    """Return the facts of the model that the loop calls ``text``, None if the namespace shows no object for it."""
    path = dict(loop.stands_for).get(text, text)
    found = [model for model in code.models if model.path == path]
    if path.startswith("self."):
        found = found or [model for model in code.models if model.path.endswith(path.removeprefix("self"))]
    found = found or [model for model in code.local_models if model.path == path]
    return found[0] if len(found) == 1 else None


def why_no_parts(code: CodeFacts, loop: TrainingLoop) -> str | None:
    """Return why this loop's batch cannot be taken apart, as far as facts tell."""
    for model in filter(None, (model_facts(code, loop, text) for text in loop.models)):
        if model.training and model.batch_norm:
            return f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode"
        if (why := takes_note(model, own=True)) is not None:
            return why
    return None


def couples(model: ModelFacts) -> str | None:
    """Return why the samples of a batch cannot be run apart, None where nothing is known against it."""
    if model.training and model.batch_norm:
        return f"{child_path(model.path, model.batch_norm[0])} takes its statistics over the whole batch"
    if model.sequence_first:
        return f"{child_path(model.path, model.sequence_first[0])} takes the batch in dimension 1"
    return takes_note(model, own=False)


def takes_note(model: ModelFacts, *, own: bool) -> str | None:
    """Return what would be of each part of a batch in the place of the whole: hooks, the model's ``own`` as well."""
    if (hooked := next((name for name in model.hooked if name or own), None)) is not None:
        return f"{layer(model, hooked)} has forward hooks, which would be called for each part of a batch"
    if model.leaves:
        return f"a forward leaves {layer(model, model.leaves[0])} behind, which would be that of a part of the batch"
    return None


def layer(model: ModelFacts, name: str) -> str:
    """Return the expression for the layer ``name`` below ``model``, or for an attribute there."""
    return reduce(child_path, filter(None, name.split(".")), model.path)


_FAMILIES: Final = frozenset(
    {
        *(Family.HOST, Family.NUMPY, Family.PINNED, Family.FORK, Family.SHM),
        *(Family.WORKER_KILLED, Family.RANK_KILLED, Family.KERNEL_KILLED),
    }
)


def check_host(incident: Incident) -> None:
    """Raise ``Unfit`` where memory of the host is not what is missing."""
    if incident.family not in _FAMILIES and incident.device != "cpu":
        raise Unfit("a device ran out of memory, and this saves memory of the host alone")


def asking_line(incident: Incident, evidence: Evidence, is_it: Callable[[str], bool]) -> Dose | None:
    """Return cell and line of the user's that asked for host memory, None where no text of a line shows it."""
    for line in (incident.inner, incident.cell):
        if line is not None and line.line is not None and is_it(line.source_line):
            number = (evidence.code.failing_cell or 0) if line.number is None else line.number
            return Dose.of(cell=number, line=line.line)
    return None


def is_opened(cells: Cells, name: str) -> bool:
    """Whether a cell binds ``name`` to an open file, or to one in memory."""
    bound = rf"\b{re.escape(name)}\b\s*=\s*(?:io\.)?(?:BytesIO|StringIO|open)\(|\bas {re.escape(name)}\b"
    return any(re.search(bound, cell.source) for cell in cells.history)


def check_host_room(evidence: Evidence, size: int, *, is_simulated: bool = False) -> None:
    """Raise ``Unfit`` where ``size`` bytes cannot go to host memory; ``is_simulated``: nor on the virtual device."""
    if evidence.device.tensor_device == "cpu" and not (is_simulated and evidence.device.simulated):
        if evidence.device.simulated:
            raise Unfit("the simulated GPU counts host memory: moving tensors there frees nothing on this machine")
        raise Unfit("the tensors are in host memory already")
    host = evidence.host
    pairs = ((host.cgroup_limit, host.cgroup_used), (host.process_limit, host.process_used), (host.available, 0))
    room = [max(limit - used, 0) for limit, used in pairs if isinstance(limit, int) and isinstance(used, int)]
    if room and min(room) < size:
        raise Unfit(f"host memory has {format_size(min(room))} left, and {format_size(size)} would have to go there")


ROUNDS: Final = {
    "bfloat16": "matrix products and convolutions are rounded to bfloat16, 8 significant bits in place of 24",
    "float16": "matrix products and convolutions are rounded to float16, 11 significant bits in place of 24, and a "
    "step is left out where its gradients overflow",
}
"""What mixed precision changes, in words."""


def kind_of_device(evidence: Evidence) -> str:
    """Return the type of the device that tensors are on, ``cpu`` on the virtual accelerator."""
    return evidence.device.tensor_device.partition(":")[0]


def native(evidence: Evidence) -> str | Refused:
    """Return ``bfloat16`` where the device computes in it, else ``float16``, or why neither can be told."""
    kind = kind_of_device(evidence)
    if kind == "cpu":
        if only := evidence.code.float32_only:
            return Refused(f"this processor has no kernel for {' and '.join(only)} in bfloat16")
        return "bfloat16"
    if kind != "cuda":
        return Refused(f"16 bits on {kind} are left to you: which types it computes in differs between its devices")
    if evidence.code.native_bfloat16 is None:
        return Refused("which 16-bit type the device computes in is not known")
    return "bfloat16" if evidence.code.native_bfloat16 else "float16"
