"""A CUDA memory snapshot: what was live when memory ran out, or at the peak, by the lines of the user.

It is read as ``torch.cuda.memory._dump_snapshot`` and ``_snapshot`` write it, without torch. A pickle that names a
class or a function is refused, because reading it would run code.

The blocks of the snapshot are those of its end. The events are followed back from there, so that blocks which were
allocated before the recording began count too; only those that lived through to the end have frames.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html#snapshot-api-reference
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.incident.frames import INSTALLED, TORCH
from oomdoctor.model.peak import Allocations, Caller, Moment, Peak

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Record = Mapping[str, Any]

_LIVE: Final = ("active_allocated", "active_awaiting_free", "active_pending_free")
_FREED: Final = ("free_completed", "free")
_GROWN: Final = ("segment_alloc", "segment_map")
_SHRUNK: Final = ("segment_free", "segment_unmap")
_PYTHON: Final = re.compile(r"\.pyw?$|^<ipython-input|[/\\]ipykernel_\d+[/\\]")
_HEAD: Final = re.compile(rb"\x80[\x02-\x05]")
_NONE: Final = "is no CUDA memory snapshot"


def is_snapshot(head: bytes) -> bool:
    """Return whether a file that begins so is a pickle, and no text."""
    return _HEAD.match(head) is not None


def read_snapshot(data: bytes) -> tuple[Peak, ...]:
    """Return what each device in use held when memory ran out, else at its peak; the fullest first.

    Raises:
        UsageError: the data are no snapshot, or name something that reading them would run.
    """
    try:
        found = _Plain(io.BytesIO(data)).load()
        segments = found["segments"] if isinstance(found, dict) else found
        traces = found.get("device_traces", ()) if isinstance(found, dict) else ()
        numbers = {segment["device"] for segment in segments}
        numbers |= {number for number, events in enumerate(traces) if events}
        peaks = [
            _peak(
                number,
                [segment for segment in segments if segment["device"] == number],
                traces[number] if number < len(traces) else (),
            )
            for number in sorted(numbers)
        ]
    except UsageError:
        raise
    # What bytes at random raise in pickle's machine, and what a shape that is no snapshot's raises here.
    except (
        pickle.UnpicklingError,
        EOFError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as exc:
        raise UsageError(_NONE) from exc
    return tuple(sorted(peaks, key=lambda peak: -peak.allocated))


class _Plain(pickle.Unpickler):
    """Reads containers, strings and numbers alone."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise UsageError(f"{_NONE}: it names {module}.{name}, and a snapshot has plain values alone")


@dataclass(slots=True)
class _State:
    """What is live at one moment: sizes by address, and their sum; and the bytes of segments."""

    live: dict[int, int]
    allocated: int
    reserved: int

    def take_back(self, event: Record) -> None:
        """Go back to the moment before ``event``."""
        action, address, size = event["action"], event.get("addr", 0), event.get("size", 0)
        if action == "alloc":
            self.allocated -= self.live.pop(address, 0)
        elif action in _FREED:
            self.allocated += size - self.live.get(address, 0)
            self.live[address] = size
        elif action in _GROWN:
            self.reserved = max(0, self.reserved - size)
        elif action in _SHRUNK:
            self.reserved += size


def _peak(number: int, segments: Sequence[Record], events: Sequence[Record]) -> Peak:
    """Return what device ``number`` held at the moment to tell of."""
    blocks = dict(_live_blocks(segments))
    at, moment = _moment(segments, events)
    state = _at_end(segments)
    for event in reversed(events[at:]):
        state.take_back(event)
    frames = _frames(blocks, events, at)
    refused = events[at] if moment is Moment.REFUSED else {}
    return Peak(
        device=f"cuda:{number}",
        moment=moment,
        allocated=state.allocated,
        reserved=state.reserved,
        requested=refused.get("size"),
        free=refused.get("device_free"),
        events=len(events),
        holders=_holders(state.live, frames),
    )


def _at_end(segments: Sequence[Record]) -> _State:
    live = {address: _requested(block) for address, block in _live_blocks(segments)}
    return _State(live, sum(live.values()), sum(segment["total_size"] for segment in segments))


def _moment(segments: Sequence[Record], events: Sequence[Record]) -> tuple[int, Moment]:
    """Return how many events lie before the moment to tell of: the last refusal, else the peak."""
    refused = [at for at, event in enumerate(events) if event["action"] == "oom"]
    if refused:
        return refused[-1], Moment.REFUSED
    state = _at_end(segments)
    best, most = len(events), state.allocated
    for at in range(len(events) - 1, -1, -1):
        state.take_back(events[at])
        if state.allocated > most:
            best, most = at, state.allocated
    return best, Moment.PEAK if events else Moment.END


def _live_blocks(segments: Sequence[Record]) -> Iterator[tuple[int, Record]]:
    """Yield the live blocks by address, which older snapshots do not tell."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in _LIVE:
                yield block.get("address", address), block
            address += block["size"]


def _history(block: Record) -> Record:
    """Return what torch before 2.1 tells of a live block in place of its requested size and its frames."""
    older: Sequence[Record] = block.get("history", ())
    return older[0] if older else {}


def _requested(block: Record) -> int:
    size: int = block.get("requested_size") or _history(block).get("real_size") or block["size"]
    return size


def _frames(blocks: Mapping[int, Record], events: Sequence[Record], at: int) -> dict[int, Sequence[Record]]:
    """Return the frames of the allocations by address, as they are before the event ``at``."""
    later = {event["addr"] for event in events[at:] if event["action"] == "alloc"}
    found: dict[int, Sequence[Record]] = {}
    for address, block in blocks.items():
        if address in later:  # what lies there at the end is another
            continue
        found[address] = block.get("frames") or _history(block).get("frames") or ()
    for event in events[:at]:
        if event["action"] == "alloc":
            found[event["addr"]] = event.get("frames") or ()
    return found


def _holders(live: Mapping[int, int], frames: Mapping[int, Sequence[Record]]) -> tuple[Allocations, ...]:
    """Return what is live by the user's lines, the largest first."""
    sizes: Counter[tuple[Caller | None, bool]] = Counter()
    counts: Counter[tuple[Caller | None, bool]] = Counter()
    innermost: defaultdict[tuple[Caller | None, bool], Counter[Caller]] = defaultdict(Counter)
    known: dict[int, tuple[Caller | None, Caller | None]] = {}
    for address, size in live.items():
        stack = frames.get(address, ())
        if id(stack) not in known:  # torch writes the frames of one line once
            known[id(stack)] = _callers(stack)
        caller, reached = known[id(stack)]
        by = (caller, bool(stack))
        sizes[by] += size
        counts[by] += 1
        if reached is not None and reached != caller:
            innermost[by][reached] += size
    return tuple(
        Allocations(
            size=size,
            count=counts[by],
            caller=by[0],
            innermost=innermost[by].most_common(1)[0][0] if innermost[by] else None,
            is_traced=by[1],
        )
        for by, size in sizes.most_common()
    )


def _callers(stack: Sequence[Record]) -> tuple[Caller | None, Caller | None]:
    """Return the user's innermost line, else a library's; and the innermost line of all outside torch and Python."""
    lines = [frame for frame in stack if _PYTHON.search(frame["filename"]) and not TORCH.search(frame["filename"])]
    own = [frame for frame in lines if not INSTALLED.search(frame["filename"])]
    caller, reached = (own or lines)[:1], lines[:1]
    return (_told(caller[0]) if caller else None), (_told(reached[0]) if reached else None)


def _told(frame: Record) -> Caller:
    return Caller(path=frame["filename"], line=frame["line"], function=frame["name"])
