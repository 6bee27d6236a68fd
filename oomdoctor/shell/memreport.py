"""``%memreport`` and ``oomdoctor.report``: what holds memory now, and what has grown since the last report.

``--live`` is an output that tells what is in use, again and again while later cells run. A thread reads the counters of
the memories in use and sends the output anew where they have changed. It loads nothing, draws no random number, and
does not go through the display of the shell, which a cell may be capturing. While an operation holds the interpreter's
lock there is nothing new.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

from oomdoctor import pipeline
from oomdoctor.errors import NotAvailable, UsageError
from oomdoctor.language import say
from oomdoctor.model import jsonable
from oomdoctor.model.memory import CellGrowth, Usage
from oomdoctor.model.session import Cells
from oomdoctor.objects.frames import locals_of
from oomdoctor.sandbox import reserve
from oomdoctor.shell import ATTRIBUTE
from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.cells import filenames as filenames_of
from oomdoctor.shell.error_boundary import quietly
from oomdoctor.shell.outputs import FLAG, HELP, JSON, PRINTED, Options, number, one_line, path, put, seconds

if TYPE_CHECKING:
    from oomdoctor.views.displayed import Report
    from oomdoctor.views.document import Timeline
    from oomdoctor.views.memory_report import GrowthRows


USAGE: Final = """Show what holds memory now, on each device and in the host's memory.

    %memreport [--device D] [--top N] [--diff] [--json [PATH]] [--html PATH] [--snapshot PATH]
    %memreport --cells [--json [PATH]]
    %memreport --live [SECONDS|off]
    %memreport --ranks [--json [PATH]]

    --device D       one device alone, and the host's summary: cuda, cuda:1, cpu
    --top N          the N largest holders; above 10 also single weights, every limit and the page cache
    --diff           what grew since the last report, by role and by holder
    --json [PATH]    the evidence as JSON, printed where no path is given, and for -
    --html PATH      a page that opens offline
    --cells          what each of the last 100 cells has left on each device and the host, the largest growth marked
    --live [SECONDS] an output that tells what is in use, every second or so many, while cells run; off ends it
    --ranks          what each rank of a job holds; to be run on all of them, as by `%%px`
    --help           this text
    --snapshot PATH  CUDA: torch's snapshot of the allocator, for https://docs.pytorch.org/memory_viz
