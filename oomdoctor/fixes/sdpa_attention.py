"""Attention that writes out its scores exchanged for PyTorch's fused ``scaled_dot_product_attention``.

Written out, attention holds batch x heads x length x length numbers several times over; a fused kernel holds none of
them. Models of transformers bring a switch for it. Attention that the notebook writes itself is read statement by
statement, with its scale, mask and dropout, and exchanged where each of them is known to mean what the kernel does;
weights that are returned, kept or changed in another way forbid it.

The results are equal up to rounding. Dropout of weights draws other random numbers than the layer did. Where a mask
leaves a query nothing to attend to, the two differ: that is looked for while a change is tried, and refused. So is
attention that PyTorch has no fused kernel for, as none of those for the CPU drops weights: it would be written out by
PyTorch itself. Kernels take four dimensions (batch, heads, length, features); attention of three is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _told
from oomdoctor.fixes._activations import HELD, NUMBER_BYTES, why_not_short
from oomdoctor.fixes._attention_source import asks_for_eager, fused, place_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "TOLERANCE", "apply", "guard", "patch", "propose"]

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: fused kernels take the softmax block by block."""

_AROUND: Final = 6
"""Lines before and after a softmax that are taken for the attention that it is a part of."""

_FRAME: Final = re.compile(r"softmax|attention|attn", re.IGNORECASE)
_NO_PLACE: Final = "no attention that writes out its scores was found in what the failing cell runs"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one dose: the attention that evidence names."""
    code = evidence.code
    if code.eager_attention is None:
        return Refused(_NO_PLACE)
    if code.compiles is not None:
        return Refused("torch.compile has compiled the attention, or fuses it itself")
    if code.retain_graph is not None and "create_graph" in code.retain_graph:
        return Refused("a gradient is taken of gradients, which fused kernels do not give")
    if evidence.device.tensor_device == "cpu" and code.attention_dropout is not None:
        return Refused(
            f"{code.attention_dropout} drops weights of attention, for which PyTorch has no fused kernel on the CPU"
        )
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    held = evidence.census.holdings
    samples = {one.shape[0] for one in held if one.role is Role.BATCH and one.shape}
    size = sum(_square_bytes(one, samples) for one in held)
    asked = (incident.requested or 0) if _asked_there(incident, code.eager_attention) else 0
    if not size and not asked:
        return Refused("no scores of attention over batch, heads and two lengths were found")
    dropout = _dropout(code)
    return (
        Proposal(
            dose=Dose.of(attention=code.eager_attention.partition(": ")[0]),
            effect=Effect.CHANGES_RESULT if dropout else Effect.EQUIVALENT,
            saves=size + asked,
            slowdown=1.0,
            basis=f"estimate: at least {format_size(size)} held as scores, and {format_size(asked)} asked for",
            caveat=dropout and f"if it drops weights of attention, {dropout} draws other random numbers in the kernel",
        ),
    )


def _asked_there(incident: Incident, text: str) -> bool:
    """Tell whether memory ran out in the attention: in the framework's, or in the lines around the softmax."""
    if _FRAME.search(incident.framework_frame or ""):
        return True
    number, line = _told.numbers(text) or (None, 0)
    places = [place for place in (incident.inner, incident.cell) if place is not None and place.number == number]
    return any(place.line is not None and abs(place.line - line) <= _AROUND for place in places)


def _square_bytes(held: Holding, samples: Collection[int]) -> int:
    """Return the size of the largest tensor that is held, where that is scores: (batch, heads, length, length).

    A product of matrices keeps them with heads and batch in one dimension, which is a multiple of ``samples`` then.
    """
    shape, each = held.shape or (), NUMBER_BYTES.get(held.dtype or "", 0)
    has_heads = len(shape) == 4 or (len(shape) == 3 and any(shape[0] > one and shape[0] % one == 0 for one in samples))
    is_scores = held.role in HELD and has_heads and shape[-1] == shape[-2]
    return math.prod(shape) * each if is_scores else 0


def _dropout(code: CodeFacts) -> str | None:
    drops = [child_path(model.path, name) for model in code.models if model.training for name in model.dropout]
    return drops[0] if drops else None


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the attention that evidence names as a call of the fused kernel."""
    if evidence.code.eager_attention is None:
        return Refused(_NO_PLACE)
    place = place_of(cells, evidence.code.eager_attention)
    if isinstance(place, Refused):
        return place
    cell, line = place
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    if (eager := asks_for_eager(parsed, line)) is not None:
        if cell.number != cells.failing.number:
            return Refused(
                f'cell {cell.number}, which is not run again, makes the model: write "sdpa" on line {line} there'
            )
        new = eager.with_changes(value=eager.value.replace("eager", "sdpa"))
        return rewriting.join(
            cells, [rewriting.edit(cells, cell, parsed, rewriting.replace(parsed.module, eager, new))]
        )
    made = fused(cells, cell, line)
    if isinstance(made, Refused):
        return made
    if made.drops and any(model.training for model in evidence.code.models) and _dropout(evidence.code) is None:
        return Refused(f"`{made.function}` drops attention weights: the fused kernel draws other random numbers")
    return rewriting.join(cells, [rewriting.edit(cells, cell, made.parsed, made.module)])


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Exchange the attention that the dose names, in the live function or by the switch of the models; undone on exit.

    Raises:
        OomDoctorError: neither can be done, or no fused kernel can take the attention, or takes it otherwise.
    """
    from oomdoctor.fixes import _attention_live, _forward

    for path, model in session.modules:
        if (name := _forward.compiled(path, model)) is not None:
            raise OomDoctorError(f"{name} is compiled: it is left as it is")
    eager = [(path, model) for path, model in session.modules if _attention_live.is_eager(model)]
    place = place_of(session.cells, str(dose["attention"]))
    if isinstance(place, Refused):
        raise OomDoctorError(place.reason)
    cell, line = place
    parsed = rewriting.read(cell.source)
    is_asked = not isinstance(parsed, Refused) and asks_for_eager(parsed, line) is not None
    contexts: list[AbstractContextManager[None]]
    if is_asked:
        if not eager:
            raise OomDoctorError("no model of the session has eager attention that could be switched")
        contexts = [_attention_live.switched(path, model) for path, model in eager]
    else:
        made = fused(session.cells, cell, line)
        if isinstance(made, Refused):
            raise OomDoctorError(made.reason)
        contexts = [_attention_live.exchanged(session.namespace, [model for _, model in session.modules], made)]
    with _attention_live.all_of(contexts):
        yield


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse attention that the changed cell has and no fused kernel can take, or takes otherwise.

    Raises:
        OomDoctorError: from the attention.
    """
    from oomdoctor.fixes._attention_live import Checked

    del session, dose
    with Checked():
        yield


FIX: Final = Fix(
    id="sdpa_attention",
    title="Use PyTorch's fused attention, which does not write out the scores",
    effect=Effect.EQUIVALENT,
    tolerance=TOLERANCE,
    cost="nothing",
    propose=propose,
    apply=apply,
    patch=patch,
    guard=guard,
)
