"""Options of a magic, and the files that it is asked to write, checked before anything is done; faults are one line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import parse_size

OUTPUT: Final = frozenset({"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
"""To write there as to a file would empty the log that the output goes to, or reach the log of a kernel's server."""
HELP: Final = frozenset({"--help", "-h"})
_MOST_DIGITS: Final = 9
_FILES: Final = frozenset({"json", "html", "snapshot"})
"""Options that take a path."""
_DESCRIPTORS: Final = ("/dev/stderr", "/dev/fd/", "/proc/self/fd/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a magic was asked for; what it does not take is never given.

    Attributes:
        memory: bytes. top: of a list, so many.
        prints_json: `--json` without a path.
        json: where it goes, with one; the other paths likewise.
    """

    run: bool = False
    memory: int | None = None
    device: str | None = None
    top: int | None = None
    diff: bool = False
    prints_json: bool = False
    json: Path | None = None
    html: Path | None = None
    snapshot: Path | None = None

    @classmethod
    def read(cls, magic: str, takes: Mapping[str, str | None], words: list[str]) -> Options:
        """Read ``--name value`` and ``--name=value``; for the arguments see ``_options_in``.

        Raises:
            UsageError: an unknown option, a missing or a wrong value, a path that cannot be written.
        """
        given = _options_in(magic, words, takes)
        memory, prints = given.get("device-memory"), "json" in given and given["json"] in (None, *OUTPUT)
        if memory is not None and "device" in given:
            raise UsageError("--device and --device-memory are two answers to one question: give one of them")
        options = cls(
            run="run" in given,
            memory=None if memory is None else parse_size(memory),
            device=given.get("device"),
            top=_number(given.get("top")),
            diff="diff" in given,
            prints_json=prints,
            json=None if prints else path_of(given.get("json")),
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


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit() and digits):
        raise UsageError(f"--top needs a number above zero, not '{one_line(text)}'")
    if len(digits) > _MOST_DIGITS:
        raise UsageError(f"--top takes a number of {_MOST_DIGITS} digits at most, not one of {len(digits):,}")
    return int(digits)


def _options_in(magic: str, words: list[str], takes: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the options among ``words``, each with its value or None.

    Args:
        magic: what the line is typed after.
        takes: the options that there are, each with what its value is called; of None, a file takes a path or none.
    """
    given: dict[str, str | None] = {}
    rest, name = list(words), ""
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") and name in _FILES and (begun := given.get(name)):
            raise UsageError(f"a path with spaces needs quotes: --{name} {one_line(shlex.quote(f'{begun} {word}'))}")
        name, equals, attached = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in takes:
            accepted = ", ".join(f"--{one}" for one in takes)
            raise UsageError(f"{magic} does not take '{one_line(word)}': it takes {accepted}")
        is_flag = takes[name] is None and name not in _FILES
        value = attached if equals else None
        if not equals and not is_flag and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if is_flag and value is not None:
            raise UsageError(f"--{name} takes no value")
        if not value and (takes[name] is not None or value is not None):
            raise UsageError(f"--{name} needs {takes[name] or ('a path after =' if equals else 'a path')}")
        if name in given:
            raise UsageError(f"--{name} is given twice")
        given[name] = value
    return given


def path_of(text: str | None) -> Path | None:
    """Return the path that was typed, None where none was.

    Raises:
        UsageError: it is no file, or ends like a folder that is not there.
    """
    if text is None:
        return None
    if text in OUTPUT or text.startswith(_DESCRIPTORS):
        raise UsageError(f"{one_line(text)} is no file: only --json is printed, where it has no path")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{one_line(text)} cannot be written: there is no home folder of that name") from None
    if text.endswith(os.sep) and not path.is_dir():
        raise UsageError(f"{one_line(text)} cannot be written: it ends like a folder, and there is none")
    return path


def check_writable(path: Path) -> None:
    """Refuse a path before anything is written, for the reason that the operating system gives.

    Raises:
        UsageError: no file can be written there.
    """
    try:
        target = path.resolve()  # of a link that leads to nothing, what it leads to is made and removed, not the link
        is_there = target.exists()
        if is_there and not target.is_dir() and not target.is_file():
            return  # a pipe or a terminal, which could wait for a reader
        target.open("ab").close()
        if not is_there:
            target.unlink()
    except (OSError, ValueError, RuntimeError) as exc:
        raise _unwritable(path, exc) from None


def display_in(shell: Any, to_text: Callable[..., str], shown: Any, *, raw: bool = False) -> None:
    """Display ``shown``, or print its text where the shell runs in a terminal, as wide as that is.

    Args:
        to_text: is told how the terminal looks.
        raw: whether ``shown`` is a bundle of formats.
    """
    from IPython.display import display

    if not hasattr(shell, "kernel") and sys.stdout.isatty():
        from oomdoctor.views.mime import fitted, looks

        print(fitted(to_text(**looks(sys.stdout)), sys.stdout), end="")
    else:
        display(shown, raw=raw)


def put(text: str, path: Path) -> None:
    """Write ``text`` to ``path``.

    Raises:
        UsageError: the operating system does not let it be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as exc:
        raise _unwritable(path, exc) from None


def _unwritable(path: Path, exc: Exception) -> UsageError:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    if isinstance(exc, RuntimeError):
        reason = "its links lead in a circle"
    is_lost = isinstance(exc, FileNotFoundError) and not path.parent.exists()
    folder = f" (there is no folder {one_line(path.parent)})" if is_lost else ""
    return UsageError(f"{one_line(path)} cannot be written: {reason}{folder}")


def one_line(text: str | Path | None) -> str:
    """Return what was typed on one line, short, and without characters that a screen would obey."""
    from oomdoctor.views import words

    return words.clean(str(text), 120)
