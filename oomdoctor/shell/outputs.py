"""Options of a magic, and the files that it writes. Faults are one line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, NoReturn

from oomdoctor.errors import UsageError

HELP: Final = frozenset({"--help", "-h"})
PRINTED: Final = Path("-")
"""In the place of a path: the output, as where ``--json`` has no path."""
_MOST_DIGITS: Final = 9
_LEAST_S, _MOST_S = 0.1, 3600.0


class Options(argparse.ArgumentParser):
    """The options of one magic, by their names; what cannot be used is a ``UsageError``."""

    def __init__(self, magic: str, **options: dict[str, Any]) -> None:
        super().__init__(prog=magic, add_help=False, allow_abbrev=False)
        self._takes = [f"--{name.replace('_', '-')}" for name in options]
        for name, terms in zip(self._takes, options.values(), strict=True):
            self.add_argument(name, **terms)

    def error(self, message: str) -> NoReturn:
        """Refuse what was typed."""
        raise UsageError(f"{self.prog}: {one_line(message)}; it takes {', '.join(self._takes)}")


def path(text: str) -> Path:
    """Return the path that was typed, of a file in a folder that exists."""
    try:
        path = Path(text).expanduser()
        if text and (path == PRINTED or (path.parent.is_dir() and not path.is_dir())):
            return path
    except RuntimeError:
        raise argparse.ArgumentTypeError("there is no home folder of that name") from None
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"it cannot be written: {exc.strerror}") from None
    raise argparse.ArgumentTypeError("it needs a path, of a file in a folder that exists")


def number(text: str) -> int:
    """Return the number above zero that was typed."""
    if not (text.isascii() and text.isdigit() and text.strip("0")) or len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"it needs a number above zero, not {text[:_MOST_DIGITS]!r}")
    return int(text)


def seconds(text: str) -> float:
    """Return the seconds that were typed, 0 for ``off``."""
    try:
        found = 0.0 if text == "off" else float(text)
    except ValueError:
        found = -1.0
    if text == "off" or _LEAST_S <= found <= _MOST_S:
        return found
    told = f"{_LEAST_S:g} to {_MOST_S:g}"
    raise argparse.ArgumentTypeError(f"it needs seconds, {told}, or off, not {text[:_MOST_DIGITS]!r}")


FLAG: Final[dict[str, Any]] = {"action": "store_true"}
JSON: Final[dict[str, Any]] = {"nargs": "?", "const": PRINTED, "type": path}


def put(text: str, path: Path) -> None:
    """Write ``text`` to ``path``, and print it where that is ``PRINTED``; a ``UsageError`` where it cannot be."""
    if path == PRINTED:
        print(text)
        return
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise UsageError(f"{one_line(path)} cannot be written: {reason}") from None


def one_line(text: str | Path | None) -> str:
    """Return what was typed on one line, short, and without characters that a screen would obey."""
    from oomdoctor.views import labels

    return labels.clean(str(text), 120)


def shown(*words: str) -> str:
    """Return what was typed in quotes, on one line, and cut where it is long."""
    return f"'{one_line(' '.join(words))}'"
