"""What lies on the devices in use, and who holds it. For processes that have loaded torch."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oomdoctor.evidence import census, devices
from oomdoctor.evidence.ledger import out_of_sight
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.memory import Census, DeviceMemory
from oomdoctor.model.session import Accelerator, Session
from oomdoctor.objects.alive import alive
from oomdoctor.objects.frames import chained, frames_of, running_frames, steps_of, traceback_of
from oomdoctor.objects.kinds import spelled
from oomdoctor.objects.named import class_attributes, output_cache
from oomdoctor.program.names import bound_names, loop_targets


def places_of(accelerator: Accelerator) -> list[Accelerator]:
    """Return ``accelerator`` and the other devices in use."""
    return [accelerator, *(other for other in devices.in_use() if other.name != accelerator.name)]


def unused() -> tuple[DeviceMemory, ...]:
    """Return the cards that this process could use and has not initialised."""
    return devices.not_in_use()


def counted(
    session: Session,
    names: Sequence[tuple[str, Any]],
    exc: BaseException | None,
    filenames: Mapping[str, int],
    code: CodeFacts,
    *,
    places: Sequence[Accelerator],
    memories: Sequence[DeviceMemory],
    passed_over: frozenset[int],
) -> tuple[tuple[DeviceMemory, ...], tuple[Census, ...]]:
    """Take the census of ``places``; return their memory, counted where no allocator does, and who holds it.

    Args:
        memories: of ``places``, as it was read first of all.
        passed_over: objects by their ``id`` that are not looked into.
    """
    read = [(memory, place.holds) for memory, place in zip(memories, places, strict=True)]
    counts = census.take(_program(session, names, exc, filenames, code, passed_over), read)
    return tuple(_counted(memory, count.found) for memory, count in zip(memories, counts, strict=True)), counts


def _program(
    session: Session,
    names: Sequence[tuple[str, Any]],
    exc: BaseException | None,
    filenames: Mapping[str, int],
    code: CodeFacts,
    passed_over: frozenset[int],
) -> census.Program:
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


def _counted(device: DeviceMemory, found: int) -> DeviceMemory:
    """Fill in, for a device whose allocator keeps no count, what the census found there."""
    if not isinstance(device.allocated, Unavailable):
        return device
    return replace(device, allocated=found, reserved=found)


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
