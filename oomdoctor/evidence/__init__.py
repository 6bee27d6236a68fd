"""Collectors: what the memory, the objects and the code are like at the moment of a failure or of a report.

A collector never runs code of the user's and allocates nothing on a device. What it cannot tell is ``Unavailable``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from oomdoctor.evidence import arrays, census, devices, host
from oomdoctor.evidence._earlier import earlier_errors
from oomdoctor.evidence._trainers import passed
from oomdoctor.evidence.code import facts
from oomdoctor.evidence.frames import frames_of, lines_of, running_frames
from oomdoctor.evidence.nameless import out_of_sight
from oomdoctor.evidence.objects import class_attributes, output_cache, user_names
from oomdoctor.evidence.storages import unobserved
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.kinds import Kind, spelled
from oomdoctor.model.memory import DeviceMemory
from oomdoctor.model.names import bound_names, loop_targets
from oomdoctor.model.session import Session

__all__ = ["collect"]


def collect(
    session: Session, exc: BaseException | None, filenames: Mapping[str, int], *, line: int | None = None
) -> Evidence:
    """Collect all evidence of one moment.

    Args:
        exc: the failure at hand, its frames not yet released; None for a report.
        filenames: number of the cell by the file name of its code.
        line: line of the failing cell that was running.
    """
    cells, found = session.cells, session.objects()
    objects = [found.get(kind, ()) for kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.LOADER)]
    running = [] if line is None else lines_of(exc, filenames, (cells.failing.number, line))
    with unobserved():
        code = facts(cells, spelled(session.namespace), *objects, line=line, running=running, passed=passed(exc))
    accelerator = session.accelerator
    others = [other for other in devices.in_use() if other.name != accelerator.name]
    places = [accelerator, *others]
    memories = [place.read() for place in places]
    places_read = [(memory, place.holds) for memory, place in zip(memories, places, strict=True)]
    names = list(user_names(spelled(session.namespace)))
    counts = census.take(_program(session, names, exc, filenames, code), places_read)
    return Evidence(
        devices=(
            *(_counted(memory, count.found) for memory, count in zip(memories, counts, strict=True)),
            *devices.not_in_use(),
        ),
        host=host.read(),
        beside_tensors=arrays.largest(names, _apart(session.namespace)),
        censuses=counts,
        code=code,
    )


def _program(
    session: Session,
    names: Sequence[tuple[str, Any]],
    exc: BaseException | None,
    filenames: Mapping[str, int],
    code: CodeFacts,
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
        passed_over=_apart(session.namespace),
        names=[*names, *class_attributes(names, namespace.get("__name__"))],
        outputs=list(output_cache(namespace)),
        frames=frames,
        earlier=[frame for error in earlier for frame in frames_of(error, filenames, namespace)],
        batch_names=frozenset(name for loop in code.loops for name in loop.batch),
        in_step=exc is not None or any(frame.values for frame in own),
        step_names=bound.union(*running),
        out_of_sight=out_of_sight(),
        appends=dict(_detached(source) for _, _, source in code.history_appends),
    )


def _apart(namespace: Mapping[str, Any]) -> frozenset[int]:
    """Return what is not looked into: the namespace itself and the output cache."""
    return frozenset({id(namespace), id(spelled(namespace).get("_oh"))})


def _detached(source: str) -> tuple[str, str]:
    """Return the name of what a statement adds a tensor to, and the one that leaves the graph behind."""
    node = ast.parse(source).body[0]
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=kept_in), args=[kept]) as call):
            call.args = [_without_graph(kept)]
        case ast.AugAssign(target=kept_in, value=kept):
            node.value = _without_graph(kept)
        case ast.Assign(targets=[kept_in], value=ast.BinOp(right=kept) as added):
            added.right = _without_graph(kept)
        case _:
            raise AssertionError(f"no statement that keeps a tensor: {source}")
    return ast.unparse(kept_in), ast.unparse(node)


def _without_graph(value: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Attribute(value=value, attr="detach", ctx=ast.Load()), args=[], keywords=[])


def _counted(device: DeviceMemory, found: int) -> DeviceMemory:
    """Fill in, for a device whose allocator keeps no count, what the census found there."""
    if not isinstance(device.allocated, Unavailable):
        return device
    return replace(device, allocated=found, reserved=found)
