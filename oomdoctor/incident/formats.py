"""The table of failure messages: one row for each wording that a library has used.

A new wording is a new row in one of the ``rows_*`` modules, with a sample of our own; no code changes. A row names a
literal that each text of its format contains (found at the speed of ``str.find``), a pattern that confirms it, and
clauses that read the numbers. Clauses are searched one by one, so that a text whose head or tail is lost still gives
the numbers that it has. What no library's own row knows is read by the rows of ``rows_structure``, which look for the
grammar that such messages have in common, and tell by the words around it who refused.

"Cached" has had three meanings, and each has a group name of its own: ``cached`` (PyTorch 1.0 to 1.3) is unused
cache and *excludes* what is allocated, ``reserved`` (1.4 to 2.0) *includes* it, ``unallocated`` (2.1 on) is the
unused part once more. ``oomdoctor.incident.numbers`` makes one ``reserved`` out of them.

Limits: every repetition in a pattern has an upper bound, so matching takes time linear in the text. The price is that
a file name longer than the bound hides a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from oomdoctor.model.incident import Family

__all__ = ["ANYWHERE", "Format", "compiled"]

_SIZE: Final = r"(?:\d{1,20}(?:[.,]\d{0,6})?|\.\d{1,6})\s?(?:[KMGTPE]i?B|bytes?|[KMGT]\b|B\b)"
_COUNT: Final = r"\d{1,20}(?:,\d{3}){0,6}"
_NUMBER: Final = r"\d{1,12}(?:\.\d{0,6})?"
_PLACE: Final = re.compile(r"\{(?P<name>[a-z]+)(?P<kind>[#@]?)\}")

ANYWHERE: Final = 1_500
"""Characters before a match in which ``context`` and ``unless`` look as well: the traceback above the message."""


def compiled(shape: str) -> re.Pattern[str]:
    r"""Compile the shape of a message, ignoring case.

    A space in it stands for any run of white space, a space with a question mark for none as well.
    ``{free}`` reads a size with its unit, ``{free#}`` a plain count, ``{free@}`` a number in the unit of the total.
    """
    spaced = shape.replace(" ?", r"\s{0,6}").replace(" ", r"\s{1,6}")
    return re.compile(_PLACE.sub(_group, spaced), re.IGNORECASE | re.MULTILINE)


def _group(place: re.Match[str]) -> str:
    name, kind = place["name"], place["kind"]
    if kind == "@":
        return f"(?P<{name}_as_total>{_NUMBER})"
    return f"(?P<{name}>{_COUNT if kind == '#' else _SIZE})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One wording of a failure.

    Attributes:
        title: what such a message says, for a reader who has not met it.
        versions: what prints it, and since when.
        needles: lower-case literals; each text of this format contains one of them.
        pattern: confirms a needle; may have named groups.
        clauses: shapes that are searched after the start of the pattern, each for its own groups; the first wins.
        requires: must be found from the match on; ``context``: before it or after it; ``unless``: in neither.
        on_line: must be found on the lines of the match or on the one above.
        denied: must not be found on the line up to the match, where a sentence says that nothing happened.
        families: the family by the words on the line of the match, or else around it; the first that is found. A row
            with families of its own matches nothing where none is found.
        device: the device by name; ``{}`` stands for the index that the text gives.
        vague: says no more than the class of the error does; a row that says more about the same failure replaces it.
        reach: characters after the match that belong to the same message.
        sample: a made-up text in this wording.
    """

    name: str
    family: Family
    title: str
    versions: str
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    clauses: tuple[re.Pattern[str], ...] = ()
    requires: re.Pattern[str] | None = None
    context: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    on_line: re.Pattern[str] | None = None
    denied: re.Pattern[str] | None = None
    families: tuple[tuple[re.Pattern[str], Family], ...] = ()
    device: str | None = None
    vague: bool = False
    reach: int = 400
    sample: str

    @property
    def is_oom(self) -> bool:
        """Whether this is a failure to get memory."""
        return self.family not in (Family.NOT_OOM, Family.TRITON_RESOURCE)
