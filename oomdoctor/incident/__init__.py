"""What happened: a failure read out of an exception or out of text, by a table of message formats; or a snapshot."""

from __future__ import annotations

from oomdoctor.incident.recognise import all_from_exception, find_oom, from_exception
from oomdoctor.incident.snapshot import is_snapshot, read_snapshot
from oomdoctor.incident.text import describe, from_text

__all__ = [
    "all_from_exception",
    "describe",
    "find_oom",
    "from_exception",
    "from_text",
    "is_snapshot",
    "read_snapshot",
]
