"""The parts that every text view is made of. Text of the user's goes into ``rich.text.Text``, never through markup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.cells import cell_len
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomdoctor.views.holders import Holders
from oomdoctor.views.timeline import Timeline

_NARROW: Final = 60
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_INDENT, _GAP = 2, 2


def bar_width(width: int) -> int:
    """Return how long a bar is drawn."""
    return min(width, 100)


def prose(sentence: str) -> Text:
    """Return a sentence with the code in it set apart."""
    text = Text(sentence)
    text.highlight_regex(r"`[^`]+`", "bold")
    return text


def heading(title: str, aside: str | None = None) -> Text:
    """Return the title of a part, with what belongs on its line."""
    return Text.assemble((title, "bold"), f": {aside}" if aside else "")


def indented(part: RenderableType) -> Padding:
    """Return ``part`` set in by two columns."""
    return Padding(part, (0, 0, 0, _INDENT))


def grid() -> Table:
    """Return a table without lines and without a header."""
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0), expand=True)


def is_narrow(width: int) -> bool:
    """Return whether columns would leave too little room for what stands in them."""
    return width < _NARROW


def holder_parts(title: str, held: Holders, width: int) -> list[RenderableType]:
    """Return the largest holders and how much of the memory has one."""
    parts: list[RenderableType] = []
    if held.rows:
        parts += ["", heading(title), *([_table(held)] if _has_room(held, width) else _stacked(held))]
    elif held.accounted or held.notes:
        parts.append("")
    parts += [indented(Text(held.more, "dim"))] if held.more else []
    parts += [Text(held.accounted)] if held.accounted else []
    return [*parts, *(prose(note) for note in held.notes)]


def timeline_parts(timeline: Timeline, width: int) -> list[RenderableType]:
    """Return how the memory goes, as a line of columns and in words."""
    line = Text()
    for column in timeline.columns(bar_width(width) - 4):
        level = _LEVELS[round(column.ratio * (len(_LEVELS) - 1))]
        line.append(level, "red" if column.kind == "over" else "blue")
    return [indented(line), indented(prose(timeline.sentence))]


def _has_room(held: Holders, width: int) -> bool:
    """Return whether columns leave room for the code of every row, unless it is too long for any line."""
    columns = [[row.size for row in held.rows], [row.share for row in held.rows], [row.role for row in held.rows]]
    left = width - _INDENT - sum(max(map(cell_len, column)) + _GAP for column in columns)
    words = [cell_len(word) for row in held.rows for word in f"{row.path} {row.frees or ''}".split(" ")]
    return not is_narrow(width) and not any(left < word <= width for word in words)


def _table(held: Holders) -> Padding:
    table = grid()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for row in held.rows:
        what = Text.assemble((row.path, "bold"), f"  {row.detail}" if row.detail else "")
        if row.frees:
            what.append("\nfreed by ").append(row.frees, "cyan")
        table.add_row(row.size, row.share, row.role, what)
    return indented(table)


def _stacked(held: Holders) -> Iterator[RenderableType]:
    """Yield each holder in lines of its own: code stays whole where the terminal is as wide as it is."""
    for row in held.rows:
        yield Text(f"{row.size}  {row.share}  {row.role}")
        yield Text(row.path, "bold")
        if row.detail:
            yield indented(Text(row.detail))
        if row.frees:
            yield Text.assemble("freed by ", (row.frees, "cyan"))
