"""The magics ``%oomdoctor``, ``%memreport`` and ``%%memplan``: they read what was typed; bad input gets one line."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.shell import memplan as planning
from oomdoctor.shell.memreport import USAGE
from oomdoctor.shell.verbs import VERBS, shown

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension

_NAMES: Final = {"line": ("oomdoctor", "memreport", "memplan"), "cell": ("memplan",)}


def register(extension: Extension) -> None:
    """Add the magics to the shell of ``extension``."""

    def oomdoctor(line: str) -> None:
        """Diagnose and heal cells that run out of memory: `%oomdoctor help`."""
        _answered(lambda: _oomdoctor(extension, line))

    def memreport(line: str) -> None:
        _answered(lambda: extension.memreport.answer(_split(line)))

    def memplan(line: str, cell: str) -> None:
        number, time_s = extension.memreport.number, extension.config.forecast_time_s
        _answered(lambda: extension.memplan.answer(_split(line), cell, number, time_s=time_s))

    def memplan_line(line: str) -> None:
        _answered(lambda: planning.line_answer(_split(line)))

    memreport.__doc__, memplan.__doc__, memplan_line.__doc__ = USAGE, planning.USAGE, planning.USAGE

    for magic in (oomdoctor, memreport):
        extension.shell.register_magic_function(magic, magic_kind="line", magic_name=magic.__name__)
    extension.shell.register_magic_function(memplan, magic_kind="cell", magic_name="memplan")
    extension.shell.register_magic_function(memplan_line, magic_kind="line", magic_name="memplan")


def unregister(extension: Extension) -> None:
    """Take the magics away again."""
    for kind, names in _NAMES.items():
        for name in names:
            extension.shell.magics_manager.magics[kind].pop(name, None)


def _answered(do: Any) -> None:
    try:
        do()
    except OomDoctorError as exc:
        print(f"oomdoctor: {exc}", file=sys.stderr)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as exc:
        raise UsageError(f"{shown(line)} cannot be read: {exc}") from None


def _oomdoctor(extension: Extension, line: str) -> None:
    verb, *rest = _split(line) or ["status"]
    verb = "help" if verb in ("--help", "-h") else verb
    if verb not in VERBS:
        raise UsageError(f"there is no verb {shown(verb)}: there are {', '.join(VERBS)}")
    VERBS[verb](extension, rest)
