"""A document as text for a terminal, and for every frontend that shows no HTML.

Text of the user's goes into ``rich.text.Text`` and never through rich's markup, so a file called ``[red]`` is
shown as such.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text
from rich.theme import Theme

from oomdoctor.language import say
from oomdoctor.views import labels
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
from oomdoctor.views.translated import translated

_STYLES: Final = Theme(
    {
        **dict.fromkeys(("figure", "detail"), "none"),
        **dict.fromkeys(("quoted", "path", "strong"), "bold"),
        "muted": "dim",
        "command": "cyan",
        "freeing": "cyan",
        "title": "bold red",
        "healed": "bold green",
        "unhealed": "bold yellow",
        "good": "green",
        "warn": "yellow",
        "bad": "red",
        "shrank": "green",
        "grew": "red",
    }
)
_NEVER_JOINED: Final = frozenset({"free", "asked", "over"})
_NUMBER: Final[dict[str, Any]] = {"justify": "right", "no_wrap": True}
_LINE_STYLES: Final = {"title": "title", "name": "strong", "muted": "muted", "more": "muted"}
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_INDENT, _GAP = 2, 2
_NARROW: Final = 60
_LONGEST_BAR: Final = 100
_SLIM: Final = 3
"""Segments that the legend of a slim bar names."""


def render(
    document: Document, *, width: int = 100, colour: bool = False, names: Mapping[int, str] | None = None
) -> str:
    """Return ``document`` in lines of at most ``width`` columns; ``names`` are what a script calls its cells."""
    state = random.getstate()  # rich numbers its styles with the user's random number generator
    try:
        console = Console(
            file=StringIO(),
            width=width,
            color_system="standard" if colour else None,
            force_terminal=colour,
            force_jupyter=False,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
            theme=_STYLES,
            _environ={},
        )
        with console.capture() as capture:
            console.print(Group(*_Renderer(width, names or {}).parts(translated(document))), crop=False)
        return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    finally:
        random.setstate(state)


class _Renderer:
    def __init__(self, width: int, names: Mapping[int, str]) -> None:
        self._width, self._bar_width = width, min(width, _LONGEST_BAR)
        self._names = {f"In[{number}]": labels.clean(name) for number, name in names.items()}

    def parts(self, blocks: Iterable[Block]) -> Iterator[RenderableType]:
        for block in blocks:
            yield from self._parts(block)

    def _parts(self, block: Block) -> Iterator[RenderableType]:
        match block:
            case Line():
                yield self._line(block)
            case Head() | Fold():
                yield ""
                yield Text.assemble((block.title, "strong"), f"{say(': ')}{block.aside}" if block.aside else "")
                yield from self.parts(block.blocks) if isinstance(block, Fold) else ()
            case Static():
                yield from self.parts(block.blocks)
            case Section():
                yield ""
                yield from self.parts(block.blocks)
            case Source():
                place = Text(f"{block.before}{block.place} │ ", "muted")
                yield Text("  ") + self._inline(place) + Text(block.line, "strong")
            case Bar(is_slim=True):
                yield from draw(block, self._bar_width, most=_SLIM)[-2:]
            case Bar():
                yield from draw(block, self._bar_width)
            case Timeline():
                columns = block.columns(self._bar_width - 4)
                levels = (_LEVELS[round(one.ratio * (len(_LEVELS) - 1))] for one in columns)
                styles = ("red" if one.kind == "over" else "blue" for one in columns)
                yield _indented(Text.assemble(*zip(levels, styles, strict=True)))
                yield _indented(self._inline(block.sentence))
            case Treemap():
                return
            case Items():
                yield from (_indented(self._inline(row)) for row in block.rows[: block.most])
                if more := len(block.rows[block.most :]) if block.most else 0:
                    told = say(f"and {more} more, which the page and the JSON form list")
                    yield _indented(Text(told, "muted"))
            case Table():
                yield from self._table(block)
            case Notice():
                yield self._inline(Text(f"{block.mark} {block.title}", "healed" if block.mark == "✓" else "unhealed"))
                rows = ((Text(name, "muted"), told) for name, told in block.facts)
                yield _indented(self._grid(({}, {"ratio": 1}), rows))
            case Causes():
                ranked = ((f"{number}.", self._cause(block, number)) for number in range(1, len(block.rows) + 1))
                yield _indented(self._grid((_NUMBER, {"ratio": 1}), ranked))
            case Fixes():
                yield ""
                yield _indented(self._fixes(block.rows))
            case Diff():
                lines = "\n".join(f"  {line}" for line in block.text.rstrip("\n").split("\n"))
                yield Text(lines, no_wrap=True, overflow="ignore")

    def _inline(self, content: Inline) -> Text:
        text = prose(content)
        for cell, name in self._names.items():
            text = Text(name).join(text.split(cell, allow_blank=True)) if cell in text.plain else text
        return text

    def _line(self, line: Line) -> RenderableType:
        text = self._inline(line.text).copy()
        if line.look in _LINE_STYLES:
            text.stylize(_LINE_STYLES[line.look])
        return _indented(text) if line.look in ("inner", "more") else text

    def _grid(self, columns: Iterable[Mapping[str, Any]], rows: Iterable[Iterable[Inline]]) -> Grid:
        grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0), expand=True)
        for column in columns:
            grid.add_column(**column)
        for row in rows:
            grid.add_row(*map(self._inline, row))
        return grid

    def _table(self, table: Table) -> Iterator[RenderableType]:
        columns = self._columns(table)
        wide = next(place for place, column in enumerate(columns) if "ratio" in column)
        if self._has_room(table, wide):
            yield _indented(self._grid(columns, table.rows))
            return
        for row in table.rows:
            cells = [self._inline(cell) for cell in row]
            yield Text("  ").join(cell for cell in (*cells[:wide], *cells[wide + 1 :]) if cell)
            if cells[wide]:
                yield cells[wide] if table.of == "holders" else _indented(cells[wide])

    def _columns(self, table: Table) -> tuple[Mapping[str, Any], ...]:
        rest, whole = {"ratio": 1, "overflow": "fold"}, {"no_wrap": True}
        return {
            "holders": (_NUMBER, _NUMBER, whole, rest),
            "growth": (_NUMBER, rest, {}),
            "facts": (_NUMBER, {"max_width": max(26, self._width // 3)}, rest),
            "cards": (whole, whole, whole, {"ratio": 1}),
            "cells": (*[_NUMBER] * (len(table.rows[0]) - 1), rest),
        }[table.of]

    def _has_room(self, table: Table, wide: int) -> bool:
        """Return whether columns leave room for the code of every row, unless it is too long for any line."""
        others = [column for place, column in enumerate(zip(*table.rows, strict=True)) if place != wide]
        left = self._width - _INDENT - sum(max(cell_len(str(cell)) for cell in column) + _GAP for column in others)
        told = [cell for row in table.rows if isinstance(cell := row[wide], Text)]
        code = (cell.plain[span.start : span.end] for cell in told for span in cell.spans if span.style != "detail")
        words_of_code = " ".join(code).split(" ")
        return self._width >= _NARROW and not any(left < cell_len(word) <= self._width for word in words_of_code)

    def _cause(self, causes: Causes, number: int) -> Text:
        cause, is_told = causes.rows[number - 1], number <= causes.told
        text = Text.assemble((cause.title, "strong" if is_told else ""), f" ({cause.confidence})")
        for sentence in cause.because if is_told else ():
            text.append("\n").append_text(prose(sentence))
        if is_told and cause.rule:
            text.append(f"\n{say('Rule: ')}{cause.page or cause.rule}", "muted")
        return text

    def _fixes(self, rows: tuple[FixRow, ...]) -> Grid:
        """Return what each fix changes and promises, its price, how to have it, and what to know before."""
        table = self._grid((_NUMBER, {"ratio": 1, "overflow": "fold"}), ())
        for row in rows:
            text = Text.assemble((row.title, "strong"), f" ({row.dose})" if row.dose else "")
            text.append(f"\n{say(f'{row.effect}: {row.promise}')}\n")
            text.append(row.verdict_text, labels.TONES[row.verdict]).append(f"{say(': ')}{row.peak}")
            text.append(f" ({row.basis})" if row.basis else "")
            text.append(f"{say('; ')}{row.slowdown}" if row.slowdown else "")
            if commands := [command for command in (row.apply, row.diff) if command]:
                text.append("\n").append("   ".join(commands), "command")
            for note in row.notes:
                text.append(f"\n{note}", "muted")
            table.add_row(f"{row.number}.", self._inline(text))
            if row is not rows[-1]:
                table.add_row()
        return table


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, _INDENT))


def draw(bar: Bar, width: int, *, most: int | None = None) -> list[Text]:
    """Return the lines of ``bar``: its title, its budget marker, the bar, and the legend of its ``most`` largest."""
    groups = _groups(bar.segments, width)
    kinds = [_kind(group) for group in groups]
    cells = _cells([sum(segment.ratio for segment in group) for group in groups], width)
    line = Text()
    for kind, cell_count in zip(kinds, cells, strict=True):
        line.append(labels.KINDS[kind].sign * cell_count, labels.KINDS[kind].style)
    beyond = sum(count for count, kind in zip(cells, kinds, strict=True) if kind == "over")
    named = groups if most is None else sorted(groups, key=lambda group: -sum(one.ratio for one in group))[:most]
    legend = flow((_entry(group) for group in groups if group in named), width)
    return [*_heading(bar, beyond, width), line, *(legend if most is None else legend[:1])]


def flow(entries: Iterable[Text], width: int) -> list[Text]:
    """Return the entries in lines, as many to a line as fit, none of them broken."""
    lines = [Text()]
    for entry in entries:
        if lines[-1] and lines[-1].cell_len + 3 + entry.cell_len > width:
            lines.append(Text())
        lines[-1] += Text("   ") + entry if lines[-1] else entry
    return lines


def _groups(segments: Sequence[Segment], width: int) -> list[list[Segment]]:
    """Return the segments one by one, those under half a cell together, in the place of the first of them."""
    small = [one for one in segments if one.ratio * width < 0.5 and one.kind not in _NEVER_JOINED]
    return [small if one in small else [one] for one in segments if one not in small or one is small[0]]


def _kind(group: Sequence[Segment]) -> str:
    return group[0].kind if len(group) == 1 else "other"


def _entry(group: Sequence[Segment]) -> Text:
    """Return a fill with what it stands for."""
    kind = labels.KINDS[_kind(group)]
    named = ", ".join(f"{segment.label} {segment.size}" for segment in group)
    return Text.assemble((kind.sign, kind.style), f" {f'{say(kind.label)}: ' if len(group) > 1 else ''}{named}")


def _heading(bar: Bar, beyond: int, width: int) -> list[Text]:
    """Return the title with the budget, whose marker stands over the last cell before those ``beyond`` it."""
    title = Text(bar.title, "bold")
    if bar.budget is None or bar.budget_ratio is None:
        return [title]
    end = width - beyond if beyond else max(1, round(width * bar.budget_ratio))
    mark = f"{bar.budget} ▼"
    gap = end - cell_len(bar.title) - cell_len(mark)
    if gap >= 1:
        return [title + Text(" " * gap + mark)]
    return [title, Text(mark.rjust(end))]


def _cells(ratios: Sequence[float], width: int) -> list[int]:
    """Share ``width`` cells out by ``ratios``: at least one each, the rest by the largest remainder."""
    cells = [max(1, int(ratio * width)) for ratio in ratios]
    by_remainder = sorted(range(len(ratios)), key=lambda i: cells[i] - ratios[i] * width)
    step = 0
    while sum(cells) < width:
        cells[by_remainder[step % len(cells)]] += 1
        step += 1
    while sum(cells) > width:
        cells[max(range(len(cells)), key=cells.__getitem__)] -= 1
    return cells
