"""A cell before it is run as parts of text: the answer first, then how its memory goes, the cards, and the changes."""

from __future__ import annotations

from typing import Final

from rich.console import RenderableType
from rich.text import Text

from oomdoctor.model.plan import Verdict
from oomdoctor.views import textbar, words
from oomdoctor.views.memplan import Foresight, PlaceRow
from oomdoctor.views.textparts import bar_width, grid, heading, indented, is_narrow, prose, timeline_parts

_STYLES: Final = {Verdict.FITS: "green", Verdict.BORDERLINE: "yellow", Verdict.TOO_LARGE: "red", Verdict.UNKNOWN: ""}


def memplan_parts(facts: Foresight, width: int) -> list[RenderableType]:
    """Return all that stands above the fixes."""
    headline = prose(facts.headline)
    headline.highlight_words([f"{words.VERDICT_MARKS[facts.verdict]} {facts.verdict.value}"], _STYLES[facts.verdict])
    parts: list[RenderableType] = [Text(facts.title, "bold"), headline]
    if facts.least:
        parts.append(prose(facts.least))
    if facts.place:
        parts += ["", Text.assemble("  peak at ", (f"{facts.place} │ ", "dim"), (facts.source_line, "bold"))]
    if facts.bar is not None:
        parts += ["", *textbar.draw(facts.bar, bar_width(width))]
    if facts.temporaries:
        parts += ["", heading("Temporaries at the peak"), *(indented(Text(text)) for text in facts.temporaries)]
    if facts.timeline is not None:
        parts += ["", heading("How the memory goes"), *timeline_parts(facts.timeline, width)]
    if facts.work:
        parts.append(indented(Text(facts.work)))
    parts += ["", heading("Batch"), indented(prose(facts.batch))]
    if facts.places:
        parts += ["", heading("Cards", facts.places_note), *_places(facts.places, width)]
    return parts


def memplan_tail(facts: Foresight) -> list[RenderableType]:
    """Return what stands below the diff."""
    return ["", Text(facts.took, "dim")]


def _places(rows: tuple[PlaceRow, ...], width: int) -> list[RenderableType]:
    if is_narrow(width):
        lines: list[RenderableType] = []
        for row in rows:
            lines.append(Text.assemble((row.name, "bold"), ": ", (row.verdict_text, _STYLES[row.verdict])))
            lines.append(indented(Text("; ".join(filter(None, [row.need, row.capacity])))))
        return lines
    table = grid()
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(Text(row.name, "bold"), Text(row.verdict_text, _STYLES[row.verdict]), row.need, row.capacity)
    return [indented(table)]
