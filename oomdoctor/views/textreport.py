"""The report as parts of text: sentences first, then each memory with its bar, its holders and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from oomdoctor.views import textbar
from oomdoctor.views.card import Card, Fact
from oomdoctor.views.growth import GrowthRows
from oomdoctor.views.survey import Survey
from oomdoctor.views.textparts import bar_width, grid, holder_parts, indented, is_narrow, prose

_STYLES: Final = {"+": "red", "-": "green"}


def survey_parts(survey: Survey, width: int) -> list[RenderableType]:
    """Return all of the report."""
    parts: list[RenderableType] = [_headline(card.headline) for card in survey.cards]
    if survey.since_cell:
        parts.append(prose(survey.since_cell))
    if survey.growth is not None:
        parts += ["", *growth_parts(survey.growth, width)]
    for card in survey.cards:
        parts += ["", *_card(card, width)]
    if survey.absent:
        parts += ["", *(Text(line, "dim") for line in survey.absent)]
    return parts


def growth_parts(growth: GrowthRows, width: int) -> list[RenderableType]:
    """Return what grew: the sentence, and the changes behind it."""
    parts: list[RenderableType] = [prose(growth.sentence)]
    if growth.rows and is_narrow(width):
        for row in growth.rows:
            parts += [
                Text(f"{row.change}  ", _STYLES.get(row.change[0], "")) + Text(row.where),
                indented(prose(row.what)),
            ]
    elif growth.rows:
        table = grid()
        table.add_column(justify="right", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column()
        for row in growth.rows:
            table.add_row(Text(row.change, _STYLES.get(row.change[0], "")), prose(row.what), row.where)
        parts.append(indented(table))
    return [*parts, *([indented(Text(growth.more, "dim"))] if growth.more else [])]


def _headline(sentence: str) -> Text:
    text = prose(sentence)
    text.stylize("bold", 0, len(sentence.partition(": ")[0]))
    return text


def _card(card: Card, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [] if card.bars else [Text(card.title, "bold")]
    for bar in card.bars:
        parts += textbar.draw(bar, bar_width(width))
    if card.aside:
        parts.append(Text(card.aside, "dim"))
    parts += holder_parts("Top holders", card.holders, width)
    if card.facts:
        parts += ["", *(_stacked(card.facts) if is_narrow(width) else [_table(card.facts, width)])]
    return parts


def _table(facts: tuple[Fact, ...], width: int) -> RenderableType:
    table = grid()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(max_width=max(26, width // 3))
    table.add_column(ratio=1, overflow="fold")
    for fact in facts:
        table.add_row(fact.figure, fact.name, prose(fact.why))
    return indented(table)


def _stacked(facts: tuple[Fact, ...]) -> Iterator[RenderableType]:
    for fact in facts:
        yield Text(f"{fact.figure}  {fact.name}")
        if fact.why:
            yield indented(prose(fact.why))
