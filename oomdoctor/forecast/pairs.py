"""Two fixes in one cell, for where neither is enough.

Their patches are made for the same text, each for itself, and then joined line by line: what one writes must not touch
what the other does. Where one of them cannot be written in the source, it changes the live objects while the other's
text runs. Two changes of live objects are never made together: they may be of the same object.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Final, NamedTuple

from oomdoctor.forecast.attempts import patched
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Attempt, Cell
from oomdoctor.program.magics import mask

__all__ = ["joined", "joined_patches"]

_SAME_PLACE: Final = "both change the same place of the source"


class _Change(NamedTuple):
    """Lines ``begin`` to ``end`` of a text become others."""

    begin: int
    end: int
    lines: tuple[str, ...]


def joined(
    source: str, number: int, first: tuple[Patch | Refused, Attempt], second: tuple[Patch | Refused, Attempt]
) -> tuple[Patch | Refused, Attempt | Refused]:
    """Return how to run the failing cell with two changes, each given as its patch and how to run it alone.

    Args:
        source: the text of the failing cell, whose number is ``number``.
    """
    patches = [patch for patch, _ in (first, second) if isinstance(patch, Patch)]
    attempts = [first[1], second[1]]
    live = tuple(make for attempt in attempts for make in attempt.live)
    if not patches:
        why = Refused("both change the live objects")
        return why, why
    patch = patches[0] if len(patches) == 1 else joined_patches(*patches)
    if isinstance(patch, Refused):
        return patch, patch
    attempt = patched(Cell(number=number, source=source), patch, live)
    if len(patches) == 2:
        return patch, attempt
    why = next(one for one, _ in (first, second) if isinstance(one, Refused))
    return why, attempt


def joined_patches(first: Patch, second: Patch) -> Patch | Refused:
    """Return both patches as one, or why they cannot be."""
    others = {edit.cell: edit for edit in second.edits}
    edits: list[Edit] = []
    for edit in first.edits:
        both = _joined_edits(edit, others.pop(edit.cell)) if edit.cell in others else edit
        if isinstance(both, Refused):
            return both
        edits.append(both)
    return Patch(edits=tuple(sorted([*edits, *others.values()], key=lambda edit: edit.cell)))


def _joined_edits(first: Edit, second: Edit) -> Edit | Refused:
    if first.before != second.before or not (first.is_whole and second.is_whole):
        return Refused(f"both change {first.name}")
    text = _joined_texts(first.before, first.after, second.after)
    if isinstance(text, Refused):
        return text
    return replace(first, after=text, replay=text if first.file is None else "")


def _joined_texts(before: str, first: str, second: str) -> str | Refused:
    lines = before.splitlines(keepends=True)
    ours, theirs = _changes(lines, first), _changes(lines, second)
    merged = dict.fromkeys(ours)
    for change in theirs:
        if change in merged:
            continue
        if near := [one for one in ours if _touch(one, change)]:
            if not all(map(_only_imports, [*near, change])):
                return Refused(_SAME_PLACE)
            known = {line.strip() for one in near for line in one.lines}
            change = change._replace(lines=tuple(line for line in change.lines if line.strip() not in known))
        merged[change] = None
    for change in sorted(merged, key=lambda one: one.begin, reverse=True):
        lines[change.begin : change.end] = change.lines
    text = "".join(lines)
    try:
        ast.parse(mask(text).text)
    except (SyntaxError, ValueError):
        return Refused(_SAME_PLACE)
    return text


def _changes(before: list[str], after: str) -> list[_Change]:
    lines = after.splitlines(keepends=True)
    matcher = SequenceMatcher(None, before, lines, autojunk=False)
    return [
        _Change(begin, end, tuple(lines[new_begin:new_end]))
        for tag, begin, end, new_begin, new_end in matcher.get_opcodes()
        if tag != "equal"
    ]


def _touch(one: _Change, other: _Change) -> bool:
    return one.begin <= other.end and other.begin <= one.end


def _only_imports(change: _Change) -> bool:
    """Whether a change does nothing but add imports, which may stand beside others in any order."""
    texts = [line.strip() for line in change.lines if line.strip()]
    return change.begin == change.end and all(text.startswith(("import ", "from ")) for text in texts)
