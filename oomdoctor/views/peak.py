"""What a CUDA memory snapshot tells, as a document: what held the memory, by the lines of the user's program."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model import jsonable
from oomdoctor.model.peak import Moment
from oomdoctor.model.sizes import format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Document, Head, Items, Line, apart, given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomdoctor.model.peak import Allocations, Caller, Peak

_TOP: Final = 10
_PARTS: Final = 3
"""Parts of a path that are shown."""
_RECORD: Final = "`torch.cuda.memory._record_memory_history()`"
_NO_EVENTS: Final = f"The snapshot has no history, so its peak is not known: call {_RECORD} before the allocations."
_NO_FRAMES: Final = "allocated before the recording began, or without it"
_NO_PYTHON: Final = "no line of Python, as in the backward pass, which runs on threads of its own"
_EMPTY: Final = "The snapshot has no CUDA memory in use."


def peaks(found: Sequence[Peak]) -> Document:
    """Return what held the memory of each device that had any."""
    used = [peak for peak in found if peak.allocated or peak.reserved]
    if not used:
        return (Line(_EMPTY, "lead"),)
    return tuple(chain.from_iterable(_one(peak) if at == 0 else apart(*_one(peak)) for at, peak in enumerate(used)))


def to_dict(found: Sequence[Peak]) -> dict[str, Any]:
    """Return the JSON shape."""
    return {"schema": jsonable.SCHEMA, "peaks": jsonable.plain(tuple(found))}


def _one(peak: Peak) -> Document:
    held = tuple(_row(holder) for holder in peak.holders if holder.size)
    return (
        Line(_headline(peak), "lead"),
        Line(f"reserved {format_size(peak.reserved)}, {labels.count(peak.events, 'event')} recorded", "inner"),
        *given(Line(_NO_EVENTS, "muted") if peak.moment is Moment.END else None),
        *((Head("What held it", "by the innermost line of yours"), Items(held, most=_TOP)) if held else ()),
    )


def _headline(peak: Peak) -> str:
    held = f"{format_size(peak.allocated)} of {labels.clean(peak.device)}"
    if peak.moment is Moment.PEAK:
        return f"At the peak, tensors held {held}."
    if peak.moment is Moment.END:
        return f"When the snapshot was taken, tensors held {held}."
    asked = "" if peak.requested is None else f"; {format_size(peak.requested)} more were asked for"
    free = "" if peak.free is None else f", and {format_size(peak.free)} were free"
    return f"When memory ran out, tensors held {held}{asked}{free}."


def _row(holder: Allocations) -> str:
    size = f"{format_size(holder.size)} in {labels.count(holder.count, 'block')}"
    if holder.caller is None:
        return f"{size}: {_NO_PYTHON if holder.is_traced else _NO_FRAMES}"
    through = "" if holder.innermost is None else f", mostly through {_place(holder.innermost)}"
    return f"{size}: {_place(holder.caller)}{through}"


def _place(caller: Caller) -> str:
    path = "/".join(caller.path.replace("\\", "/").split("/")[-_PARTS:])
    return f"{labels.code(f'{path}:{caller.line}', 100)} in {labels.code(caller.function)}"
