"""Attention that writes out its scores exchanged for PyTorch's fused ``scaled_dot_product_attention``.

Written out, attention holds batch x heads x length x length numbers several times over; a fused kernel holds none of
them. Models of transformers bring a switch for it. Attention that the notebook writes itself is read statement by
statement, with its scale, mask and dropout, and exchanged where each of them is known to mean what the kernel does;
weights that are returned, kept or changed in another way forbid it.

The results are equal up to rounding. Dropout of weights draws other random numbers than the layer did. Where a mask
leaves a query nothing to attend to, the two differ: that is looked for while a change is tried, and refused. Kernels
take four dimensions (batch, heads, length, features); attention of three is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _cst
from oomdoctor.fixes._activations import why_not_short
from oomdoctor.fixes._attention_source import asks_for_eager, fused, number_and_line, place_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import CodeFacts, Evidence, Holding, Role
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.kinds import child_path, submodules
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "TOLERANCE", "apply", "guard", "patch", "propose"]

TOLERANCE: Final = 1e-5
"""Relative difference of losses and parameters in float32: fused kernels take the softmax block by block."""

_HELD: Final = (Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE, Role.TRACEBACK)
_NUMBER_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
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
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    size = sum(map(_square_bytes, evidence.census.holdings))
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
    number, line = number_and_line(text)
    places = [place for place in (incident.inner, incident.cell) if place is not None and place.number == number]
    return any(place.line is not None and abs(place.line - line) <= _AROUND for place in places)


def _square_bytes(held: Holding) -> int:
    """Return the size of the largest tensor that is held, where that is scores: (batch, heads, length, length)."""
    shape, each = held.shape or (), _NUMBER_BYTES.get(held.dtype or "", 0)
    is_scores = held.role in _HELD and len(shape) == 4 and shape[-1] == shape[-2]
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
    parsed = _cst.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    if (eager := asks_for_eager(parsed, line)) is not None:
        if cell.number != cells.failing.number:
            return Refused(
                f'cell {cell.number}, which is not run again, makes the model: write "sdpa" on line {line} there'
            )
        new = eager.with_changes(value=eager.value.replace("eager", "sdpa"))
        return _cst.join(cells, [_cst.edit(cells, cell, parsed, _cst.replace(parsed.module, eager, new))])
    made = fused(cells, cell, line)
    if isinstance(made, Refused):
        return made
    if made.drops and any(model.training for model in evidence.code.models) and _dropout(evidence.code) is None:
        return Refused(f"`{made.function}` drops attention weights: the fused kernel draws other random numbers")
    return _cst.join(cells, [_cst.edit(cells, cell, made.parsed, made.module)])


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Exchange the attention that the dose names, in the live function or by the switch of the models; undone on exit.

    Raises:
        OomDoctorError: neither can be done, or a mask leaves a query nothing to attend to.
    """
    from oomdoctor.fixes import _attention_live

    for path, model in session.modules:
        _refuse_compiled(path, model)
    eager = [(path, model) for path, model in session.modules if _attention_live.is_eager(model)]
    place = place_of(session.cells, str(dose["attention"]))
    if isinstance(place, Refused):
        raise OomDoctorError(place.reason)
    cell, line = place
    parsed = _cst.read(cell.source)
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


def _refuse_compiled(path: str, model: Any) -> None:
    for name, part in submodules(model, path):
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            raise OomDoctorError(f"{name} is compiled: it is left as it is")


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse masks that leave a query nothing to attend to, where the changed cell has them.

    Raises:
        OomDoctorError: from the attention.
    """
    from oomdoctor.fixes._attention_live import NoEmptyRow

    del session, dose
    with NoEmptyRow():
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
