"""How text looks where it goes: as wide as a terminal, in its colours and its characters, and plain elsewhere."""

from __future__ import annotations

import codecs
import os
import shutil
from typing import Final, TextIO, TypedDict

_NARROWEST, _WIDEST, _LOG = 20, 120, 100
_COLOURLESS: Final = ("", "dumb", "unknown")

SUBSTITUTE: Final = "oomdoctor.substitute"
"""The name of an error handler for streams: what they cannot take is written in ASCII."""

_BAR: Final = zip("█▓▒░▚▪▞◆▤▥▦▨▣◇▬┄■▩▧·╱╳≡", "#PGOBbkxhcpt@s%-~e:./X=", strict=True)  # noqa: RUF001
_COURSE: Final = zip("▁▂▃▄▅▆▇", "_.,-+*%", strict=True)
_SIGNS: Final = zip("≈×▼│✓✗µ", "~xv|+xu", strict=True)  # noqa: RUF001
_ASCII: Final = {"→": "->", "…": "...", "±": "+-", "ᵀ": "^T", "Ψ": "Psi", **dict((*_BAR, *_COURSE, *_SIGNS))}


class Looks(TypedDict):
    """What the text views are told of the place that they are shown in."""

    width: int
    colour: bool


def looks(stream: TextIO | None) -> Looks:
    """Return the width and whether there are colours: on a terminal that has them, unless NO_COLOR is set.

    A kernel's standard output is no terminal.

    Source: https://no-color.org
    """
    coloured = _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in _COLOURLESS
    return Looks(width=_width(stream), colour=coloured)


def fitted(text: str, stream: TextIO | None) -> str:
    """Return ``text`` in the characters that ``stream`` can take: those of an ASCII locale, say, and no surrogates."""
    encoding = getattr(stream, "encoding", None)
    try:
        return text.encode(encoding, SUBSTITUTE).decode(encoding) if isinstance(encoding, str) else text
    except (LookupError, UnicodeError):  # what stands in for a stream may name no real encoding
        return text


def _width(stream: TextIO | None) -> int:
    """Return the width of the terminal; a fixed one for logs and files."""
    if not _is_terminal(stream):
        return _LOG
    return min(max(shutil.get_terminal_size((_LOG, 24)).columns, _NARROWEST), _WIDEST)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # what stands in for a stream may lack it, and a closed one raises
        return False


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(one) or one.encode("ascii", "backslashreplace").decode() for one in lacking), error.end


codecs.register_error(SUBSTITUTE, _substitute)
