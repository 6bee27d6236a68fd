"""Whether activations are what the memory is short of: what every fix that saves activations asks first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.incident import Incident

HELD: Final = (Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE, Role.TRACEBACK)
"""Roles in which a tensor of a step is held."""

NUMBER_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number of a type."""

_OPTIMIZERS: Final = "torch/optim/"
_LAYERS: Final = "torch/nn/"
_OF_LIBRARY: Final = re.compile(r"[\w.+-]+[/\\]")
"""A file of an installed package, which may run a model that the cells do not show."""
_LEAST_RATIO: Final = 0.05
"""Of what was found: fewer activations than this, in an optimizer's step, are not what that step is short of."""


def why_not_short(incident: Incident, evidence: Evidence) -> str | None:
    """Return why fewer activations would not have helped, None where they may.

    An optimizer's step comes when the backward pass has freed the activations: what it asks for is state of its own.
    """
    frame = incident.framework_frame or ""
    if _runs_none(evidence) and frame and not _OF_LIBRARY.match(frame):
        return "the failing cell calls no model, as far as can be seen"
    if not frame.startswith(_OPTIMIZERS):
        return None
    held, found = evidence.census.bytes_of(Role.ACTIVATION), evidence.census.found
    if held > _LEAST_RATIO * found:
        return None
    return f"memory ran out in the optimizer's step, when activations held {format_size(held)} of {format_size(found)}"


def _runs_none(evidence: Evidence) -> bool:
    """Whether it was seen that no model runs; what a trainer of a library does is not seen in the cells."""
    code = evidence.code
    return code.runs_model is False and not code.trainers and not any(loop.in_failing_run for loop in code.loops)


def why_not_training(evidence: Evidence) -> str | None:
    """Return why a change of the training loops of the failing run would not have helped, None where it may.

    Evaluation after an epoch runs when the last training step has freed what it took.
    """
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if not loops or any(loop.was_running for loop in loops):
        return None
    return f"memory ran out when the training loop of {loops[0].where} was not running"


def found_or_asked(incident: Incident, evidence: Evidence) -> int:
    """Return the bytes of activations that were found, or those of the request where a model may have made it.

    A forward pass that fails at its first layer holds no activations yet. A request from elsewhere (a data set that is
    made, a model that is loaded) is none.
    """
    if found := evidence.census.bytes_of(Role.ACTIVATION):
        return found
    is_training = any(loop.in_failing_run and loop.was_running for loop in evidence.code.loops)
    is_layer = (incident.framework_frame or "").startswith(_LAYERS)
    return (incident.requested or 0) if is_training or is_layer else 0
