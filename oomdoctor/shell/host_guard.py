"""The host guard's surface: its verb, ``%%memlimit`` above a cell, and what a new kernel tells of one that was killed.

``%%memlimit`` leaves its cell as it is: it runs in its own name, can await, shows its last value and keeps its line
numbers, as below ``%%mempeak``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.guard import black_box
from oomdoctor.guard.watch import Terms, Watch
from oomdoctor.language import say
from oomdoctor.model.sizes import format_size, parse_size
from oomdoctor.shell.mempeak import below, measured
from oomdoctor.shell.outputs import HELP, one_line

if TYPE_CHECKING:
    from oomdoctor.shell.config import OomDoctor
    from oomdoctor.shell.extension import Extension

USAGE: Final = """Run the cell below with a limit on the host memory that it may take.

    %%memlimit 4GiB
    %%memlimit --help      this text

The cell raises a MemoryError at the line that asks for more. What was in memory before the cell does not count. On
Linux the system refuses what is too much; elsewhere the cell is interrupted once it holds too much.
"""

_HEAD: Final = re.compile(r"((?:[ \t]*\n)*)%%memlimit[ \t]+([^\n#]*?)[ \t]*(?:#[^\n]*)?\n(?!\s*(?:%%|\Z))")
"""What stands above a cell with a limit; one that begins with another cell magic is for IPython to run."""
_LINE: Final = re.compile(r"(?:[ \t]*\n)*%%memlimit[ \t]+([^\n#]*?)[ \t]*(?:#[^\n]*)?(?:\n|$)")


def ceiling_of(source: str) -> int | None:
    """Return how many bytes a cell may take by the ``%%memlimit`` above it; None where none can be read."""
    head = _LINE.match(source)
    if head is None:
        return None
    try:
        return parse_size(head[1])
    except OomDoctorError:
        return None


def as_it_runs(source: str) -> str | None:
    """Return a cell below ``%%mempeak`` or ``%%memlimit`` as it runs, line for line; None where it is below neither."""
    head = _HEAD.match(source)
    if head is None or ceiling_of(source) is None:
        return measured(source)
    return below(head, "memlimit")


def run_limited(extension: Extension, line: str, cell: str | None) -> None:
    """Run what ``%%memlimit`` stands above and IPython has to run, such as another cell magic."""
    if line.strip() in HELP:
        print(USAGE, end="")
        return
    if cell is None or not cell.strip():
        raise UsageError("%%memlimit limits the cell below its line, and there is nothing below it")
    parse_size(line.partition("#")[0].strip())
    failing = extension.guard.source
    if failing is None or ceiling_of(failing) is None:
        raise UsageError("%%memlimit stands on the first line of a cell, above other magics")
    extension.shell.run_cell(cell)


def switch(extension: Extension, words: list[str]) -> None:
    """`%oomdoctor guard on|off|status`: raise a MemoryError before the kernel is killed, or tell whether."""
    accepted = ("on", "off", "auto", "status")
    if len(words) > 1 or (words and words[0] not in accepted):
        raise UsageError(f"guard takes one of {', '.join(accepted)}, not '{one_line(' '.join(words))}'")
    if words and words[0] != "status":
        extension.config.guard = words[0]
    for line in status(extension.guard):
        print(say(line))


def status(guard: Watch) -> list[str]:
    """Return what the guard does now, a line each."""
    why = guard.why_on()
    reading = guard.gauge.read()
    told = [f"host guard: {f'on, because {why}' if why else 'off'}"]
    if reading is not None:
        margin = reading.margin(guard.terms().margin)
        told.append(
            f"host memory: {format_size(max(reading.free, 0))} of {format_size(reading.limit)} can be had below "
            f"{reading.name}; the guard keeps {format_size(margin)} of it free"
        )
    if why and not guard.refuses:
        told.append("single requests cannot be refused here: the guard interrupts the cell when memory is nearly full")
    if why and guard.interrupt.signal is None and guard.refuses:
        told.append("no signal is free: the guard refuses requests, and interrupts at the next bytecode alone")
    told.append(f"black box: {'on' if guard.record is not None else 'off, as this is no Jupyter kernel'}")
    return told


def terms_of(config: OomDoctor) -> Terms:
    """Return what the user has set."""
    return Terms(mode=config.guard, margin=config.margin)


def begin_record(shell: Any, guard: Watch) -> None:
    """Tell what became of the last kernel here, and begin the record of this one."""
    folder = _folder(shell)
    if folder is None:
        return
    here, group = black_box.place(), str(guard.gauge.own_group or "")
    for facts, now in black_box.left_behind(folder, here):
        print(f"oomdoctor: {say(black_box.verdict(facts, now, group, guard.gauge.kills()))}")
    guard.record = black_box.opened(folder, {**here, "group": group, "system": black_box.system()})


def _folder(shell: Any) -> Path | None:
    """Return the folder of the records: below that in which Jupyter keeps what belongs to running kernels."""
    if not hasattr(shell, "kernel"):
        return None
    paths: Any = sys.modules.get("jupyter_core.paths")
    return None if paths is None else Path(paths.jupyter_runtime_dir()) / "oomdoctor"
