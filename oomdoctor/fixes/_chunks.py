"""What is asked before the samples of a batch are run in parts: whether they can be, and in how many."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from oomdoctor.model.absence import Refused
from oomdoctor.model.memory import Role
from oomdoctor.objects.kinds import child_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomdoctor.model.code import CodeFacts, ModelFacts, TrainingLoop
    from oomdoctor.model.evidence import Evidence


def model_facts(code: CodeFacts, loop: TrainingLoop, text: str) -> ModelFacts | None:
    """Return the facts of the model that the loop calls ``text``, None if the namespace shows no object for it."""
    path = dict(loop.stands_for).get(text, text)
    exact = [model for model in code.models if model.path == path]
    if not exact and path.startswith("self."):
        exact = [model for model in code.models if model.path.endswith(path.removeprefix("self"))]
    exact = exact or [model for model in code.local_models if model.path == path]
    return exact[0] if len(exact) == 1 else None


def why_not(code: CodeFacts, loop: TrainingLoop) -> str | None:
    """Return why this loop's batch cannot be taken apart, as far as facts tell."""
    for text in loop.models:
        model = model_facts(code, loop, text)
        if model is None:
            continue
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
    """Return what would be of each part of a batch in the place of the whole, None where nothing is known to be.

    Args:
        model: what is run.
        own: whether the hooks of the model itself would be called for each part as well.
    """
    if (hooked := next((name for name in model.hooked if name or own), None)) is not None:
        return f"{layer(model, hooked)} has forward hooks, which would be called for each part of a batch"
    if model.leaves:
        return f"a forward leaves {layer(model, model.leaves[0])} behind, which would be that of a part of the batch"
    return None


def layer(model: ModelFacts, name: str) -> str:
    """Return the expression for the layer ``name`` below ``model``, or for an attribute there."""
    return reduce(child_path, filter(None, name.split(".")), model.path)


def no_more_than_samples(counts: Sequence[int], evidence: Evidence) -> list[int] | Refused:
    """Return those of ``counts`` that the largest batch found has samples for, all where no batch was found."""
    batches = [one.shape[0] for one in evidence.census.holdings if one.role is Role.BATCH and one.shape]
    fitting = [count for count in counts if not batches or count <= max(batches)]
    return fitting or Refused("the batch has one sample: there is nothing to split")
