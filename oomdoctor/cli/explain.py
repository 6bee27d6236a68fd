"""``oomdoctor explain``: reads a log, a pasted traceback or a pipe, and says what failed and why.

Of a CUDA memory snapshot, which torch writes as a pickle, it says what held the memory.

The text never leaves the machine, and no torch is imported. Of a long text the beginning and the end are read.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from oomdoctor import fixes
from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.model import jsonable
from oomdoctor.model.peak import Moment
from oomdoctor.model.sizes import format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Document, Head, Items, Line, apart, given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomdoctor.model.peak import Allocations, Caller, Peak


_HALF: Final = 8 << 20
"""Bytes that are read from the beginning of a text, and as many from its end."""
_ENDS_ONLY: Final = f"Of a text over {2 * _HALF >> 20} MiB, only the first and the last {_HALF >> 20} MiB are read."
_UNREAD: Final = (
    f"The text is longer than {2 * _HALF >> 20} MiB: its middle was not read, "
    f"only the first and the last {_HALF >> 20} MiB."
)
_LONGEST: Final = 256 << 20
"""Bytes that are read of an input of which neither the size nor the end is known."""
_SAMPLE: Final = 10_000
_TOP: Final = 10
_PARTS: Final = 3
"""Parts of a path that are shown."""
_RECORD: Final = "`torch.cuda.memory._record_memory_history()`"
_NO_EVENTS: Final = f"The snapshot has no history, so its peak is not known: call {_RECORD} before the allocations."
_NO_FRAMES: Final = "allocated before the recording began, or without it"
_NO_PYTHON: Final = "no line of Python, as in the backward pass, which runs on threads of its own"
_EMPTY: Final = "The snapshot has no CUDA memory in use."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.epilog = _ENDS_ONLY
    parser.usage = "%(prog)s [-h] [--json] [FILE]"
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a text file, or a snapshot of CUDA memory; - or nothing reads the input",
    )
    parser.add_argument("--json", action="store_true", help="print the incident and the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Explain the text; 0 where memory ran out, or of a snapshot, 1 where it did not."""
    from oomdoctor.pipeline import explain
    from oomdoctor.rulebook import everything

    if len(args.files) > 1:
        raise UsageError(f"one text at a time, and {len(args.files)} were given")
    (name,) = args.files or ["-"]
    if name != "-" and (data := _pickled(name)):
        return _snapshot(name, data, as_json=args.json)
    text, whole = _text(name)
    explanation = explain(text, rules=everything((), fixes.ids()))
    if not explanation.incident.is_oom and _is_binary(text):
        raise UsageError(f"{'the input' if name == '-' else name} is not text")
    if not whole:
        explanation = replace(explanation, notes=(_UNREAD, *explanation.notes))
    print(json.dumps(explanation.to_dict(), indent=2) if args.json else str(explanation).rstrip("\n"))
    return 0 if explanation.incident.is_oom else 1


def _pickled(name: str) -> bytes:
    """Return a file that is a pickle, nothing of any other."""
    from oomdoctor.incident import is_snapshot

    try:
        with Path(name).open("rb") as file:
            head = file.read(2) if _is_plain(file) else b""
            return head + file.read() if is_snapshot(head) else b""
    except (OSError, ValueError):  # it is told where the text is read
        return b""


def _snapshot(name: str, data: bytes, *, as_json: bool) -> int:
    from oomdoctor.incident import read_snapshot
    from oomdoctor.views.mime import plain

    try:
        found = read_snapshot(data)
    except UsageError as error:
        raise UsageError(f"{name} {error}") from error
    print(json.dumps(to_dict(found), indent=2) if as_json else plain(_document(found)).rstrip("\n"))
    return 0


