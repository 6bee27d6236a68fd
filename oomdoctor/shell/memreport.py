"""``%memreport``: its options, the report before the present one, and the counters at the start of the last cell."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.growth import Mark
from oomdoctor.shell.cells import cells_until, filenames, is_own
from oomdoctor.shell.outputs import OUTPUT, check_writable, one_line, options_in, path_of, put

if TYPE_CHECKING:
    from oomdoctor.model.memory import Measured
    from oomdoctor.views.displayed import Report
    from oomdoctor.views.document import Document
    from oomdoctor.views.growth import GrowthRows

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

_TAKES: Final = {
    "device": "a name",
    "top": "a number above zero",
    "diff": None,
    "json": None,
    "html": "a path",
    "snapshot": "a path",
}
_MOST_DIGITS: Final = 9
_HELP: Final = frozenset({"--help", "-h"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for; a path is None where it was not. ``prints_json``: ``--json`` without a path."""

    device: str | None = None
    top: int | None = None
    diff: bool = False
    prints_json: bool = False
    json: Path | None = None
    html: Path | None = None
    snapshot: Path | None = None

    @classmethod
    def read(cls, words: list[str]) -> Options:
        """Read ``--name value`` and ``--name=value``.

        Raises:
            UsageError: an unknown option, a missing or a wrong value, a path that cannot be written.
        """
        given = options_in("%memreport", words, _TAKES)
        options = cls(
            device=given.get("device"),
            top=_number(given.get("top")),
            diff="diff" in given,
            prints_json="json" in given and given["json"] in (None, *OUTPUT),
            json=None if given.get("json") in OUTPUT else path_of(given.get("json")),
            html=path_of(given.get("html")),
            snapshot=path_of(given.get("snapshot")),
        )
        for path in options.paths:
            check_writable(path)
        if len(set(map(os.path.realpath, options.paths))) < len(options.paths):
            raise UsageError("each file needs a path of its own")
        return options

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are to be written."""
        return tuple(path for path in (self.json, self.html, self.snapshot) if path is not None)


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
        from oomdoctor.views.holders import TOP

        if words[:1] == ["help"] or _HELP.intersection(words):
            print(USAGE, end="")
            return
        options = Options.read(words)
        number = self.number
        marks = None if self._mark is None else (self._mark, counters(number))  # before this work takes memory itself
        whole = self._collect(number, options)
        report = whole if options.device is None else whole.of(options.device)
        earlier, self._last = self._last, (number, whole)
        growth = self._growth(earlier, report, options.top or TOP) if options.diff else None
        if not options.paths and not options.prints_json:
            self._display(report.survey(top=options.top or TOP, growth=growth, marks=marks))
            return
        page = report.to_html(top=options.top or TOP, growth=growth, marks=marks) if options.html is not None else ""
        found = report.to_dict()
        if earlier is not None and options.diff:
            found["growth"] = report.diff(earlier[1]).to_dict()
        _write(options, page, json.dumps(found, indent=1))

    def _collect(self, number: int, options: Options) -> Report:
        """Return the report of all devices. Modules that are loaded for it may run operations while they are."""
        from oomdoctor import pipeline

        with _unobserved():
            if options.snapshot is not None:
                pipeline.check_snapshot()
            cells = cells_until(self._shell, number, "")
            return pipeline.report(self._shell.user_ns, cells, filenames(self._shell, number))

    def _growth(self, earlier: tuple[int, Report] | None, report: Report, top: int) -> GrowthRows:
        from oomdoctor.views.growth import NOTHING_YET, growth_rows

        if earlier is None:
            return NOTHING_YET
        number, before = earlier
        return growth_rows(before.whole, report.whole, f"the report of In[{number}]", top=top, only=report.only)

    def _display(self, survey: Document) -> None:
        from IPython.display import display

        from oomdoctor.views import report_bundle, text
        from oomdoctor.views.terminal import fitted, looks

        if not hasattr(self._shell, "kernel") and sys.stdout.isatty():
            print(fitted(text.render(survey, **looks(sys.stdout)), sys.stdout), end="")
        else:
            display(report_bundle(survey), raw=True)


def _unobserved() -> AbstractContextManager[None]:
    """Return a context past the modes of torch, where the program has loaded it."""
    if "torch" not in sys.modules:
        return nullcontext()
    from oomdoctor.objects.storages import unobserved

    return unobserved()


def _write(options: Options, page: str, shape: str) -> None:
    """Put the report where it was asked to go, and say what went where."""
    from oomdoctor import pipeline

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
    virtual = sys.modules.get("oomdoctor.allocator.virtual")
    simulated = virtual.active() if virtual is not None else None
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


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit() and digits):
        raise UsageError(f"--top needs a number above zero, not '{one_line(text)}'")
    if len(digits) > _MOST_DIGITS:
        raise UsageError(f"--top takes a number of {_MOST_DIGITS} digits at most, not one of {len(digits):,}")
    return int(digits)
