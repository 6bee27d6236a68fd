"""``%memreport`` and ``oomdoctor.report``: what holds memory now, and what has grown since the last report."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.model.session import Cells
from oomdoctor.objects.frames import locals_of
from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.cells import filenames as filenames_of
from oomdoctor.shell.outputs import FLAG, HELP, JSON, PRINTED, Options, number, one_line, path, put

if TYPE_CHECKING:
    from oomdoctor.views.displayed import Report
    from oomdoctor.views.document import Timeline
    from oomdoctor.views.memory_report import GrowthRows


USAGE: Final = """Show what holds memory now, on each device and in the host's memory.

    %memreport [--device D] [--top N] [--diff] [--json [PATH]] [--html PATH] [--snapshot PATH]

    --device D       one device alone, and the host's summary: cuda, cuda:1, cpu
    --top N          the N largest holders; above 10 also single weights, every limit and the page cache
    --diff           what grew since the last report, by role and by holder
    --json [PATH]    the evidence as JSON, printed where no path is given, and for -
    --html PATH      a page that opens offline
    --help           this text
    --snapshot PATH  CUDA: torch's snapshot of the allocator, for https://docs.pytorch.org/memory_viz
"""

_FILE: Final = {"type": path}
_OPTIONS: Final = Options(
    "%memreport", device={}, top={"type": number}, diff=FLAG, json=JSON, html=_FILE, snapshot=_FILE
)


_CELLS: Final = 256
"""Cells whose ends are kept."""


class MemReport:
    """The magic in one shell.

    It keeps plain values alone: no tensor lives longer because it was reported.

    Attributes:
        number: of the cell that is running, or ran last.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._last: tuple[int, Report] | None = None
        self._device, self._ends = "", deque[tuple[int, int]](maxlen=_CELLS)
        self.number: int = shell.execution_count

    def answer(self, words: list[str]) -> None:
        """Report as ``words`` ask for.

        Raises:
            UsageError: they ask for what is not there; nothing is written then.
        """
        from IPython.display import display

        from oomdoctor.views import html, report_bundle
        from oomdoctor.views.holders import TOP

        if words[:1] == ["help"] or HELP.intersection(words):
            print(USAGE, end="")
            return
        options = _OPTIONS.parse_args(words)
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

    def _collect(self, number: int, options: Any) -> Report:
        """Return the report of all devices. Modules that are loaded for it may run operations while they are."""
        # Past the modes of torch, where the program has loaded it.
        storages = "oomdoctor.objects.storages"
        with import_module(storages).unobserved() if "torch" in sys.modules else nullcontext():
            if options.snapshot is not None:
                pipeline.check_snapshot()
            cells = cells_until(self._shell, number, "")
            return pipeline.report(self._shell.user_ns, cells, filenames_of(self._shell, number))

    def note_end(self) -> None:
        """Note how much is in use at the end of a cell, or so far; of one device, the first that is in use."""
        device, size = pipeline.in_use() or ("", 0)
        if device != self._device or (self._ends and self._ends[-1][1] > self.number):
            self._ends.clear()
        if self._ends and self._ends[-1][1] == self.number:
            self._ends.pop()
        self._device = device
        if device:
            self._ends.append((size, self.number))

    def _history(self, report: Report) -> Timeline | None:
        """Return how much was in use at the ends of cells, where the report is of the device that they are known of."""
        from oomdoctor.views.document import Timeline

        self.note_end()
        device = next((one for one in report.evidence.devices if one.name == self._device), None)
        if device is None:
            return None
        return Timeline.of_cells(self._ends, device.total if isinstance(device.total, int) else None)

    def _growth(self, earlier: tuple[int, Report] | None, report: Report, top: int) -> GrowthRows:
        from oomdoctor.views.memory_report import NOTHING_YET, growth_rows

        if earlier is None:
            return NOTHING_YET
        number, before = earlier
        return growth_rows(before.whole, report.whole, f"the report of In[{number}]", top=top, only=report.only)


def _write(options: Any, page: str, shape: str) -> None:
    """Put the report where it was asked to go, and say what went where."""
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
        print("\n".join(said), file=sys.stderr if options.json == PRINTED else sys.stdout)


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
