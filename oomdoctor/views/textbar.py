"""The memory bar in characters: each kind of memory has a fill of its own, so that it can be read without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from oomdoctor.model.memory import Role
from oomdoctor.views.document import Bar, Segment

_FILLS: Final = {
    Role.ACTIVATION.value: ("█", "red"),
    Role.PARAMETER.value: ("▓", "blue"),
    Role.GRADIENT.value: ("▒", "cyan"),
    Role.OPTIMIZER_STATE.value: ("░", "green"),
    Role.BATCH.value: ("▚", "yellow"),
    Role.BUFFER.value: ("▪", "blue"),
    Role.GRAPH_KEPT_ALIVE.value: ("▞", "magenta"),
    Role.TRACEBACK.value: ("◆", "magenta"),
    Role.OUTPUT_CACHE.value: ("▤", "magenta"),
    Role.KV_CACHE.value: ("▥", "cyan"),
    Role.PINNED_HOST.value: ("▦", "yellow"),
    Role.USER_TENSOR.value: ("▨", "yellow"),
    Role.WORKSPACE.value: ("▢", "bright_black"),
    Role.UNEXPLAINED.value: ("?", "bright_black"),
    "process": ("▣", "bright_blue"),
    "simulated": ("◇", "yellow"),
    "children": ("▬", "cyan"),
    "cached": ("┄", "bright_black"),
    "context": ("■", "bright_black"),
    "elsewhere": ("▩", "bright_black"),
    "outside": ("▧", "bright_black"),
    "free": ("·", "bright_black"),
    "asked": ("╱", "red"),  # noqa: RUF001 - a hatching, not a slash
    "over": ("╳", "bold red"),  # noqa: RUF001
    "other": ("≡", "bright_black"),
}
_NEVER_JOINED: Final = frozenset({"free", "asked", "over"})


def draw(bar: Bar, width: int) -> list[Text]:
    """Return the lines of ``bar``: its title, its budget marker, the bar, and the legend."""
    groups = _groups(bar.segments, width)
    kinds = [_kind(group) for group in groups]
    cells = _cells([sum(segment.ratio for segment in group) for group in groups], width)
    line = Text()
    for kind, cell_count in zip(kinds, cells, strict=True):
        fill, style = _FILLS[kind]
        line.append(fill * cell_count, style)
    beyond = sum(count for count, kind in zip(cells, kinds, strict=True) if kind == "over")
    return [*_heading(bar, beyond, width), line, *flow((_entry(group) for group in groups), width)]


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
    fill, style = _FILLS[_kind(group)]
    named = ", ".join(f"{segment.label} {segment.size}" for segment in group)
    return Text.assemble((fill, style), f" {'other: ' if len(group) > 1 else ''}{named}")


def _heading(bar: Bar, beyond: int, width: int) -> list[Text]:
    """Return the title with the budget, the marker standing over the last cell that is within it.

    Args:
        beyond: cells that are past the budget.
    """
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