def _text(name: str) -> tuple[str, bool]:
    """Return the text, and whether it is the whole of it."""
    try:
        if name == "-":
            if sys.stdin is None:
                raise UsageError("there is no input: it is closed")
            if sys.stdin.isatty():
                print(say("Paste the failure, then press Ctrl-D."), file=sys.stderr)
            read, whole = _ends(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as file:
                read, whole = _ends(file)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {name}: {reason}") from error
    text = _decoded(read)
    if not text.strip():
        raise UsageError("there is no text: give a file, or pipe a log or a traceback into the command")
    return text, whole


def _ends(file: IO[bytes]) -> tuple[bytes, bool]:
    """Return the first and the last bytes of ``file``, and whether these are all."""
    head, skipped = file.read(_HALF), 0
    if _is_plain(file):
        skipped = max(0, os.fstat(file.fileno()).st_size - 2 * _HALF)
        file.seek(len(head) + skipped)
    rest = file.read(_LONGEST)
    if len(rest) == _LONGEST:
        raise UsageError(f"the input has no end within {_LONGEST >> 20} MiB: give a file, or the part that matters")
    skipped += max(0, len(rest) - _HALF)
    return head + (b"\n" if skipped else b"") + rest[-_HALF:], not skipped


def _is_plain(file: IO[bytes]) -> bool:
    """Whether ``file`` has an end to go to; a device such as /dev/zero lets itself be sought and has none."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # it is no file of the system's
        return False


def _decoded(read: bytes) -> str:
    """Return the text; PowerShell writes UTF-16 where it redirects into a file.

    Null bytes elsewhere are no text: a log that was cut while its writer went on begins with a hole of them.
    """
    sample = read[:1000]
    marked, nulls = sample[:2] in (b"\xff\xfe", b"\xfe\xff"), sample.count(0)
    if len(sample) < 3 * nulls and (marked or 3 * nulls < 2 * len(sample)):
        return read.decode("utf-16" if marked else "utf-16-le", errors="replace")
    return read.replace(b"\0", b"").decode("utf-8", errors="replace")


def _is_binary(text: str) -> bool:
    """Whether a tenth or more of the text's beginning are no characters."""
    sample = text[:_SAMPLE]
    odd = sum(char == "\ufffd" or not (char.isprintable() or char.isspace() or char in "\b\x1b") for char in sample)
    return 10 * odd > len(sample)


def _document(found: Sequence[Peak]) -> Document:
    """Return what held the memory of each device that had any."""
    used = [peak for peak in found if peak.allocated or peak.reserved]
    if not used:
        return (Line(_EMPTY, "lead"),)
    return tuple(chain.from_iterable(_told(peak) if at == 0 else apart(*_told(peak)) for at, peak in enumerate(used)))


def to_dict(found: Sequence[Peak]) -> dict[str, Any]:
    """Return the JSON shape of a snapshot."""
    return {"schema": jsonable.SCHEMA, "peaks": jsonable.plain(tuple(found))}


def _told(peak: Peak) -> Document:
    held = tuple(_row(holder) for holder in peak.holders if holder.size)
    return (
        Line(_headline(peak), "lead"),
        Line(f"reserved {format_size(peak.reserved)}, {labels.count(peak.events, 'event')} recorded", "inner"),
        *given(Line(_NO_EVENTS, "muted") if peak.moment is Moment.END else None),
        *((Head("What held it", "by the innermost line of yours"), Items(held, most=_TOP)) if held else ()),
    )


def _headline(peak: Peak) -> str:
    held = f"{format_size(peak.allocated)} of {labels.clean(peak.device)}"
    if peak.moment is Moment.PEAK:
        return f"At the peak, tensors held {held}."
    if peak.moment is Moment.END:
        return f"When the snapshot was taken, tensors held {held}."
    asked = "" if peak.requested is None else f"; {format_size(peak.requested)} more were asked for"
    free = "" if peak.free is None else f", and {format_size(peak.free)} were free"
    return f"When memory ran out, tensors held {held}{asked}{free}."


def _row(holder: Allocations) -> str:
    size = f"{format_size(holder.size)} in {labels.count(holder.count, 'block')}"
    if holder.caller is None:
        return f"{size}: {_NO_PYTHON if holder.is_traced else _NO_FRAMES}"
    through = "" if holder.innermost is None else f", mostly through {_place(holder.innermost)}"
    return f"{size}: {_place(holder.caller)}{through}"


def _place(caller: Caller) -> str:
    path = "/".join(caller.path.replace("\\", "/").split("/")[-_PARTS:])
    return f"{labels.code(f'{path}:{caller.line}', 100)} in {labels.code(caller.function)}"
