"""``%%memplan``: its options, and the cell below it, which is forecast and, where that was asked for and it fits, run.

The cell runs as one of its own after the magic's cell is done: it has its number, its snapshot, its diagnosis and its
retries, as if it had been typed without the first line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import parse_size
from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.outputs import OUTPUT, check_writable, one_line, options_in, path_of, put

if TYPE_CHECKING:
    from oomdoctor.model.plan import Forecast, Verdict
    from oomdoctor.model.session import Cells
    from oomdoctor.views.displayed import Planned

USAGE: Final = """Forecast the cell below without running it: what it needs, where that fits, and what to change.

    %%memplan [--run] [--device-memory SIZE] [--device D] [--json [PATH]]

    --run                   run the cell if it is forecast to fit
    --device-memory SIZE    plan for a device of that size, all of it for tensors: 16GiB, 512MiB
    --device D              plan for a device that is in use: cuda, cuda:1, cpu
    --json [PATH]           the plan as JSON, printed where no path is given, and for -
    --help                  this text, with `%memplan --help` where there is no cell
"""

_TAKES: Final = {"run": None, "device-memory": "a size", "device": "a name", "json": None}
_HELP: Final = frozenset({"--help", "-h"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for. ``prints_json``: ``--json`` without a path."""

    run: bool = False
    memory: int | None = None
    device: str | None = None
    prints_json: bool = False
    json: Path | None = None

    @classmethod
    def read(cls, words: list[str]) -> Options:
        """Read ``--name value`` and ``--name=value``.

        Raises:
            UsageError: an unknown option, a missing or a wrong value, a path that cannot be written.
        """
        given = options_in("%%memplan", words, _TAKES)
        memory, path = given.get("device-memory"), given.get("json")
        if memory is not None and "device" in given:
            raise UsageError("--device and --device-memory are two answers to one question: give one of them")
        prints = "json" in given and path in (None, *OUTPUT)
        target = None if prints else path_of(path)
        if target is not None:
            check_writable(target)
        return cls(
            run="run" in given,
            memory=None if memory is None else parse_size(memory),
            device=given.get("device"),
            prints_json=prints,
            json=target,
        )


class MemPlanner:
    """The magic in one shell.

    Attributes:
        to_run: the cell that is to be run when the magic's is done, None where none is.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.to_run: str | None = None

    def take(self) -> str | None:
        """Return the cell that is to be run, once."""
        source, self.to_run = self.to_run, None
        return source

    def answer(self, words: list[str], cell: str, number: int, *, time_s: float) -> None:
        """Plan ``cell`` as ``words`` ask for.

        Args:
            number: of the magic's own cell.
            time_s: for each part of the plan.

        Raises:
            UsageError: they ask for what is not there, or the cell cannot be planned; nothing is written then.
        """
        if _HELP.intersection(words):
            print(USAGE, end="")
            return
        options = Options.read(words)
        if not cell.strip():
            raise UsageError("%%memplan forecasts the cell below its line, and there is nothing below it")
        cell = _not_indented(cell)
        check_source(cell, "the cell below %%memplan")
        planned = self._planned(cells_until(self._shell, number, cell), options, time_s)
        if options.json is not None:
            put(json.dumps(planned.to_dict(), indent=1), options.json)
            print(f"{one_line(options.json)}: the plan as JSON")
        elif options.prints_json:
            print(json.dumps(planned.to_dict(), indent=1))
        else:
            self._display(planned)
        if options.run:
            self._run(cell, planned)

    def _planned(self, cells: Cells, options: Options, time_s: float) -> Planned:
        from oomdoctor import pipeline
        from oomdoctor.objects.storages import unobserved
        from oomdoctor.views.displayed import Planned

        shell = self._shell
        with unobserved():
            found = pipeline.foresee(
                *(shell.user_ns, cells),
                device=options.device,
                memory=options.memory,
                shell=shell,
                time_s=time_s,
            )
        return Planned(found)

    def _display(self, planned: Planned) -> None:
        from IPython.display import display

        if not hasattr(self._shell, "kernel") and sys.stdout.isatty():
            from oomdoctor.views.terminal import fitted, looks

            print(fitted(planned.to_text(**looks(sys.stdout)), sys.stdout), end="")
        else:
            display(planned)

    def _run(self, cell: str, planned: Planned) -> None:
        """Have the cell run, if it fits.

        Raises:
            UsageError: the cell is not run, for this reason.
        """
        why = _why_not(planned.forecast, planned.plan.here.verdict)
        if why is not None:
            raise UsageError(f"not run: {why}")
        self.to_run = cell


def _not_indented(cell: str) -> str:
    """Return the cell without the indentation of its first line, which IPython takes away before it runs one."""
    from IPython.core.inputtransformer2 import leading_indent

    return "".join(leading_indent(cell.splitlines(keepends=True)))


def line_answer(words: list[str]) -> None:
    """Answer ``%memplan``, with one sign.

    Raises:
        UsageError: it was no help that was asked for.
    """
    if not _HELP.intersection(words):
        raise UsageError("%memplan has no cell below it: write %%memplan above the cell; `%memplan --help` tells more")
    print(USAGE, end="")


def _why_not(forecast: Forecast, verdict: Verdict) -> str | None:
    """Return why the cell is not to be run, None where it is."""
    from oomdoctor.forecast.pricing import is_of_card
    from oomdoctor.model.plan import Verdict
    from oomdoctor.model.sizes import format_size
    from oomdoctor.views.words import about, clean

    if forecast.peak is None:
        return f"it has no forecast: {clean(forecast.refused or '')}"
    if is_of_card(forecast):
        return "it asks for a device that this machine lacks"
    if forecast.budget is None:
        return "it is not known how much memory there is for it"
    if verdict is Verdict.FITS:
        return None
    need = max(forecast.peak, forecast.reserved or 0)
    told = {Verdict.BORDERLINE: "too close to say"}.get(verdict, verdict.value)
    return f"it needs {about(need)} of {format_size(forecast.budget)}, {told}"


def check_source(text: str, what: str) -> None:
    """Refuse what is not Python, magics aside.

    Args:
        what: what it is called.

    Raises:
        UsageError: the line to show.
    """
    from oomdoctor.program.compiled import fault_in

    fault = fault_in(text)
    if fault is not None:
        line = f" (line {fault.line} of it)" if fault.line else ""
        raise UsageError(f"{what} is not Python: {one_line(fault.message)}{line}")
