"""The table of failure messages: one row for each wording that a library has used.

A new wording is a new row in one of the files of ``wordings``, with a sample of our own; no code changes. A row names a
literal that each text of its format contains (found at the speed of ``str.find``), a pattern that confirms it, and
clauses that read the numbers one by one, as a head or a tail may be lost. What no row of a library knows is read by
those of ``structure.toml``: by the grammar that such messages share, and the words around them that tell who refused.

"Cached" has had three meanings, and each has a group name of its own: ``cached`` (PyTorch 1.0 to 1.3) is unused
cache and *excludes* what is allocated, ``reserved`` (1.4 to 2.0) *includes* it, ``unallocated`` (2.1 on) is the
unused part once more. ``oomdoctor.incident.scan.settle`` makes one ``reserved`` out of them.

A line that gives advice, sets a condition or is source code denies what it says; such a match is told as well, because
the joined lines must not bring it back. Every repetition in a pattern has an upper bound, so matching takes time linear
in the text; a file name longer than the bound hides a message.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from oomdoctor.incident.frames import line_end_of, line_start_of
from oomdoctor.model.incident import Family

_SIZE: Final = (
    r"(?:\d{1,3}(?:[.,]\d{3}){1,5}(?:[.,]\d{0,2})?|\d{1,20}(?:[.,]\d{0,6})?|\.\d{1,6})"
    r"\s?(?:[KMGTPE]i?B|bytes?|[KMGT]\b|B\b)"
)
_COUNT: Final = r"\d{1,20}(?:,\d{3}){0,6}"
_NUMBER: Final = r"\d{1,12}(?:\.\d{0,6})?"
_SPACES: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\]){1,80}\]| \??")
_WHITE: Final = re.compile(r"\\s(?:\{\d,\d\}|\?)?")
"""What ``compiled`` makes of a space in a shape."""
_PLACE: Final = re.compile(r"\{(?P<name>[a-z]+)(?P<kind>[#@]?)\}")

ANYWHERE: Final = 1_500
"""Characters before a match in which ``context`` and ``unless`` look as well: the traceback above the message."""

SOURCE: Final = re.compile(
    r"(?:^|[;{}]\s?)(?:case\s|(?:\}\s?)?catch\s?\(|#\s?define\s|static\s|throw\s)[^\n]{0,120}$"
    r"|\b(?:f?puts|[fs]?n?printf|fwrite|perror|print|echo|printk|die|errx?|warnx?|panic!?|log\w{0,4}\.\w{1,10}|assert\w{0,20})"
    r"\s?\(\s?(?:[\w.>-]{1,40}\s?,\s?){0,3}[fbr]{0,2}[\"'][^\"'\n]{0,120}$"
    r"|\b(?:[a-z]\w{1,40}|[A-Z_]{2,30})\((?:[\w.&*>-]{1,40}\s?,\s?){0,3}\"[^\"\n]{0,120}$"
    r"|(?:\w(?:\[\])?\s=|<<)\s?\"[^\"\n]{0,120}$",
)
"""What stands before a message in source code: a call that would print it, a constant, a branch that handles it."""
SOURCE_AFTER: Final = re.compile(r"[^\n]{0,120}?(?:\"\s?\){0,3}\s?;|\*/|\)\s\\)\s?$", re.MULTILINE)
"""What ends such a line: a statement of C, a comment, or a macro that goes on."""


def compiled(shape: str) -> re.Pattern[str]:
    r"""Compile the shape of a message, ignoring case.

    A space in it stands for any run of white space, a space with a question mark for none as well, and in a set for one
    of any kind.
    ``{free}`` reads a size with its unit, ``{free#}`` a plain count, ``{free@}`` a number in the unit of the total.
    """
    return re.compile(_PLACE.sub(_group, _SPACES.sub(_spaced, shape)), re.IGNORECASE | re.MULTILINE)


@cache
def unspaced(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return ``pattern`` for a text without white space: wherever a wrap cut it, and whatever that swallowed."""
    return re.compile(_WHITE.sub("", pattern.pattern), pattern.flags)


def lowered_of(lines: str) -> str:
    """Return ``lines`` in lower case, with every character where it was."""
    lowered = lines.lower()
    if len(lowered) != len(lines):  # a few letters become two when lowered
        lowered = "".join(letter.lower() if letter.isascii() else letter for letter in lines)
    return lowered


def _spaced(found: re.Match[str]) -> str:
    if found[0][0] == "\\":
        return found[0]
    if found[0][0] == "[":  # of a set of characters, one
        return found[0].replace(" ", r"\s")
    return r"\s{0,6}" if found[0] == " ?" else r"\s{1,6}"


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
        beside: where there are any, one of these lower-case literals stands near the needle of each match. It spares a
            common needle the pattern.
        window: characters before and after the beginning of a needle in which the pattern is tried.
        pattern: confirms a needle; may have named groups.
        clauses: shapes that are searched after the start of the pattern, each for its own groups; the first wins.
        requires: must be found from the match on; ``context``: before it or after it; ``unless``: in neither.
        on_line: must be found on the lines of the match or on the one above.
        denied: must not be found on the line up to the match, where a sentence says that nothing happened. Nothing is
            matched in what looks like the source code of a program (``SOURCE``, ``SOURCE_AFTER``).
        families: the family by the words on the line of the match, or else around it; the first that is found. A row
            with families of its own matches nothing where none is found.
        device: the device by name; ``{}`` stands for the index that the text gives.
        flows: one sentence, which a terminal may have wrapped anywhere; its numbers are read across the ends of lines.
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
    beside: tuple[str, ...] = ()
    window: tuple[int, int] = (400, 600)
    clauses: tuple[re.Pattern[str], ...] = ()
    requires: re.Pattern[str] | None = None
    context: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    on_line: re.Pattern[str] | None = None
    denied: re.Pattern[str] | None = None
    families: tuple[tuple[re.Pattern[str], Family], ...] = ()
    device: str | None = None
    flows: bool = False
    vague: bool = False
    reach: int = 400
    sample: str

    @property
    def is_oom(self) -> bool:
        """Whether this is a failure to get memory."""
        return self.family not in (Family.NOT_OOM, Family.TRITON_RESOURCE)


_HOME: Final = Path(__file__).parent / "wordings"
_FILES: Final = (
    *("torch", "runtime", "serving", "framework", "host", "killed", "limits", "translated", "class", "lookalike"),
    "structure",
)
"""In the order of priority."""
_TABLES: Final = {name: tomllib.loads((_HOME / f"{name}.toml").read_text(encoding="utf-8")) for name in _FILES}
_GRAMMAR: Final = _TABLES["structure"]
_SHAPES: Final = frozenset({"pattern", "requires", "context", "unless", "on_line", "denied"})
_WORD: Final = re.compile(r"<<(\w+)>>")


def _rows(tables: Mapping[str, Any]) -> Iterator[Format]:
    """Yield the rows of one file: ``like`` names what a row shares with others, beside what it says itself.

    A shape may be a list of its pieces; ``<<name>>`` in it stands for one of the file's ``words``. It may be true, for
    the one that ``structure.toml`` has for any row, and so may families be named that are listed there.
    """
    for row in tables["row"]:
        shared = tables["shared"][row["like"]] if "like" in row else {}
        given = {key: value for key, value in (shared | row).items() if key != "like"}
        yield Format(**{key: _read(key, value, tables.get("words", {})) for key, value in given.items()})


def _read(key: str, value: Any, words: Mapping[str, Any]) -> Any:
    if key in _SHAPES:
        return re.compile("".join(_GRAMMAR["plain"][key])) if value is True else _shape(value, words)
    if key == "family":
        return Family[value]
    if key == "clauses":
        return tuple(_shape(shape, words) for shape in value)
    if key == "families":
        if isinstance(value[0], str):
            named = [one for name in value for one in _GRAMMAR["families"][name]]
            return tuple((re.compile("".join(shape)), Family[family]) for shape, family in named)
        return tuple((_shape(shape, words), Family[family]) for shape, family in value)
    return tuple(value) if isinstance(value, list) else value


def _shape(given: str | Sequence[str], words: Mapping[str, Any]) -> re.Pattern[str]:
    text = "".join(given)
    while _WORD.search(text):
        text = _WORD.sub(lambda word: "".join(words[word[1]]), text)
    return compiled(text)


FORMATS: Final = tuple(row for tables in _TABLES.values() for row in _rows(tables))
"""Every row, in the order of priority."""


AROUND: Final = 400
LINE: Final = 200
"""Characters of its own line that a message has to itself before and after the match."""
_LONG_LINE: Final = 2_000
_HEAD: Final = compiled(r"\b(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory")
"""Where a message of PyTorch begins: the numbers after it are its own."""
_LEADS_ON: Final = re.compile(
    r"(?:,|\b(?:can|could|may|might|will|would|should|to|the|an?|of|and|or|if|when|that|is|not|your?|it|this|with|by))$"
)
"""What no sentence ends with."""
_PROSE: Final = 20
"""Characters of a line of prose at least."""
_HITS: Final = 25
"""Hits of one literal that are looked at from either end of the text."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A match of a row; ``family`` is None where its line says that nothing happened."""

    match: re.Match[str]
    end: int
    family: Family | None


def hits(row: Format, lines: str, lowered: str) -> Iterator[Hit]:
    """Yield the confirmed matches of a row, each with the end of what may belong to its message."""
    for needle in row.needles:
        places = _places(lowered, needle)
        for at, following in zip(places, [*places, -1][1:], strict=True):
            match = _confirmed(row, lines, lowered, at)
            if match is None:
                continue
            if _is_denied(row, lines, match):
                yield Hit(match, match.end(), None)
                continue
            end = min(len(lines), match.end() + row.reach)
            if following >= match.end():
                end = min(end, following)
            head = _HEAD.search(lines, match.end(), end)
            if head is not None:
                end = head.start()
            family = _family(row, lines, match) if _in_place(row, lines, match, end) else None
            if family is not None:
                yield Hit(match, end, family)


def _places(lowered: str, needle: str) -> list[int]:
    """Return where ``needle`` stands, from either end of the text, in order."""
    first: list[int] = []
    at = lowered.find(needle)
    while at >= 0 and len(first) < _HITS:
        first.append(at)
        at = lowered.find(needle, at + len(needle))
    if at < 0:
        return first
    last: list[int] = []
    low, high = at, len(lowered)
    while len(last) < _HITS and (at := lowered.rfind(needle, low, high)) >= 0:
        last.append(at)
        high = at
    return first + last[::-1]


def _confirmed(row: Format, lines: str, lowered: str, at: int) -> re.Match[str] | None:
    low, high = max(0, at - row.window[0]), min(len(lines), at + row.window[1])
    if row.beside and all(lowered.find(word, low, high) < 0 for word in row.beside):
        return None
    for match in row.pattern.finditer(lines, low, high):
        if match.start() <= at < match.end():
            return match
        if match.start() > at:
            break
    return None


def _in_place(row: Format, lines: str, match: re.Match[str], end: int) -> bool:
    before = max(0, match.start() - ANYWHERE)
    if row.requires and not _is_there(row.requires, lines[match.start() : end], flows=row.flows):
        return False
    if row.context and not row.context.search(lines, before, end):
        return False
    if row.unless and row.unless.search(lines, before, end):
        return False
    if row.on_line:
        low, high = _line_of(lines, match)
        above = line_start_of(lines, low - 1, max(0, AROUND - match.start() + low))
        return row.on_line.search(lines, above, min(high, match.end() + LINE)) is not None
    return True


def _is_there(words: re.Pattern[str], stretch: str, *, flows: bool) -> bool:
    return bool(words.search(stretch) or (flows and unspaced(words).search("".join(stretch.split()))))


def _is_denied(row: Format, lines: str, match: re.Match[str]) -> bool:
    """Whether the line of the match says that nothing happened, or is a line of source code."""
    low, high = _line_of(lines, match)
    before = lines[max(low, match.start() - AROUND) : match.start()]
    return (
        SOURCE.search(before) is not None
        or SOURCE_AFTER.match(lines, match.end(), high) is not None
        or (row.denied is not None and row.denied.search(_line_above(lines, low) + before) is not None)
    )


def _line_above(lines: str, low: int) -> str:
    """Return the line above the one that begins at ``low`` if its sentence goes on there, as wrapped prose does."""
    if low == 0:
        return ""
    above = lines[line_start_of(lines, low - 1, AROUND) : low - 1]
    leads_on = _LEADS_ON.search(above) or (lines[low : low + 1].islower() and above[-1:].islower())
    return f"{above} " if leads_on and len(above) >= _PROSE else ""


def _line_of(lines: str, match: re.Match[str]) -> tuple[int, int]:
    """Return where the lines of the match begin and end, of a very long line its part around the match."""
    return line_start_of(lines, match.start(), _LONG_LINE), line_end_of(lines, match.end(), _LONG_LINE)


def _family(row: Format, lines: str, match: re.Match[str]) -> Family | None:
    """Return who refused: by the words on the line of the match, by those around it, or else the row's default."""
    if not row.families:
        return row.family
    low, high = _line_of(lines, match)
    line = max(low, match.start() - AROUND), min(high, match.end() + LINE)
    for start, end in (line, (max(0, line[0] - AROUND), min(len(lines), line[1] + LINE))):
        for words, family in row.families:
            if words.pattern and words.search(lines, start, end):
                return family
    return next((family for words, family in row.families if not words.pattern), None)
