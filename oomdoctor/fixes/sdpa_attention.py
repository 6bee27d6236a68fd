"""Attention that writes out its scores exchanged for PyTorch's fused ``scaled_dot_product_attention``.

Written out, attention holds batch x heads x length x length numbers several times over; a fused kernel holds none of
them. Models of transformers bring a switch for it. Attention that the notebook writes itself is read statement by
statement, with its scale, mask and dropout, and exchanged where each of them is known to mean what the kernel does;
weights that are returned, kept or changed in another way forbid it. A model of an earlier cell is switched at the top
of the failing one.

The results are equal up to rounding. Dropout of weights draws other random numbers than the layer did. Where a mask
leaves a query nothing to attend to, the two differ: that is looked for while a change is tried, and refused. So is
attention that PyTorch has no fused kernel for, as none of those for the CPU drops weights: it would be written out by
PyTorch itself. Kernels take four dimensions (batch, heads, length, features); attention of three is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes._activations import HELD, NUMBER_BYTES, why_not_short
from oomdoctor.fixes._attention_sites import ASKED, DROPS, detect
from oomdoctor.fixes._attention_source import asks_for_eager, fused
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import rewriting
from oomdoctor.program.import_lines import insert_at_top
from oomdoctor.program.names import FirstUse, first_uses

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells, Session
    from oomdoctor.model.site import Site

__all__ = ["FIX", "TOLERANCE", "detect", "guard", "patch", "propose"]

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: fused kernels take the softmax block by block."""

_AROUND: Final = 6
"""Lines before and after a softmax that are taken for the attention that it is a part of."""

_FRAME: Final = re.compile(r"softmax|attention|attn", re.IGNORECASE)
_NO_PLACE: Final = "no attention that writes out its scores was found in what the failing cell runs"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose the one dose: the attention that evidence names."""
    code = evidence.code
    found = code.sites.get("sdpa_attention", ())
    if not found:
        return Refused(_NO_PLACE)
    drops = next((site.text for site in found if site.kind == DROPS), None)
    if code.compiles is not None:
        return Refused("torch.compile has compiled the attention, or fuses it itself")
    if any(one.kind == "create_graph" for one in code.sites.get("drop_retain_graph", ())):
        return Refused("a gradient is taken of gradients, which fused kernels do not give")
    if evidence.device.tensor_device == "cpu" and drops is not None:
        return Refused(f"{drops} drops weights of attention, for which PyTorch has no fused kernel on the CPU")
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    held = evidence.census.holdings
    samples = {one.shape[0] for one in held if one.role is Role.BATCH and one.shape}
    size = sum(_square_bytes(one, samples) for one in held)
    asked = (incident.requested or 0) if _asked_there(incident, found[0]) else 0
    if not size and not asked:
        return Refused("no scores of attention over batch, heads and two lengths were found")
    dropout = drops or _dropout(code)
    return (
        Proposal(
            dose=Dose.of(attention=found[0].where),
            effect=Effect.CHANGES_RESULT if dropout else Effect.EQUIVALENT,
            saves=size + asked,
            slowdown=1.0,
            basis=f"estimate: at least {format_size(size)} held as scores, and {format_size(asked)} asked for",
            caveat=dropout and f"if it drops weights of attention, {dropout} draws other random numbers in the kernel",
        ),
    )


def _asked_there(incident: Incident, found: Site) -> bool:
    """Tell whether memory ran out in the attention: in the framework's, or in the lines around the softmax."""
    if _FRAME.search(incident.framework_frame or ""):
        return True
    places = [place for place in (incident.inner, incident.cell) if place is not None and place.number == found.cell]
    return any(place.line is not None and abs(place.line - found.line) <= _AROUND for place in places)


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
    found = evidence.code.first("sdpa_attention")
    if found is None:
        return Refused(_NO_PLACE)
    cell = next((one for one in cells.history if one.number == found.cell), None)
    if cell is None:
        return Refused(f"{found.where} is no longer there")
    if found.kind == ASKED:
        return _asked_otherwise(cells, cell, found)
    made = fused(cells, cell, found.line)
    if isinstance(made, Refused):
        return made
    if made.drops and any(model.training for model in evidence.code.models) and _dropout(evidence.code) is None:
        return Refused(f"`{made.function}` drops attention weights: the fused kernel draws other random numbers")
    return rewriting.join(cells, [rewriting.edit(cells, cell, made.parsed, made.module)])


def _asked_otherwise(cells: Cells, cell: Cell, found: Site) -> Patch | Refused:
    """Return the cell that makes the model asking for the kernel, or the failing one switching the model to it."""
    failing = rewriting.read(cells.failing.source)
    if isinstance(failing, Refused):
        return failing
    if cell.number == cells.failing.number:
        if (eager := asks_for_eager(failing, found.line)) is None:
            return Refused(_NO_PLACE)
        new = eager.with_changes(value=eager.value.replace("eager", "sdpa"))
        module = rewriting.replace(failing.module, eager, new)
        return rewriting.join(cells, [rewriting.edit(cells, cell, failing, module)])
    models = [path for path in found.names if path.isidentifier()]
    if not models or any(first_uses(cells.failing.source).get(path) is FirstUse.BINDS for path in models):
        return Refused("no model that the failing cell is given has eager attention that can be switched")
    lines = [f'{path}.set_attn_implementation("sdpa")' for path in models]
    module = insert_at_top(failing, failing.module, lines)
    return rewriting.join(cells, [rewriting.edit(cells, cells.failing, failing, module)])


@contextmanager
def guard(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse attention that the changed cell has and no fused kernel can take, or takes otherwise.

    Raises:
        OomDoctorError: from the attention.
    """
    from oomdoctor.fixes._attention_kernels import Checked

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
    apply=None,
    patch=patch,
    detect=detect,
    guard=guard,
)
