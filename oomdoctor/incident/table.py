"""The whole message table: every row, in the order of priority.

What libraries have written is data, in the files of ``wordings``; what is read by its grammar is ``rows_structure``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from oomdoctor.incident import rows_structure
from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_HOME: Final = Path(__file__).parent / "wordings"
_SHAPES: Final = frozenset({"pattern", "requires", "context", "unless", "on_line", "denied"})
_WORD: Final = re.compile(r"<<(\w+)>>")


def _rows(name: str) -> Iterator[Format]:
    """Yield the rows of one file: ``like`` names what a row shares with others, beside what it says itself.

    A shape may be a list of its pieces; ``<<name>>`` in it stands for one of the file's ``words``. ``denied`` may be
    true, for what denies a refusal anywhere.
    """
    tables = tomllib.loads((_HOME / f"{name}.toml").read_text(encoding="utf-8"))
    for row in tables["row"]:
        shared = tables["shared"][row.pop("like")] if "like" in row else {}
        yield Format(**{key: _read(key, value, tables.get("words", {})) for key, value in (shared | row).items()})


def _read(key: str, value: Any, words: Mapping[str, Any]) -> Any:
    if value is True and key == "denied":
        return rows_structure.DENIED
    if key in _SHAPES:
        return _shape(value, words)
    if key == "family":
        return Family[value]
    if key == "clauses":
        return tuple(_shape(shape, words) for shape in value)
    if key == "families":
        return tuple((_shape(shape, words), Family[family]) for shape, family in value)
    return tuple(value) if isinstance(value, list) else value


def _shape(given: str | Sequence[str], words: Mapping[str, Any]) -> re.Pattern[str]:
    text = "".join(given)
    while _WORD.search(text):
        text = _WORD.sub(lambda word: "".join(words[word[1]]), text)
    return compiled(text)


FORMATS: Final[tuple[Format, ...]] = (
    *(row for name in ("torch", "runtime", "serving", "framework", "host", "killed", "limits") for row in _rows(name)),
    *(row for name in ("translated", "class", "lookalike") for row in _rows(name)),
    *rows_structure.ROWS,
)
"""Every row, in the order of priority."""