"""

_FILE: Final = {"type": path}
_OPTIONS: Final = Options(
    "%memreport",
    device={},
    top={"type": number},
    diff=FLAG,
    json=JSON,
    html=_FILE,
    snapshot=_FILE,
    cells=FLAG,
    ranks=FLAG,
    live={"nargs": "?", "const": 1.0, "type": seconds},
)
_MOST_CELLS: Final = 100

Reading: TypeAlias = dict[tuple[str, int], int]
"""What is in use of each memory at one moment, in bytes."""


class MemReport:
    """The magic in one shell. It keeps plain values alone: no tensor lives longer because it was reported.

    ``number`` is that of the cell that is running, or ran last.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._last: tuple[int, Report] | None = None
        self.number: int = shell.execution_count
        self._cells: deque[tuple[CellGrowth, Reading]] = deque(maxlen=_MOST_CELLS)
        self._live: LiveReport | None = None

    def reading(self) -> Reading:
        """Return what is in use now. Without torch this takes some 20 us; no device is initialised."""
        usages = [memory.usage() for memory in pipeline.memories(sizes=False)]
        return {usage.key: usage.used for usage in usages if isinstance(usage.used, int)}

    def note(self, before: Reading | None, copies: int, number: int) -> None:
        """Note what the cell that has run has left since the reading before, without the bytes of our own copies.

        ``number`` is its own; of a retry that was typed in another cell, that of the cell that was run again.
        """
        if before is None:
            return
        grown, after = {}, self.reading()
        # What the first run of a cell has left is taken back by the one that follows it.
        first = self.forget(number) if number != self.number else {}
        for key, used in after.items():
            name, switched_on = key
            if not switched_on or key in before:  # a simulated device begins with the tensors that are alive
                own = copies if name == "host" else 0
                grown[name] = first.get(name, 0) + used - before.get(key, 0) - own
        if self._cells and self._cells[-1][0].number > self.number:  # the history was reset
            self._cells.clear()
        self._cells.append((CellGrowth(number=number, grown=grown), after))

    def forget(self, number: int) -> Mapping[str, int]:
        """Forget the runs of a cell that were taken back; return what the last of them had left."""
        runs = [one for one in self._cells if one[0].number == number]
        for one in runs:
            self._cells.remove(one)
        return runs[-1][0].grown if runs else {}

    def end_live(self) -> None:
        """End the output that is refreshed, where there is one."""
        live, self._live = self._live, None
        if live is not None:
            live.end()

    def answer(self, words: list[str]) -> None:
        """Report as ``words`` ask for; nothing is written where they ask for what is not there, a ``UsageError``."""
        from IPython.display import display

        from oomdoctor.views import html, report_bundle
        from oomdoctor.views.holders import TOP

        if words[:1] == ["help"] or HELP.intersection(words):
            print(say(USAGE), end="")
            return
        options = _OPTIONS.parse_args(words)
        _check_alone(options)
        if options.live is not None:
            self._switch_live(options.live)
            return
        if options.cells:
            self._tell_cells(options.json)
            return
        if options.ranks:
            self._tell_ranks(options)
            return
        number = self.number
        whole = self._collect(number, options)
        report = whole if options.device is None else whole.of(options.device)
        earlier, self._last = self._last, (number, whole)
        growth = self._growth(earlier, report, options.top or TOP) if options.diff else None
        survey = report.survey(top=options.top or TOP, growth=growth, history=self._history(report))
        if options.json is None and options.html is None and options.snapshot is None:
            display(report_bundle(survey), raw=True)
            return
        page = html.page("Memory report", survey) if options.html is not None else ""
        found = report.to_dict()
        if earlier is not None and options.diff:
            found["growth"] = report.diff(earlier[1]).to_dict()
        _write(options, page, json.dumps(found, indent=1))

    def _switch_live(self, every_s: float) -> None:
        """Begin an output that is refreshed, in the place of the one before; 0 ends that one alone."""
        live = LiveReport(self._shell, every_s) if every_s else None
        if live is None and self._live is None:
            raise UsageError("--live off ends an output that is refreshed, and there is none")
        self.end_live()
        self._live = live

    def _tell_cells(self, path: Path | None) -> None:
        from IPython.display import display

        from oomdoctor.views import report_bundle
        from oomdoctor.views.memory_report import cells_table

        if path is None:
            display(report_bundle(cells_table([cell for cell, _ in self._cells])), raw=True)
            return
        found = {"schema": jsonable.SCHEMA, "cells": [jsonable.plain(cell) for cell, _ in self._cells]}
        put(json.dumps(found, indent=1), path)
        if path != PRINTED:
            print(say(f"{one_line(path)}: the growth of each cell as JSON"))

    def _tell_ranks(self, options: Any) -> None:
        from oomdoctor.ranks.gather import gather, imbalance
        from oomdoctor.shell.job import rank_lines

        job = getattr(getattr(self._shell, ATTRIBUTE, None), "job", None)
        if job is None:
            raise UsageError("--ranks tells of a job of several ranks, and this process has no part in one")
        own = self._collect(self.number, options).to_dict()
        reports = gather(job.circle, own)
        if options.json is None:
            print(say("\n".join(rank_lines(reports))))
            return
        found = {"schema": jsonable.SCHEMA, "imbalance": imbalance(reports), "ranks": jsonable.plain(reports)}
        put(json.dumps(found, indent=1), options.json)
        if options.json != PRINTED:
            print(say(f"{one_line(options.json)}: the reports of all ranks as JSON"))

    def _collect(self, number: int, options: Any) -> Report:
        """Return the report of all devices. Modules that are loaded for it may run operations while they are."""
        # Past the modes of torch, where the program has loaded it.
        storages = "oomdoctor.objects.storages"
        with import_module(storages).unobserved() if "torch" in sys.modules else nullcontext():
            if options.snapshot is not None:
                pipeline.check_snapshot()
            cells = cells_until(self._shell, number, "")
            return pipeline.report(self._shell.user_ns, cells, filenames_of(self._shell, number))

    def _history(self, report: Report) -> Timeline | None:
        """Return how much of the main memory was in use at the ends of cells, and is now."""
        from oomdoctor.views.document import Timeline
        from oomdoctor.views.labels import device_name

        device, now = report.evidence.device, self.reading()
        names = {"host"} if device.name == "cpu" else {device.name, device_name(device)}
        key = next((key for key in now if key[0] in names), None)
        if key is None:
            return None
        ends = [(used[key], cell.number) for cell, used in self._cells if key in used and cell.number < self.number]
        return Timeline.of_cells(
            [*ends, (now[key], self.number)], device.total if isinstance(device.total, int) else None
        )

    def _growth(self, earlier: tuple[int, Report] | None, report: Report, top: int) -> GrowthRows:
        from oomdoctor.views.memory_report import NOTHING_YET, growth_rows

        if earlier is None:
            return NOTHING_YET
        number, before = earlier
        return growth_rows(before.whole, report.whole, f"the report of In[{number}]", top=top, only=report.only)


