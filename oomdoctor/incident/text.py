"""Reads failures out of text: a log, a notebook's output, a pasted traceback.

Limits: only the message table decides. A text in none of its wordings is reported as not recognised, with its last
line, and never guessed at.
"""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.incident.clean import clean_lines
from oomdoctor.incident.table import FORMATS
from oomdoctor.incident.wrapped import scan_lines
from oomdoctor.model.incident import Family, Incident

_LAST_ERROR: Final = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Warning|Exit))(?::|$)",
    re.MULTILINE,
)
_QUOTE: Final = 500
_TAIL: Final = 100_000


def from_text(text: str) -> tuple[Incident, ...]:
    """Return the failures that ``text`` tells of, the root first; never empty.

    Failures for want of memory come before others. One that was printed twice is returned once. Where nothing is
    recognised there is one incident that is no OOM, whose ``format`` is None and whose message is the last error
    line of the text. Of more than 16 MiB the beginning and the end are read.
    """
    lines = clean_lines(str.__str__(text))  # and not what a subclass makes of it
    return scan_lines(lines) or (_unrecognised(lines),)


def describe(incident: Incident) -> str:
    """Return what an incident is, in one sentence."""
    for row in FORMATS:
        if row.name == incident.format:
            return row.title
    if incident.is_oom:
        return "Memory ran out."
    return "This is no wording of an out-of-memory failure that is known here."


def _unrecognised(lines: list[str]) -> Incident:
    tail = "\n".join(lines[-_TAIL:])[-_TAIL:]
    errors = list(_LAST_ERROR.finditer(tail))
    start = errors[-1].start() if errors else max(0, tail.rstrip().rfind("\n"))
    return Incident(
        is_oom=False,
        family=Family.NOT_OOM,
        exc_type=errors[-1]["name"] if errors else None,
        message=tail[start:].strip()[:_QUOTE],
    )
