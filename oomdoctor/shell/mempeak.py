"""``%%mempeak``: how far the memory went up while a cell ran, and at which of its lines it was highest.

The cell runs as it is, in its own name: it can await, shows its last value and keeps its line numbers. The peak of a
device is the one that its allocator keeps, exact to the byte. The host's is the kernel's high-water mark where the cell
has raised that, else the highest sample. Lines are sampled by a thread, which looks at the memory and at the line that
the cell stands at: no tracing, and nothing at each operation.

Limits: what comes and goes between two samples has no line. A peak of the resident set below an earlier one, and that
of MPS, is as good as the samples. What runs in threads and processes that the cell starts counts for the line that the
cell stands at.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from oomdoctor import pipeline
from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.model.memory import Measured
from oomdoctor.model.session import Accelerator
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.frames import line_of_cell
from oomdoctor.sandbox import reserve
from oomdoctor.shell.error_boundary import quietly
from oomdoctor.shell.outputs import HELP, one_line

USAGE: Final = """Run the cell below, and print the peak and the increment of each memory, and the line of the peak.

    %%mempeak

    %mempeak STATEMENT     the same of one statement
    %mempeak --help        this text

The increment is the peak less what was in use before. Devices: what their allocator has given to tensors. `host`: the
resident set of this process. The line was sampled, every 2 ms; so was a peak with a `≈` before it. A cell that fails
prints its traceback and no numbers.

