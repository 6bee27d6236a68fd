"""Letting go of what a failure pins: every local of its frames, with a traceback that still prints.

Two facts make this more than ``traceback.clear_frames``. Up to Python 3.12, a frame whose ``f_locals`` was read (as
IPython does to render) keeps the snapshot dict after ``clear``; reading ``f_locals`` again empties it. And a frame
keeps its function's closure: the inputs of a module with a forward hook live there. So the traceback is replaced by a
copy whose frames are stand-ins with the same file, name and line. Such a copy prints the same but for the caret
markers, and ``%debug`` finds no locals in it.

Besides, a backward pass on the CPU that fails leaves what it had still to do in the queue of its thread, and with it
the graph; the next backward pass there throws that away. Source: ``Engine::execute`` in torch's
``csrc/autograd/engine.cpp``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import CO_OPTIMIZED
from threading import Thread
from types import CodeType, FrameType, TracebackType
from typing import Any

from oomdoctor.objects.frames import chained, set_traceback, steps_of, traceback_of
from oomdoctor.sandbox import reserve


@contextmanager
def uncollected() -> Iterator[bool]:
    """Have the garbage collector wait; gives whether it was on.

    A snapshot or a look at a failure makes many objects, so the collector would go through all that there are, which
    takes 0.2 s of a large program, and would run finalizers of the user's in its midst. It has its turn right after.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield was_on
    finally:
        if was_on:
            gc.enable()


def release(exc: BaseException, shell: Any = None, *, collects: bool = True) -> None:
    """Free the locals of all finished frames that ``exc`` and what it is chained to went through.

    Must run outside of every ``except`` clause that handles ``exc``.

    Args:
        shell: the IPython shell, whose own copy of the traceback is replaced as well.
        collects: whether what held itself in a cycle goes now, which takes 0.2 s of a large program.
    """
    swapped = _let_go(exc)
    renderer = getattr(shell, "InteractiveTB", None)
    for holder, name in ((sys, "last_traceback"), (renderer, "tb")):
        held = getattr(holder, name, None)
        if id(held) in swapped:
            setattr(holder, name, swapped[id(held)])
    held = None
    _empty_queue()
    if collects:
        gc.collect()


def _empty_queue() -> None:
    """Run a backward pass of nothing, in whose thread one may have failed."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        from oomdoctor.retry.tensor_copies import outside_modes

        made = torch._C._VariableFunctions.ones  # the user may have put other functions into torch's own places
        with suppress(Exception), outside_modes(), torch.enable_grad():
            root = torch._C.TensorBase.clone(made((), requires_grad=True, device="cpu"))
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((root,), (made((), device="cpu"),), False, False, (), True, True)


def _let_go(exc: BaseException) -> dict[int, TracebackType]:
    """Empty the frames; return what stands in for each traceback, by the identity of that."""
    links = [(link, found) for link in chained(exc) if (found := traceback_of(link)) is not None]
    for _, traceback in links:
        _clear_frames(traceback)
    swapped: dict[int, TracebackType] = {}
    for link, traceback in links:
        if (made := _stand_in(traceback)) is not None:
            swapped[id(traceback)] = made
            set_traceback(link, made)
            _lead_on(traceback, made)
    return swapped


def _lead_on(traceback: TracebackType, made: TracebackType) -> None:
    """Let whoever holds a step of ``traceback``, as the interpreter does around ``__exit__``, hold its frame alone."""
    old: TracebackType | None = traceback
    new: TracebackType | None = made
    while old is not None and new is not None:
        following, new = old.tb_next, new.tb_next
        old.tb_next = new
        old = following


def _clear_frames(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        with suppress(RuntimeError):  # still executing
            frame.clear()
            if frame.f_code.co_flags & CO_OPTIMIZED:
                frame.f_locals  # noqa: B018 - empties the snapshot that a reader before us left (until Python 3.13)


def _stand_in(traceback: TracebackType) -> TracebackType | None:
    """Return a traceback of the same files, names and lines whose frames hold nothing, None where there is no room."""
    places = [(step.tb_frame.f_code, step.tb_lineno) for step in steps_of(traceback)]
    made: list[TracebackType] = []
    if not reserve.has_room(reserve.FOR_THREAD):  # ``start`` waits without an end for one that cannot begin
        return None
    # In a thread of its own: a frame keeps its callers, and those of this thread are the kernel's and the user's.
    worker = Thread(target=_build, args=(places, made), name="oomdoctor-traceback")
    try:
        worker.start()
    except RuntimeError:  # no memory for its stack
        return None
    worker.join()
    return made[0] if made else None


def _build(places: list[tuple[CodeType, int]], made: list[TracebackType]) -> None:
    following: TracebackType | None = None
    try:
        for code, line in reversed(places):
            names = {"__name__": "__main__", "__file__": code.co_filename}
            renamed = {"co_name": code.co_name, "co_qualname": code.co_qualname}
            frame, instruction = empty_frame(code.co_filename, line, names, **renamed)
            following = TracebackType(following, frame, instruction, line)
    except MemoryError:  # the frames are empty, and their traceback stays as it is
        return
    if following is not None:
        made.append(following)


def empty_frame(filename: str, line: int, names: dict[str, Any], **renamed: Any) -> tuple[FrameType, int]:
    """Return a frame with these globals that has raised on a line of a file, and its last instruction."""
    stub = compile("\n" * (line - 1) + "raise RuntimeError", filename, "exec").replace(**renamed)
    try:
        exec(stub, names)
    except RuntimeError as exc:
        inner = exc.__traceback__.tb_next if exc.__traceback__ is not None else None
        if inner is not None:
            return inner.tb_frame, inner.tb_lasti
    raise AssertionError("a statement that raises did not raise")