def _check_alone(options: Any) -> None:
    """Refuse what ``--cells``, ``--live`` and ``--ranks`` do not go with."""
    given = {f"--{name}" for name, value in vars(options).items() if value is not None and value is not False}
    for option, beside in (("--live", set()), ("--cells", {"--json"}), ("--ranks", {"--json"})):
        if option in given and (others := sorted(given - beside - {option})):
            takes = f"{', '.join(beside)} alone" if beside else "no other option"
            raise UsageError(f"{option} takes {takes} beside it, not {', '.join(others)}")


def _write(options: Any, page: str, shape: str) -> None:
    said = []
    if options.snapshot is not None:
        said.append(f"{one_line(options.snapshot)}: {pipeline.snapshot(options.snapshot)}")
    if options.html is not None:
        put(page, options.html)
        said.append(f"{one_line(options.html)}: a page that opens offline")
    if options.json is not None:
        put(shape, options.json)
        if options.json != PRINTED:
            said.append(f"{one_line(options.json)}: the evidence as JSON")
    if said:  # beside the JSON, which stays fit to be parsed
        print(say("\n".join(said)), file=sys.stderr if options.json == PRINTED else sys.stdout)


def report(
    namespace: dict[str, Any] | None = None, cells: Cells | None = None, filenames: Mapping[str, int] | None = None
) -> Report:
    """Tell what holds memory now, by role and by name: the device first, where one is in use.

    Args:
        namespace: where to look for names; what the caller sees by default, its locals and its globals.
        cells: that were run; those of the notebook by default, where the caller is a cell of it.
        filenames: number of the cell by the file name of its code; as the notebook has it by default.
    """
    shell = _notebook()
    if namespace is None:
        caller = sys._getframe(1)
        if cells is None and shell is not None and caller.f_globals is shell.user_ns:
            cells = cells_until(shell, shell.execution_count, "")
        namespace = {**caller.f_globals, **locals_of(caller)}
        del caller
    if filenames is None and shell is not None:
        filenames = filenames_of(shell, shell.execution_count)
    return pipeline.report(namespace, cells, filenames)


def _notebook() -> Any:
    """Return the shell that this process runs, None where it is no notebook and no IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


_LONGEST_S: Final = 2.0
"""Time that the thread gets to send what it is sending."""


class LiveReport:
    """One output that is kept up to date until ``end``, after ``every_s`` each.

    Raises:
        UsageError: this is no notebook, and no output can change.
        NotAvailable: no thread can be had.
    """

    def __init__(self, shell: Any, every_s: float) -> None:
        if not hasattr(shell, "kernel"):
            raise UsageError("%memreport --live needs a notebook: what a terminal has printed cannot be refreshed")
        self._publish, self._every_s = shell.display_pub.publish, every_s
        self._id = {"display_id": uuid4().hex}
        self._ended = threading.Event()
        self._shown: dict[str, str] = {}
        if not reserve.has_room(reserve.FOR_THREAD):
            raise NotAvailable("%memreport --live needs a thread, and no memory is left for one")
        self._show(f"Refreshed every {every_s:g} s; `%memreport --live off` ends it.", update=False)
        # In the context of its cell, by which newer kernels know where an output belongs.
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._go_on,), name="oomdoctor-live", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Leave the output as it is, and say that it has ended."""
        self._ended.set()
        with suppress(RuntimeError):  # of a thread that is no more, in a copy of this process
            self._thread.join(_LONGEST_S)
        quietly(lambda: self._show("Stopped: these numbers are the last."))

    def _go_on(self) -> None:
        while not self._ended.wait(self._every_s):
            quietly(lambda: self._show(f"Refreshed every {self._every_s:g} s; `%memreport --live off` ends it."))

    def _show(self, state: str, *, update: bool = True) -> None:
        from oomdoctor.views.memory_report import live
        from oomdoctor.views.mime import live_bundle

        shown = live_bundle(live(readings(), state))
        if shown != self._shown:
            self._shown = shown
            self._publish(shown, {}, transient=self._id, update=update)


def readings() -> list[Usage]:
    """Return the counters of each memory; of the host also its limit, and what is in use below that."""
    from oomdoctor.evidence import host

    *devices, last = pipeline.memories(beside=True)
    capacity, free, _ = host.binding_limit(host.read(in_full=False))
    return [*(one.usage() for one in devices), last.usage()._replace(reserved=capacity - free, limit=capacity)]
