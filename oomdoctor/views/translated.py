"""A document in the language of the reader: its texts are translated, and code, figures and diffs stay as they are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from rich.text import Text

from oomdoctor.language import is_chinese, say
from oomdoctor.views.document import Cause, Document, Inline, prose

_CODE: Final = frozenset({"path", "freeing", "command"})
"""Styles of what comes from the user's program."""
_OURS: Final = re.compile(r"\b(Said|Inline|Document|Cause|Segment|FixRow)\b")
"""In the types of fields that have texts of ours."""
_NAMELESS: Final = "local `"
"""How the path of a holder begins that is told in our words."""


def translated(document: Document) -> Document:
    """Return ``document`` in the language that was chosen; itself where that is English."""
    return tuple(map(_told, document)) if is_chinese() else document


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


def _told(part: Any) -> Any:
    """Return a text, a block or a row of one in the language that was chosen."""
    if isinstance(part, str | Text):
        return inline(part)
    if type(part) is tuple:
        return tuple(map(_told, part))
    ours = [name for name, kind in type(part).__annotations__.items() if _OURS.search(str(kind))]
    told = {name: _told(getattr(part, name)) for name in ours}
    if not told:
        return part
    return part._replace(**told) if isinstance(part, Cause) else replace(part, **told)