The allocator's peak is reset when the cell begins: `torch.cuda.max_memory_allocated()` tells the peak since then, as
after `torch.cuda.reset_peak_memory_stats()`. Where it told more before, that is printed as the earlier peak.
"""

_EVERY_S: Final = 0.002
_NEAR: Final = 0.9
"""Share of the increment that a sample has to have seen for its line to be told as that of the peak."""
_HEAD: Final = re.compile(r"((?:[ \t]*\n)*)%%mempeak[ \t]*(?:#[^\n]*)?\n(?!\s*(?:%%|\Z))")
"""What stands above a cell that is measured; one that begins with another cell magic is for IPython to run."""


def measured(source: str) -> str | None:
    """Return a cell that ``%%mempeak`` stands above as it runs, line for line; None where it stands above none."""
    head = _HEAD.match(source)
    if head is None:
        return None
    return below(head, "mempeak")


def below(head: re.Match[str], magic: str) -> str:
    """Return a cell below a magic that ``head`` has matched, line for line; its group is the empty lines above."""
    body = head.string[head.end() :]
    indent = re.match(r"(?:[ \t]*\n)*([ \t]*)", body)
    return "#\n" * head[1].count("\n") + f"{indent[1] if indent else ''}# %%{magic}\n{body}"


@dataclass(slots=True)
class _Peak:
    """The peak of one memory, in bytes.

    Attributes:
        start: in use before; ``mark``: the high-water mark that was kept then, and ``earlier`` before it was reset.
        highest: of the samples, and ``line`` the cell stood at then; ``kept``: of the high-water marks since.
    """

    start: int
    mark: int
    highest: int
    earlier: int = 0
    line: int | None = None
    kept: int = 0

    def sentence(self, name: str, *, has_lines: bool) -> str:
        """Return ``cuda:0: peak 1.20 GiB, increment 310 MiB (line 7, sampled)``."""
        # What was begun in the cell had no mark before it.
        is_exact = self.kept > self.mark or self.mark == self.start
        peak = max(self.start, self.highest, self.kept if is_exact else 0)
        about = "" if is_exact else "≈ "
        grown = peak - self.start
        line = ""
        if has_lines and grown:
            was_seen = self.line is not None and self.highest - self.start >= _NEAR * grown
            line = f" (line {self.line}, sampled)" if was_seen else " (between two samples)"
        was_reset = self.mark == self.start
        earlier = f"; earlier peak {format_size(self.earlier)}" if was_reset and self.earlier > peak else ""
        return f"{name}: peak {about}{format_size(peak)}, increment {about}{format_size(grown)}{line}{earlier}"


class PeakWatch:
    """One measurement: a context around what is measured, on the thread that it runs on.

    ``copies`` tells how much host memory copies of ours take; ``has_lines``: whether what runs is a cell.
    """

    _open: Final[list[PeakWatch]] = []
    """Those that are within one another: an inner one resets the marks of the outer ones."""

    def __init__(self, shell: Any, copies: Callable[[], int] = lambda: 0, *, has_lines: bool = True) -> None:
        self._globals, self._copies, self._has_lines = shell.user_global_ns, copies, has_lines
        self._peaks: dict[tuple[str, int], _Peak] = {}
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._runs_on, self._has_begun = 0, False
        self._line: int | None = None

    def __enter__(self) -> PeakWatch:
        self._has_begun = quietly(self._begin) or False
        return self

    def _begin(self) -> bool:
        for outer in self._open:
            outer._note_marks()
        for memory in pipeline.memories():
            usage, earlier = memory.usage(), memory.peak()
            if memory.name != "cpu":  # the host's mark is the one that ``ru_maxrss`` tells, and stays
                memory.reset_peak()
            start = self._own(memory, usage.used)
            mark = self._own(memory, memory.peak(), sys.maxsize)  # one that is not kept is never passed
            self._peaks[usage.key] = _Peak(start=start, mark=mark, highest=start, earlier=self._own(memory, earlier))
        self._open.append(self)
        self._runs_on = threading.get_ident()
        if reserve.has_room(reserve.FOR_THREAD):
            self._thread = threading.Thread(target=self._sample, name="oomdoctor-mempeak", daemon=True)
            with suppress(RuntimeError):  # no thread can be had: what is exact is told all the same
                self._thread.start()
        return True

    def __exit__(self, *raised: Any) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self in self._open:
            self._open.remove(self)
            quietly(self._note_marks)

    def tell(self) -> None:
        """Print a line for each memory, the host last."""
        if not self._has_begun:
            print(say("%%mempeak has no numbers: what was in use before the cell could not be read"))
            return
        told = sorted(self._peaks.items(), key=lambda one: one[0][0] == "host")
        for (name, _), peak in told:
            print(say(peak.sentence(name, has_lines=self._has_lines)))

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY_S):
            quietly(self._look)

    def _look(self) -> None:
        """Take a sample: the line first, as the memory is of that line or of a later one."""
        line = self._line_of_cell()
        for memory in pipeline.memories(beside=True):
            used, peak = self._reading(memory)
            if used > peak.highest:
                peak.highest, peak.line = used, line

    def _note_marks(self) -> None:
        for memory in pipeline.memories():
            _, peak = self._reading(memory)
            peak.kept = max(peak.kept, self._own(memory, memory.peak()))
            if memory.name == "cpu" and self._copies():  # the mark may be of a moment before they were made
                peak.mark = sys.maxsize

    def _reading(self, memory: Accelerator) -> tuple[int, _Peak]:
        """Return what is in use now and the peak so far; a memory that was begun in the cell had nothing before."""
        usage = memory.usage()
        used = self._own(memory, usage.used)
        if usage.key not in self._peaks:
            start = used if usage.switched_on else 0  # a simulated device begins with the tensors that are alive
            self._peaks[usage.key] = _Peak(start=start, mark=start, highest=start)
        return used, self._peaks[usage.key]

    def _own(self, memory: Accelerator, measured: Measured, unknown: int = 0) -> int:
        """Return what was measured without the copies, which are the host's; ``unknown`` where it was not."""
        if not isinstance(measured, int):
            return unknown
        return measured - self._copies() if memory.name == "cpu" else measured

    def _line_of_cell(self) -> int | None:
        """Return the line that the cell stands at; where it awaits, the one that was seen last."""
        found = line_of_cell(self._runs_on, self._globals)
        self._line = self._line if found is None else found
        return self._line


def source_of(line: str, cell: str | None) -> str | None:
    """Return what the magic is to run; None where it has told its usage, a ``UsageError`` where it cannot."""
    if line.strip() in HELP:
        print(say(USAGE), end="")
        return None
    if cell is None and not line.strip():
        raise UsageError("%mempeak takes a statement on its line; above a cell, write %%mempeak")
    if cell is not None and line.strip():
        raise UsageError(f"%%mempeak takes nothing but --help on its line, not '{one_line(line)}'")
    if cell is not None and not cell.strip():
        raise UsageError("%%mempeak measures the cell below its line, and there is nothing below it")
    return line if cell is None else cell


def run(shell: Any, source: str, number: int) -> None:
    """Run a statement, or a cell within another cell magic, and print its peaks; a failure is the caller's."""
    text = shell.transform_cell(source)
    code = shell.compile(text, shell.compile.cache(text, number), "exec")
    with PeakWatch(shell, has_lines=False) as watch:
        exec(code, shell.user_ns)  # as ``%time`` does
    watch.tell()
