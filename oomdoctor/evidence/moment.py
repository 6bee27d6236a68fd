"""Collects the evidence of one moment, what the limits say first of all: looking takes memory itself.

Where memory runs out while something is collected, that one thing is not known, and all else is. Without what the code
says nothing else can be understood, so there the look fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from oomdoctor.evidence import arrays, host
from oomdoctor.evidence._trainers import passed
from oomdoctor.evidence.code import facts
from oomdoctor.model import baseline
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Detect
from oomdoctor.model.memory import Census, DeviceMemory, HostHolding, HostMemory
from oomdoctor.model.session import Accelerator, Session
from oomdoctor.objects.frames import lines_of, local_modules
from oomdoctor.objects.kinds import Kind, spelled
from oomdoctor.objects.named import user_names

T = TypeVar("T")

_SHORT: Final = Unavailable("there was no memory left to look")


def collect(
    session: Session,
    exc: BaseException | None,
    filenames: Mapping[str, int],
    *,
    line: int | None = None,
    detectors: Mapping[str, Detect] | None = None,
) -> Evidence:
    """Collect all evidence of one moment.

    Args:
        exc: the failure at hand, its frames not yet released; None for a report.
        filenames: number of the cell by the file name of its code.
        line: line of the failing cell that was running.
        detectors: what finds the practice that a fix mends, by the id of the fix.
    """
    accelerator, has_tensors = session.accelerator, "torch" in sys.modules
    whole = _if_room(host.read, _unread(_SHORT))
    places: list[Accelerator] = [accelerator]
    if has_tensors:
        from oomdoctor.evidence import tensors

        places = tensors.places_of(accelerator)
    memories = tuple(place.read() for place in places)
    code = _facts(session, exc, filenames, line, detectors)
    names, passed_over = list(user_names(spelled(session.namespace))), _apart(session.namespace)
    others: tuple[DeviceMemory, ...] = ()
    if has_tensors:
        terms: dict[str, Any] = {"places": places, "memories": memories, "passed_over": passed_over}
        missing = memories, tuple(_uncounted(memory, _SHORT) for memory in memories)
        memories, counts = _if_room(lambda: tensors.counted(session, names, exc, filenames, code, **terms), missing)
        others = tensors.unused()
    else:
        counts = tuple(Census(device=memory.name, found=0, allocated=memory.allocated) for memory in memories)
        memories = tuple(replace(memory, allocated=0, reserved=0) for memory in memories)
    beside: tuple[HostHolding, ...] = _if_room(lambda: arrays.largest(names, passed_over), ())
    return Evidence(
        devices=(*memories, *others),
        host=_with_bare(whole, counts, beside),
        beside_tensors=beside,
        censuses=counts,
        code=code,
    )


def unlooked(accelerator: Accelerator | None = None) -> Evidence:
    """Return what is known where nothing could be looked at: what the limits say, if that much."""
    memory = DeviceMemory(name="cpu", tensor_device="cpu", total=_SHORT, free=_SHORT, allocated=_SHORT, reserved=_SHORT)
    if accelerator is not None:
        memory = _if_room(accelerator.read, memory)
    whole = _if_room(lambda: host.read(in_full=False), _unread(_SHORT))
    return Evidence(devices=(memory,), host=whole, censuses=(_uncounted(memory, _SHORT),), code=CodeFacts())


def _if_room(look: Callable[[], T], otherwise: T) -> T:
    """Return what ``look`` returns; where memory runs out meanwhile, ``otherwise``.

    Source: extension modules that do not check an allocation return without an error set, a ``SystemError``.
    """
    try:
        return look()
    except (MemoryError, SystemError):
        return otherwise


def _facts(
    session: Session,
    exc: BaseException | None,
    filenames: Mapping[str, int],
    line: int | None,
    detectors: Mapping[str, Detect] | None,
) -> CodeFacts:
    cells, found = session.cells, session.objects()
    objects = [found.get(kind, ()) for kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.LOADER)]
    running = [] if line is None else lines_of(exc, filenames, (cells.failing.number, line))
    with _unobserved():
        return facts(
            cells,
            spelled(session.namespace),
            *objects,
            local=local_modules(exc, filenames, objects[0]),
            line=line,
            running=running,
            passed=passed(exc),
            detectors=detectors,
            is_kept=session.is_kept,
            tries=exc is not None and session.accelerator.name == "cpu",
        )


def _unobserved() -> Any:
    if "torch" not in sys.modules:
        return nullcontext()
    from oomdoctor.objects.storages import unobserved

    return unobserved()


def _with_bare(whole: HostMemory, counts: Iterable[Census], beside: Iterable[HostHolding]) -> HostMemory:
    """Return the host's memory with what the bare process takes of it."""
    tensors = sum(count.found for count in counts if count.device == "cpu")
    held = tensors + sum(holding.bytes for holding in beside)
    bare = baseline.bare(whole.process_used, held) if isinstance(whole.process_used, int) else None
    return whole if bare is None else replace(whole, bare=bare)


def _uncounted(memory: DeviceMemory, why: Unavailable) -> Census:
    return Census(device=memory.name, found=0, allocated=why, notes=(f"Holders were not looked for: {why.reason}.",))


def _unread(why: Unavailable) -> HostMemory:
    return HostMemory(**{field.name: why for field in fields(HostMemory)})


def _apart(namespace: Mapping[str, Any]) -> frozenset[int]:
    """Return what is not looked into: the namespace itself and the output cache."""
    return frozenset({id(namespace), id(spelled(namespace).get("_oh"))})
