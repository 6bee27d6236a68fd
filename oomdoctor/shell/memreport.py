"""``%memreport`` and ``oomdoctor.report``: what holds memory now, and what has grown since the last cell and report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.growth import Mark
from oomdoctor.model.memory import Measured
from oomdoctor.model.session import Cells
from oomdoctor.objects.frames import locals_of
from oomdoctor.shell.cells import cells_until, is_own
from oomdoctor.shell.cells import filenames as filenames_of
from oomdoctor.shell.outputs import HELP, Options, display_in, one_line, put

if TYPE_CHECKING:
    from oomdoctor.views.displayed import Report
    from oomdoctor.views.survey import GrowthRows


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

_TAKES: Final = {"device": "a name", "top": "a number above zero", "diff": None, "json": None} | dict.fromkeys(
    ("html", "snapshot"), "a path"
)
read_options = partial(Options.read, "%memreport", _TAKES)


class MemReport:
    """The magic in one shell.

    It keeps plain values alone: no tensor lives longer because it was reported.

    Attributes:
        number: of the cell that is running, or ran last.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._last: tuple[int, Report] | None = None
        self._mark: Mark | None = None
        self.number: int = shell.execution_count

    def mark(self, raw_cell: str) -> None:
        """Note which cell begins, and read the counters if it is one of the user's."""
        self.number = self._shell.execution_count  # while a cell runs, this is its number or the next one's
        if raw_cell.strip() and not is_own(raw_cell):
            self._mark = counters(self.number)

    def answer(self, words: list[str]) -> None:
        """Report as ``words`` ask for.

        Raises:
            UsageError: they ask for what is not there; nothing is written then.
        """
        from oomdoctor.views import html, report_bundle, text
        from oomdoctor.views.holders import TOP

        if words[:1] == ["help"] or HELP.intersection(words):
            print(USAGE, end="")
            return
        options = read_options(words)
        number = self.number
        marks = None if self._mark is None else (self._mark, counters(number))  # before this work takes memory itself
        whole = self._collect(number, options)
        report = whole if options.device is None else whole.of(options.device)
        earlier, self._last = self._last, (number, whole)
        growth = self._growth(earlier, report, options.top or TOP) if options.diff else None
        survey = report.survey(top=options.top or TOP, growth=growth, marks=marks)
        if not options.paths and not options.prints_json:
            display_in(self._shell, partial(text.render, survey), report_bundle(survey), raw=True)
            return
        page = html.page("Memory report", survey) if options.html is not None else ""
        found = report.to_dict()
        if earlier is not None and options.diff:
            found["growth"] = report.diff(earlier[1]).to_dict()
        _write(options, page, json.dumps(found, indent=1))

    def _collect(self, number: int, options: Options) -> Report:
        """Return the report of all devices. Modules that are loaded for it may run operations while they are."""
        # Past the modes of torch, where the program has loaded it.
        storages = "oomdoctor.objects.storages"
        with import_module(storages).unobserved() if "torch" in sys.modules else nullcontext():
            if options.snapshot is not None:
                pipeline.check_snapshot()
            cells = cells_until(self._shell, number, "")
            return pipeline.report(self._shell.user_ns, cells, filenames_of(self._shell, number))

    def _growth(self, earlier: tuple[int, Report] | None, report: Report, top: int) -> GrowthRows:
        from oomdoctor.views.survey import NOTHING_YET, growth_rows

        if earlier is None:
            return NOTHING_YET
        number, before = earlier
        return growth_rows(before.whole, report.whole, f"the report of In[{number}]", top=top, only=report.only)


def _write(options: Options, page: str, shape: str) -> None:
    """Put the report where it was asked to go, and say what went where."""
    said = []
    if options.snapshot is not None:
        said.append(f"{one_line(options.snapshot)}: {pipeline.snapshot(options.snapshot)}")
    if options.html is not None:
        put(page, options.html)
        said.append(f"{one_line(options.html)}: a page that opens offline")
    if options.json is not None:
        put(shape, options.json)
        said.append(f"{one_line(options.json)}: the evidence as JSON")
    if options.prints_json:
        print(shape)
    if said:  # beside the JSON, which stays fit to be parsed
        print("\n".join(said), file=sys.stderr if options.prints_json else sys.stdout)


def counters(cell: int) -> Mark:
    """Return what this process holds now, by counters that are kept anyway; no device is initialised for it."""
    allocated: dict[str, int] = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            allocated[f"cuda:{index}"] = stats["allocated_bytes"]["all"]["current"] if stats else 0
    simulated = pipeline.simulated()
    if simulated is not None:
        memory = simulated.read()
        allocated[memory.name] = memory.allocated
    return Mark(
        cell=cell,
        rss=_resident(),
        allocated=tuple(allocated.items()),
        simulated=None if simulated is None else (simulated.name, simulated.capacity_bytes, simulated.number),
    )


@cache
def _process(pid: int) -> Any:
    """Return a process; to open it takes as long as to read it."""
    import psutil

    return psutil.Process(pid)


def _resident() -> Measured:
    import psutil

    try:
        return int(_process(os.getpid()).memory_info().rss)
    except (psutil.Error, OSError, ValueError, LookupError, RuntimeError):
        return Unavailable("the system tells nothing of its processes")


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
