"""Watches over the cells of one shell: sets the limit when one begins, looks while it runs, lifts it at its end.

One thread of ours looks, and only while a cell of the user's runs. It looks the oftener the less is left: each second
far from the limit, each 10 ms near it, as fast as memory could be filled in between.

Copies that the user's program forks begin without the limit and without the thread, and are the first that the kernel
ends: its workers are to go before the notebook.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomdoctor.guard import copies, exemptions
from oomdoctor.guard.black_box import Record
from oomdoctor.guard.gauge import GROUP, Gauge, Reading, resident
from oomdoctor.guard.interrupt import Interrupt
from oomdoctor.guard.refusal import LEAST, LEAST_SHARE, Refusal, ceiling_name
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.objects.frames import line_of_cell
from oomdoctor.sandbox import data_limit, reserve

FAR_S: Final = 1.0
NEAR_S: Final = 0.01
_FASTEST: Final = 4 * GIB
"""Bytes that a program may touch in a second."""
OWN_MARGIN: Final = 16 * MIB
"""What the answer to a failure leaves free: shares of copies that are written to are no mapping of theirs."""
_AHEAD: Final = 32 * MIB
"""How much earlier than it would be refused a cell is interrupted: one that grows by small objects must never be
refused the last of them. CPython 3.11 then goes in circles: to enter a handler of an exception takes an ``int``, and
where there is no memory for it the handler is entered anew. Source: ``exception_unwind`` in Python/ceval.c."""
_AGAIN: Final = 16 * MIB
"""What a cell that goes on after an interrupt may take until the next."""
_SHORT_RATIO: Final = 0.15
"""Share of the machine's memory below which a machine without a limit is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the user has set.

    Attributes:
        mode: ``auto``, ``on`` or ``off``.
        margin: bytes that are left free, 0 for a part of the limit.
    """

    mode: str
    margin: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Cell:
    """A cell that is running.

    Attributes:
        refusal: the limit that is kept for it; None where there is none.
        is_watched: whether it is interrupted where the memory is full.
        most: bytes in use up to which it is not, whatever the margin; ``raised``: interrupts that there were before.
        is_ours: whether it has raised, and what runs is the answer to it: it is refused what would end the kernel.
        apart: calls in it that are without the limit.
        ceiling: bytes that it may take beyond the resident ``start``, where this system cannot refuse.
    """

    source: str
    refusal: Refusal | None
    is_watched: bool
    most: int = 0
    raised: int = 0
    paused: int = 0
    apart: int = 0
    is_ours: bool = False
    ceiling: int | None = None
    start: int = 0


class Watch:
    """The guard of one shell.

    Attributes:
        looks: how often the thread has looked.

    Args:
        terms: tells what the user has set.
        globals_: the namespace that cells run in, by which the line of the cell is known.
    """

    def __init__(self, terms: Callable[[], Terms], globals_: dict[str, Any]) -> None:
        self.terms, self._globals = terms, globals_
        self.gauge, self.interrupt = Gauge(), Interrupt()
        self.record: Record | None = None
        self._cell: _Cell | None = None
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._ends, self.looks = False, 0
        self._is_short: tuple[float, bool] = (-FAR_S, False)
        self._asked_in: Path | None = None

    # Coming and going -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the signal; the thread begins with the first cell."""
        self.interrupt.install()
        exemptions.install(self.apart)
        data_limit.left = self._left
        copies.register(self.be_a_copy)

    def end(self) -> None:
        """Put everything back."""
        self.lift()
        self._ends = True
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self.interrupt.remove()
        exemptions.remove()
        data_limit.left = data_limit.untold
        if self.record is not None:
            self.record.remove()
            self.record = None
        self.gauge.close()
        copies.unregister(self.be_a_copy)

    @property
    def source(self) -> str | None:
        """The text of the cell that is guarded now."""
        cell = self._cell
        return None if cell is None or cell.is_ours else cell.source

    # What is told ---------------------------------------------------------------------------------------------

    def why_on(self) -> str:
        """Return why the guard is on; nothing where it is off."""
        mode = self.terms().mode
        if mode != "auto":
            return "it was switched on" if mode == "on" else ""
        if self.gauge.has_group_limit:
            return "a memory cgroup sets a limit"
        if reserve.of_process() is not None:
            return "a limit on this process is set"
        machine = self.gauge.machine()
        if machine is not None and machine.free < _SHORT_RATIO * machine.limit:
            return f"less than {_SHORT_RATIO:.0%} of the machine's memory is available"
        return ""

    def is_on(self) -> bool:
        """Return whether the guard is on; in ``auto`` it is asked once a second at most."""
        mode = self.terms().mode
        if mode != "auto":
            return mode == "on"
        asked, answer = self._is_short
        if (now := time.monotonic()) - asked > FAR_S or self.gauge.own_group != self._asked_in:
            self._asked_in = self.gauge.own_group
            self._is_short = now, (answer := bool(self.why_on()))
        return answer

    def margin(self, free: int | None = None) -> int:
        """Return how many bytes of what is free no cell can have; 0 where the guard is off.

        Args:
            free: what another limit leaves, such as one that the user has set on the process: as far as that is less
                than what the guard looks at leaves, it has no part in the margin.
        """
        reading = self.gauge.read() if self.is_on() else None
        if reading is None:
            return 0
        beyond = 0 if free is None else max(reading.free - free, 0)
        return max(reading.margin(self.terms().margin) + _AHEAD - beyond, 0)

    def _left(self) -> int | None:
        """Return how many bytes a copy of this process may take of what a group leaves; None where none has a limit."""
        reading = self.gauge.read()
        return None if reading is None or reading.name != GROUP else max(reading.free, 0)

    @property
    def refuses(self) -> bool:
        """Whether what is asked for can be refused here, and the cell not only be interrupted.

        Jittor ends the process where it is refused memory: it writes to what it did not get. Source:
        ``AlignedAllocator::alloc`` in python/jittor/src/mem/allocator/aligned_allocator.cc.
        """
        return "jittor" not in sys.modules and data_limit.users() is not None and self.gauge.process() is not None

    # Around each cell -----------------------------------------------------------------------------------------

    def arm(self, number: int, source: str, ceiling: int | None = None) -> bool:
        """Guard the cell that begins, until ``lift``; return whether it is: beside another one it is not.

        Args:
            ceiling: bytes that it may map at most, None for no limit of its own.
        """
        if self._cell is not None and not self._cell.is_ours:  # it awaits meanwhile: its limit holds for both
            return False
        data_limit.ceiling = None
        self.gauge.refresh()
        is_on = self.is_on()
        reading = self.gauge.read() if is_on or self.record is not None else None
        cell = _Cell(source=source, refusal=None, is_watched=is_on, raised=self.interrupt.raised)
        if reading is not None:
            cell.most = reading.used + max(min(LEAST // 2, reading.free // (2 * LEAST_SHARE)), 0)
        if self.refuses and (is_on or ceiling is not None):
            cell.refusal = Refusal(self.gauge, ceiling)
            self._keep(cell, reading if is_on else None, begins=True)
        elif ceiling is not None:
            cell.ceiling, cell.start = ceiling, resident()
        if self.record is not None:
            self.record.begin(number, source)
            self._note(cell, reading, None)
        exemptions.install_late()
        self.interrupt.cancel()
        self._cell = cell
        self._begin_thread()
        self._wake.set()
        return True

    def _keep(self, cell: _Cell, reading: Reading | None, *, begins: bool = False) -> None:
        if cell.refusal is not None and "jittor" in sys.modules:  # the cell has imported it
            cell.refusal = None
            data_limit.lift()
        if cell.refusal is None or cell.apart:
            return
        free, margin = (None, 0) if reading is None else (reading.free, reading.margin(self.terms().margin))
        margin = min(OWN_MARGIN, max(free or 0, 0) // LEAST_SHARE) if cell.is_ours else margin
        (cell.refusal.begin if begins else cell.refusal.keep)(free, margin)

    def raised(self) -> None:
        """Let go of the cell, which has raised: what answers it has all the room that there really is.

        It is refused what would have the kernel end the process: then its look fails, and the message is what is left.
        """
        cell = self._cell
        if cell is None or cell.is_ours:
            return
        if cell.refusal is not None:
            cell.refusal.note()
        self.lift()
        if cell.is_watched and cell.refusal is not None:
            self._begin_answer(cell.source)

    def _begin_answer(self, source: str) -> None:
        if (reading := self.gauge.read()) is not None:
            answer = _Cell(source=source, refusal=Refusal(self.gauge, None), is_watched=True, is_ours=True)
            self._keep(answer, reading, begins=True)
            self._cell = answer
            self._wake.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer in the body what has failed in no cell that is guarded now, as ``raised`` has it."""
        if self._cell is not None or not self.refuses or not self.is_on():
            yield
            return
        self._begin_answer("")
        try:
            yield
        finally:
            self.settle()

    def settle(self) -> None:
        """Forget the last cell: its failure was answered."""
        self.lift()
        data_limit.forget()

    def end_cell(self) -> None:
        """Let go of the cell, which has ended; an answer to it goes on."""
        if self._cell is not None and not self._cell.is_ours:
            self.lift()

    def lift(self) -> None:
        """Put the user's own limit back, and look no more."""
        cell, self._cell = self._cell, None
        self.interrupt.cancel()
        data_limit.lift()
        if cell is not None:
            with self._lock:  # the thread may be about to set it
                data_limit.lift()
            if self.record is not None:
                self.record.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the body without limit and interrupts, while the cell goes on afterwards."""
        cell = self._cell
        if cell is None or cell.is_ours:
            yield
            return
        with self._lock:
            cell.paused += 1
            data_limit.lift()
        try:
            yield
        finally:
            with self._lock:
                cell.paused -= 1
            self._wake.set()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run the body, which maps a file or starts a program, without the limit; it may outlive the cell."""
        cell = self._cell
        if cell is None or cell.refusal is None:
            yield
            return
        with ExitStack() as unlimited:
            with self._lock:
                cell.apart += 1
                unlimited.enter_context(cell.refusal.apart())
            try:
                yield
            finally:
                with self._lock:
                    unlimited.close()
                    cell.apart -= 1
                    if self._cell is cell:
                        self._keep(cell, self.gauge.read() if cell.is_watched else None)

    # The thread -----------------------------------------------------------------------------------------------

    def _begin_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            if not reserve.has_room(reserve.FOR_THREAD):
                return
            self._thread = threading.Thread(target=self._run, name="oomdoctor-guard", daemon=True)
            with suppress(RuntimeError):
                self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            try:
                self._wake.wait(self._look())
                self._wake.clear()
            except Exception:  # noqa: BLE001 - border: memory is full, or a file has gone; the next look may do
                time.sleep(NEAR_S)

    def _look(self) -> float | None:
        """Look once; return the seconds until the next look, None for when a cell begins."""
        cell = self._cell
        if cell is None:
            return None
        reading = self.gauge.read()
        self.looks += 1
        with self._lock:
            if self._cell is not cell or cell.paused:
                return FAR_S
            self._keep(cell, reading if cell.is_watched else None)
        line = None if cell.is_ours else line_of_cell(threading.main_thread().ident, self._globals)
        self._note(cell, reading, line)
        if cell.is_ours:
            return NEAR_S if reading is None else _pause_s(reading.free - OWN_MARGIN)
        return self._interrupt(cell, reading)

    def _interrupt(self, cell: _Cell, reading: Reading | None) -> float:
        """Interrupt the cell where it has to be; return the seconds until the next look."""
        if self.interrupt.raised != cell.raised:  # it goes on: it has caught the error, or cleans up
            cell.raised, cell.start = self.interrupt.raised, cell.start + _AGAIN
            cell.most = (reading.used if reading is not None else 0) + _AGAIN
        if cell.ceiling is not None and (grown := resident() - cell.start) > cell.ceiling:
            name = ceiling_name(cell.ceiling)
            self.interrupt.send(Reading(limit=cell.ceiling, used=grown, usage=grown, swap=0, name=name))
            return NEAR_S
        if reading is None or not (cell.is_watched or self.record):
            return FAR_S if cell.ceiling is None else NEAR_S
        left = reading.free - reading.margin(self.terms().margin) - _AHEAD
        if cell.is_watched and left < 0 and reading.used > cell.most:
            self.interrupt.send(reading)
            return NEAR_S
        self.interrupt.cancel()
        return NEAR_S if cell.ceiling is not None else _pause_s(left)

    def _note(self, cell: _Cell, reading: Reading | None, line: int | None) -> None:
        """Note the moment in the record, where there is one; what has failed in no cell is not told of."""
        if self.record is None or not cell.source:
            return
        process, lines = self.gauge.process(), cell.source.split("\n")
        self.record.note(
            kills=self.gauge.kills(),
            line=line or 0,
            text=lines[line - 1] if line is not None and 0 < line <= len(lines) else "",
            rss=0 if process is None else process[1],
            used=0 if reading is None else reading.used,
            limit=0 if reading is None else reading.limit,
        )

    # In forked copies -----------------------------------------------------------------------------------------

    def be_a_copy(self) -> bool:
        """Leave a forked copy unguarded; return whether a cell was guarded, so that the kernel is to take it first."""
        was_guarded = self._cell is not None and self._cell.is_watched and not self._cell.is_ours
        self._cell, self.record, self._thread = None, None, None
        self._lock, self._wake = threading.RLock(), threading.Event()
        self.interrupt.cancel()
        data_limit.lift_in_copy()
        return was_guarded


def _pause_s(left: int) -> float:
    """Return the seconds in which no program can fill what is left."""
    return min(max(left / _FASTEST, NEAR_S), FAR_S)
