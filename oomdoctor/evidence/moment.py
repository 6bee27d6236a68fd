"""Collects the evidence of one moment, what the limits say first of all: looking takes memory itself.

Where memory runs out while something is collected, that one thing is not known, and all else is. Without what the code
says nothing else can be understood, so there the look fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

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
from oomdoctor.objects.alive import alive
from oomdoctor.objects.frames import (
    chained,
    frames_of,
    lines_of,
    local_modules,
    running_frames,
    standing_in,
    steps_of,
    traceback_of,
)
from oomdoctor.objects.kinds import Kind, spelled
from oomdoctor.objects.named import class_attributes, output_cache, user_names
from oomdoctor.program.names import bound_names, loop_targets

if TYPE_CHECKING:
    from oomdoctor.evidence import census

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
        from oomdoctor.evidence import devices

        places += [other for other in devices.in_use() if other.name != accelerator.name]
    memories = tuple(place.read() for place in places)
    code = _facts(session, exc, filenames, line, detectors)
    names, passed_over = list(user_names(spelled(session.namespace))), _apart(session.namespace)
    others: tuple[DeviceMemory, ...] = ()
    if has_tensors:
        program = partial(_program, session, names, exc, filenames, code, passed_over)
        missing = tuple(_uncounted(memory, _SHORT) for memory in memories)
        memories, counts = _if_room(lambda: _counted(program(), places, memories), (memories, missing))
        others = devices.not_in_use()
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


def _counted(
    program: census.Program, places: Sequence[Accelerator], memories: tuple[DeviceMemory, ...]
) -> tuple[tuple[DeviceMemory, ...], tuple[Census, ...]]:
    """Take the census of ``places``; return their memory, counted where no allocator does, and who holds it."""
    from oomdoctor.evidence import census

    counts = census.take(program, [(memory, place.holds) for memory, place in zip(memories, places, strict=True)])
    counted = tuple(
        replace(memory, allocated=count.found, reserved=count.found)
        if isinstance(memory.allocated, Unavailable)
        else memory
        for memory, count in zip(memories, counts, strict=True)
    )
    return counted, counts


def _program(
    session: Session,
    names: Sequence[tuple[str, Any]],
    exc: BaseException | None,
    filenames: Mapping[str, int],
    code: CodeFacts,
    passed_over: frozenset[int],
) -> census.Program:
    """Return what the census sets out from."""
    from oomdoctor.evidence import census
    from oomdoctor.evidence.ledger import out_of_sight

    namespace = spelled(session.namespace)
    frames = [*frames_of(exc, filenames, namespace), *running_frames(filenames, namespace)]
    own = [frame for frame in frames if frame.is_program]
    running = [frame.code_names for frame in own]
    # The namespace may have the locals of a running function in it, where that asked for the report.
    running += [frozenset(name for name, value in one.values.items() if namespace.get(name) is value) for one in own]
    bound = bound_names(session.cells.failing.source) if exc is not None else frozenset()
    earlier = earlier_errors(exc, filenames)
    return census.Program(
        borrowed=frozenset().union(*(loop_targets(cell.source) for cell in session.cells.history)),
        passed_over=passed_over,
        names=[*names, *class_attributes(names, namespace.get("__name__"))],
        outputs=list(output_cache(namespace)),
        frames=frames,
        earlier=[frame for error in earlier for frame in frames_of(error, filenames, namespace)],
        batch_names=frozenset(name for loop in code.loops for name in loop.batch),
        in_step=exc is not None or any(frame.values for frame in own),
        step_names=bound.union(*running),
        out_of_sight=out_of_sight(),
        appends={one.names[0]: one.names[1] for one in code.sites.get("detach_history", ())},
    )


def earlier_errors(exc: BaseException | None, filenames: Container[str]) -> tuple[BaseException, ...]:
    """Return the errors of before that went through a cell and are alive, that last shown first.

    The interpreter keeps the last one that was shown. When the next is shown, the old one is let go of and yet not
    freed: the frame of IPython that ran the cell holds the result of the run, and that the error, so that only the
    garbage collector finds it. Errors that the program kept (``except Exception as e: saved = e``) are alive as well,
    and no name leads from them to their frames. So at a failure all that the collector knows are looked through.

    Args:
        exc: the failure at hand, which is none of them; without one, only what was last shown is looked at.
        filenames: of the code of cells.
    """
    own = {id(link) for link in chained(exc)}
    found: dict[int, BaseException] = {}
    last: Any = getattr(sys, "last_value", None)
    if issubclass(type(last), BaseException) and id(last) not in own:
        found[id(last)] = last
    for error in alive(BaseException) if exc is not None else ():
        if id(error) not in own and any(
            step.tb_frame.f_code.co_filename in filenames for step in steps_of(traceback_of(error))
        ):
            found.setdefault(id(error), error)
    return tuple(found.values())


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
            standing={} if line is None else standing_in(exc, filenames, (cells.failing.number, line)),
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
