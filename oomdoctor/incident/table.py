"""The whole message table: every row, in the order of priority.

What a library has written word for word is data, in the files of ``wordings``; what is put together of the words of
several, or read by its grammar, is made in the ``rows_*`` modules.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oomdoctor.incident import rows_class, rows_limits, rows_structure, rows_translated
from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_HOME: Final = Path(__file__).parent / "wordings"
_SHAPES: Final = frozenset({"pattern", "requires", "context", "unless", "on_line", "denied"})


def _rows(name: str) -> Iterator[Format]:
    """Yield the rows of one file: ``like`` names what a row shares with others, beside what it says itself.

    A shape may be a list of its pieces.
    """
    tables = tomllib.loads((_HOME / f"{name}.toml").read_text(encoding="utf-8"))
    for row in tables["row"]:
        shared = tables["shared"][row.pop("like")] if "like" in row else {}
        yield Format(**{key: _read(key, value) for key, value in (shared | row).items()})


def _read(key: str, value: Any) -> Any:
    if key in _SHAPES:
        return compiled("".join(value))
    if key == "family":
        return Family[value]
    if key == "clauses":
        return tuple(compiled("".join(shape)) for shape in value)
    if key == "families":
        return tuple((compiled("".join(shape)), Family[family]) for shape, family in value)
    return tuple(value) if isinstance(value, list) else value


FORMATS: Final[tuple[Format, ...]] = (
    *(row for name in ("torch", "runtime", "serving", "framework", "host", "killed") for row in _rows(name)),
    *rows_limits.ROWS,
    *rows_translated.ROWS,
    *rows_class.ROWS,
    *_rows("lookalike"),
    *rows_structure.ROWS,
)
"""Every row, in the order of priority."""
