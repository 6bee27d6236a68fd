"""A document in the language of the reader: its texts are translated, and code, figures and diffs stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rich.text import Text

from oomdoctor.language import is_chinese, say
from oomdoctor.views.document import (
    Bar,
    Block,
    Causes,
    Diff,
    Document,
    Fixes,
    FixRow,
    Fold,
    Head,
    Inline,
    Items,
    Line,
    Notice,
    Section,
    Segment,
    Source,
    Static,
    Table,
    Timeline,
    Treemap,
    prose,
)

_CODE: Final = frozenset({"path", "freeing", "command"})
"""Styles of what comes from the user's program."""
_NAMELESS: Final = "local `"
"""How the path of a holder begins that is told in our words."""


def translated(document: Document) -> Document:
    """Return ``document`` in the language that was chosen; itself where that is English."""
    return tuple(map(_block, document)) if is_chinese() else document


def inline(content: Inline) -> Inline:
    """Return what stands in a line, stretch by stretch of one look."""
    if isinstance(content, str):
        return say(content)
    if not is_chinese():
        return content
    if content.style:
        return Text(content.plain if str(content.style) in _CODE else say(content.plain), content.style)
    stretches, found = _stretches(content), Text()
    if len(stretches) == 2 and stretches[0][1] not in _CODE and stretches[1][0].startswith(": "):
        said = say(content.plain)  # a name before its sentence
        found = prose(said)
        found.stylize_before(stretches[0][1], 0, len(said.partition("：")[0]))  # noqa: RUF001
        return found
    for stretch, style in stretches:
        if style in _CODE:
            found.append(say(stretch) if stretch.startswith(_NAMELESS) else stretch, style)
        elif style:
            found.append(say(stretch), style)
        else:  # a sentence, with code between backticks
            found.append_text(prose(say(stretch)))
    return found


def _stretches(text: Text) -> list[tuple[str, str]]:
    """Return the stretches of a text with their styles; a sentence and the code in it are one."""
    stretches, at = [], 0
    for span in sorted((one for one in text.spans if str(one.style) != "quoted"), key=lambda one: one.start):
        stretches += [(text.plain[at : span.start], ""), (text.plain[span.start : span.end], str(span.style))]
        at = span.end
    return [one for one in (*stretches, (text.plain[at:], "")) if one[0]]


def _block(block: Block) -> Block:
    match block:
        case Line():
            return replace(block, text=inline(block.text))
        case Head():
            return replace(block, title=say(block.title), aside=say(block.aside))
        case Source():
            return replace(block, place=say(block.place), before=say(block.before))
        case Items():
            return replace(block, rows=tuple(map(inline, block.rows)))
        case Table():
            return replace(block, rows=tuple(tuple(map(inline, row)) for row in block.rows))
        case Notice():
            facts = tuple((say(name), say(told)) for name, told in block.facts)
            return replace(block, title=say(block.title), facts=facts)
        case Causes():
            rows = (
                one._replace(title=say(one.title), confidence=say(one.confidence), because=tuple(map(say, one.because)))
                for one in block.rows
            )
            return replace(block, rows=tuple(rows))
        case Fold():
            blocks = tuple(map(_block, block.blocks))
            return replace(block, title=say(block.title), blocks=blocks, aside=say(block.aside))
        case Static() | Section():
            return replace(block, blocks=tuple(map(_block, block.blocks)))
        case Bar():
            return replace(block, title=say(block.title), segments=tuple(map(_segment, block.segments)))
        case Timeline():
            return replace(block, sentence=say(block.sentence))
        case Fixes():
            return replace(block, rows=tuple(map(_fix, block.rows)))
        case Diff() | Treemap():
            return block


def _segment(segment: Segment) -> Segment:
    return replace(segment, label=say(segment.label))


def _fix(row: FixRow) -> FixRow:
    return replace(
        row,
        title=say(row.title),
        effect=say(row.effect),
        promise=say(row.promise),
        peak=say(row.peak),
        basis=say(row.basis),
        verdict_text=say(row.verdict_text),
        slowdown=say(row.slowdown),
        notes=tuple(map(say, row.notes)),
    )
