"""Watches over the cells of one shell: sets the limit when one begins, and looks while it runs.

What a cell has left behind may run when no cell does: tasks, threads, and callbacks after a cell. So the limit stands
between cells as well. While oomdoctor itself works, beside threads of the user's, all but the last of what is really
free is its own.

One thread of ours looks. It looks the oftener the less is left: each second far from the limit, each 10 ms near it, as
fast as memory could be filled in between. Between cells these are seconds of the process's CPU time, so that nothing is
looked at while nothing runs.

Copies that the user's program forks begin without the limit and without the thread, and are the first that the kernel
ends: its workers are to go before the notebook.
"""

from __future__ import annotations

import ctypes
import signal
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
_CPU_CLOCK: Final = 2
"""``CLOCK_PROCESS_CPUTIME_ID``. Source: include/uapi/linux/time.h."""
_IDLE_S: Final = 0.1
"""The longest time of the CPU between two looks where no cell runs; without that clock the shortest time."""
_FASTEST: Final = 4 * GIB
"""Bytes that a program may touch in a second."""
OWN_MARGIN: Final = 16 * MIB
"""What oomdoctor leaves free at its own work: shares of copies that are written to are no mapping of theirs. What runs
between cells leaves as much: the kernel itself works there, and a small request that is refused may end it."""
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
    """A cell that is running, or what runs until the next one.

    Attributes:
        source: its text, None where no cell runs.
        refusal: the limit that is kept for it; None where there is none.
        is_watched: whether it is interrupted where the memory is full.
        most: bytes in use up to which it is not, whatever the margin; ``again``: from which who was is so again.
        raised: interrupts that there were before.
        ours: works of oomdoctor's own that are under way in it: they are refused what would end the kernel.
        margin: bytes that they leave free, and what runs when no cell does, 0 before the first.
        apart: calls in it that are without the limit.
        ceiling: bytes that it may take beyond the resident ``start``, where this system cannot refuse.
    """

    source: str | None
    refusal: Refusal | None
    is_watched: bool
    most: int = 0
    again: int = 0
    raised: int = 0
    ours: int = 0
    margin: int = 0
    apart: int = 0
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
        self.gauge, self.interrupt = Gauge(), Interrupt(globals_)
        self.record: Record | None = None
        self._cell: _Cell | None = None
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._clock = getattr(ctypes.CDLL(None), "clock_nanosleep", None) if sys.platform == "linux" else None
        self._ends, self.looks, self._sleeps = False, 0, False
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
        self._awake()
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
        return None if cell is None or cell.ours else cell.source

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
        """Guard the cell that begins, until ``end_cell``; return whether it is: beside another one it is not.

        Args:
            ceiling: bytes that it may map at most, None for no limit of its own.
        """
        if self.source is not None:  # it awaits meanwhile: its limit holds for both
            return False
        data_limit.ceiling = None
        self.gauge.refresh()
        is_on = self.is_on()
        reading = self.gauge.read() if is_on or self.record is not None else None
        cell = _Cell(source=source, refusal=None, is_watched=is_on)
        if self.refuses and (is_on or ceiling is not None):
            cell.refusal = Refusal(self.gauge, ceiling)
        elif ceiling is not None:
            cell.ceiling, cell.start = ceiling, resident()
        if self.record is not None:
            self.record.begin(number, source)
            self._note(cell, reading, None)
        exemptions.install_late()
        self._begin(cell, reading)
        return True

    def _begin(self, cell: _Cell, reading: Reading | None) -> None:
        """Guard a cell, or what follows it, from now on."""
        if reading is not None:
            cell.most = reading.used + max(min(LEAST // 2, reading.free // (2 * LEAST_SHARE)), 0)
        cell.raised = self.interrupt.raised
        self._begin_thread()
        with self._lock:
            self.interrupt.begin_anew()
            self._cell = cell
            self._keep(cell, reading, begins=True)
        self._awake()

    def _keep(self, cell: _Cell, reading: Reading | None, *, begins: bool = False) -> None:
        if cell.refusal is None or "jittor" in sys.modules:  # the cell has imported it
            cell.refusal = None
            data_limit.lift()
            return
        if cell.apart:
            return
        free, margin = None, 0
        if cell.is_watched and reading is not None:
            free, margin = reading.free, reading.margin(self.terms().margin)
        if cell.ours or cell.source is None:  # never less than before: a share of the rest would leave ever less
            margin = cell.margin = max(cell.margin, min(OWN_MARGIN, (free or 0) // LEAST_SHARE))
        (cell.refusal.begin if begins else cell.refusal.keep)(free, margin, has_ceiling=not cell.ours)

    def _renew(self, cell: _Cell, *, begins: bool = False) -> None:
        """Set the limit by what is free now; where there is no room to ask, the next look does."""
        with suppress(MemoryError, OSError, ValueError):
            if self._cell is cell:
                self._keep(cell, self.gauge.read() if cell.is_watched else None, begins=begins)

    def raised(self) -> None:
        """Let go of the cell, which has raised: what answers it has all the room that there really is.

        It is refused what would have the kernel end the process: then its look fails, and the message is what is left.
        So are the threads that the cell has left.
        """
        if self._cell is not None and self.source is not None:
            self._work(self._cell)

    def end_cell(self) -> None:
        """Let go of the cell, which has ended; an answer to it goes on."""
        if self._cell is not None and self.source is not None:
            self._cell.ours = 1

    def _work(self, cell: _Cell) -> None:
        with self._lock:
            cell.ours += 1
            if cell.ours == 1:
                if cell.refusal is not None:
                    cell.refusal.note()
                self._renew(cell, begins=True)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Run a body of oomdoctor's own with the room that there really is; what was guarded is guarded afterwards."""
        cell = self._cell
        if cell is None:
            yield
            return
        self._work(cell)
        try:
            yield
        finally:
            with self._lock:
                cell.ours -= 1
                self._renew(cell)

    def settle(self, *, has_others: bool = False) -> None:
        """Forget the last cell, whose failure was answered, and guard what runs until the next, or one that awaits."""
        data_limit.forget()
        if self.record is not None and not has_others:
            self.record.end()
        if not self.is_on():
            self.lift()
            return
        before = self._cell
        refusal = None if before is None else before.refusal
        if refusal is None or refusal.has_ceiling:
            refusal = Refusal(self.gauge, None) if self.refuses else None
        source = before.source if before is not None and has_others else None
        self._begin(_Cell(source=source, refusal=refusal, is_watched=True), self.gauge.read())

    def lift(self) -> None:
        """Put the user's own limit back, and look no more."""
        cell, self._cell = self._cell, None
        self.interrupt.begin_anew()
        data_limit.lift()
        if cell is not None:
            with self._lock:  # the thread may be about to set it
                data_limit.lift()
            if self.record is not None:
                self.record.end()

    @contextmanager
    def apart(self, is_file: bool) -> Iterator[None]:
        """Run the body, which maps a file or starts something, without the limit; it may outlive the cell."""
        cell = self._cell
        if cell is None or cell.refusal is None:
            yield
            return
        with ExitStack() as unlimited:
            with self._lock:
                cell.apart += 1
                unlimited.enter_context(cell.refusal.apart(is_file))
            try:
                yield
            finally:
                with self._lock:
                    unlimited.close()
                    cell.apart -= 1
                    self._renew(cell)

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
            if self._cell is not cell:
                return FAR_S
            self._keep(cell, reading)
        is_running = cell.source is not None and not cell.ours
        self._note(cell, reading, line_of_cell(threading.main_thread().ident, self._globals) if is_running else None)
        pause_s = self._interrupt(cell, reading)
        return pause_s if cell.source is not None else self._sleep(pause_s)

    def _sleep(self, cpu_s: float) -> float:
        """Sleep until the process has taken so much CPU time, or something begins; return the seconds still to wait."""
        if self._clock is None or self.interrupt.own_signal() is None:
            return max(cpu_s, _IDLE_S)
        until = (ctypes.c_long * 2)(0, int(min(cpu_s, _IDLE_S) * 1e9))
        self._sleeps = True
        if not self._wake.is_set():
            self._clock(_CPU_CLOCK, 0, until, None)
        self._sleeps = False
        return 0.0

    def _awake(self) -> None:
        """Have the thread look now. A signal ends its sleep."""
        self._wake.set()
        if self._sleeps and self._thread is not None and (number := self.interrupt.own_signal()) is not None:
            signal.pthread_kill(self._thread.ident or 0, number)

    def _interrupt(self, cell: _Cell, reading: Reading | None) -> float:
        """Interrupt what fills memory where that has to be; return the seconds until the next look."""
        used = 0 if reading is None else reading.used
        if self.interrupt.raised != cell.raised:  # it goes on: it has caught the error, or cleans up
            cell.raised, cell.start, cell.again = self.interrupt.raised, cell.start + _AGAIN, used + _AGAIN
        if cell.ceiling is not None and not cell.ours and (grown := resident() - cell.start) > cell.ceiling:
            name = ceiling_name(cell.ceiling)
            self.interrupt.begin_anew()
            self.interrupt.send(Reading(limit=cell.ceiling, used=grown, usage=grown, swap=0, name=name))
            return NEAR_S
        if reading is None or not (cell.is_watched or self.record):
            return FAR_S if cell.ceiling is None else NEAR_S
        left = reading.free - reading.margin(self.terms().margin) - _AHEAD
        if cell.is_watched and left < 0 and used > cell.most:
            if used > cell.again > 0:
                self.interrupt.begin_anew()
                cell.again = used + _AGAIN
            self.interrupt.send(reading)
            return NEAR_S
        self.interrupt.begin_anew()
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
        was_guarded = self._cell is not None and self._cell.is_watched and not self._cell.ours
        self._cell, self.record, self._thread = None, None, None
        self._lock, self._wake, self._sleeps = threading.RLock(), threading.Event(), False
        self.interrupt.begin_anew()
        data_limit.lift_in_copy()
        return was_guarded


def _pause_s(left: int) -> float:
    """Return the seconds in which no program can fill what is left."""
    return min(max(left / _FASTEST, NEAR_S), FAR_S)
