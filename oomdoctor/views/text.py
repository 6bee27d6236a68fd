"""The facts as text for a terminal, and for every frontend that shows no HTML.

Text of the user's goes into ``rich.text.Text`` and never through rich's markup, so a file called ``[red]`` is
shown as such.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from oomdoctor.model.plan import Verdict
from oomdoctor.views import textbar
from oomdoctor.views.aftermath import COMMANDS, aftermath
from oomdoctor.views.memplan import foresight
from oomdoctor.views.prices import prices
from oomdoctor.views.reading import read
from oomdoctor.views.story import TOLD, FailingLine, FindingRow, of_script, tell
from oomdoctor.views.textmemplan import memplan_parts, memplan_tail
from oomdoctor.views.textparts import bar_width, grid, heading, holder_parts, indented, prose, timeline_parts
from oomdoctor.views.textreport import growth_parts, survey_parts
from oomdoctor.views.words import clean

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.explanation import Explanation
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.memplan import MemPlan
    from oomdoctor.model.plan import Plan
    from oomdoctor.views.growth import GrowthRows
    from oomdoctor.views.prices import FixRow, Prices
    from oomdoctor.views.story import Retry
    from oomdoctor.views.survey import Survey

_VERDICT_STYLES: Final = {
    Verdict.FITS: "green",
    Verdict.BORDERLINE: "yellow",
    Verdict.TOO_LARGE: "red",
    Verdict.UNKNOWN: "",
}
_NARROW: Final = 92
_MOST_REFUSALS: Final = 6
"""Refused fixes that are told; those that the findings suggest come first, and the page folds the rest away."""

P = ParamSpec("P")
F = TypeVar("F")


def _without_draws(render: Callable[P, str]) -> Callable[P, str]:
    """Keep the user's random number generator as it was: rich numbers its styles with it."""

    @functools.wraps(render)
    def rendered(*args: P.args, **kwargs: P.kwargs) -> str:
        state = random.getstate()
        try:
            return render(*args, **kwargs)
        finally:
            random.setstate(state)

    return rendered


@_without_draws
def case(
    case: Case,
    *,
    width: int = 100,
    colour: bool = False,
    names: Mapping[int, str] | None = None,
    retry: Retry | None = None,
) -> str:
    """Return the diagnosis of ``case``.

    Args:
        retry: what a retry would do; by the plan alone where nothing else is known.
        names: what the cells are called in a program that is no notebook, where nobody can type commands.
    """
    story = tell(case, retry) if names is None else of_script(tell(case, retry), clean(names[max(names)]))
    story = _named(story, names)
    parts: list[RenderableType] = [Text(story.title, "bold red"), prose(story.headline)]
    if story.lines:
        parts += ["", *map(_line, story.lines)]
    if story.raised_in:
        parts += ["", Text(f"  raised in {story.raised_in}")]
    if story.bar is not None:
        parts += ["", *textbar.draw(story.bar, bar_width(width))]
    parts += holder_parts("What holds it", story.holders, width)
    if story.timeline is not None:
        parts += ["", heading("How the memory goes"), *timeline_parts(story.timeline, width)]
    parts += ["", heading("Why"), *_findings(story.findings)]
    parts += ["", heading("What to change"), *_prices(story.prices, width)]
    if story.missing:
        parts += ["", *(Text(sentence, "dim") for sentence in story.missing)]
    if story.next:
        parts += ["", *(prose(sentence) for sentence in story.next)]
    return _print(parts, width=width, colour=colour)


@_without_draws
def report(survey: Survey, *, width: int = 100, colour: bool = False) -> str:
    """Return what holds memory now: one sentence for each device, then the devices one by one, then the host."""
    return _print(survey_parts(survey, width), width=width, colour=colour)


@_without_draws
def growth(rows: GrowthRows, *, width: int = 100, colour: bool = False) -> str:
    """Return what grew between two reports."""
    return _print(growth_parts(rows, width), width=width, colour=colour)


@_without_draws
def notice(case: Case, *, width: int = 100, colour: bool = False, names: Mapping[int, str] | None = None) -> str:
    """Return how ``case`` ended: what was changed, at what price, and how to keep it. For ``names`` see ``case``."""
    facts = _named(aftermath(case), names)
    table = grid()
    table.add_column(style="dim")
    table.add_column(ratio=1)
    for name, text in facts.facts:
        if names is None or name not in COMMANDS:
            table.add_row(name, prose(text))
    title = Text(f"{facts.mark} {facts.title}", "bold green" if facts.mark == "✓" else "bold yellow")
    return _print([title, indented(table)], width=width, colour=colour)


@_without_draws
def plan(plan: Plan, *, width: int = 100, colour: bool = False) -> str:
    """Return what a cell was forecast to need, and what each change would make of it."""
    return _print([heading("Forecast"), *_prices(prices(plan), width)], width=width, colour=colour)


@_without_draws
def memplan(plan: MemPlan, *, width: int = 100, colour: bool = False, names: Mapping[int, str] | None = None) -> str:
    """Return what a cell needs that was not run, where that fits, and what would help. For ``names`` see ``case``."""
    facts = foresight(plan, names)
    parts = memplan_parts(facts, width)
    if facts.prices is not None:
        parts += ["", heading("What to change"), *_prices(facts.prices, width)]
    change = facts.change.rstrip("\n")
    if change:
        parts += ["", heading("The change", facts.changes)]
    shown = _print(parts, width=width, colour=colour)
    if change:  # no line of it is broken, so that ``patch`` can read it
        wide = max(map(len, change.split("\n"))) + width
        shown += _print([indented(Text(change))], width=wide, colour=colour)
    return shown + _print(memplan_tail(facts), width=width, colour=colour)


@_without_draws
def explanation(
    explanation: Explanation, meanings: Mapping[Incident, str] | None = None, *, width: int = 100, colour: bool = False
) -> str:
    """Return what a message alone tells: the failure in one sentence, and its likely causes."""
    facts = read(explanation, meanings)
    parts: list[RenderableType] = [prose(facts.headline)]
    if facts.findings or facts.unrecognised:
        parts += ["", heading("Why"), *_findings(facts.findings)]
    if facts.helps:
        parts += ["", prose(facts.helps)]
    if facts.others:
        parts += ["", heading("Also in this text"), *(indented(prose(sentence)) for sentence in facts.others)]
    return _print(parts, width=width, colour=colour)


def _named(facts: F, names: Mapping[int, str] | None) -> F:
    """Return ``facts`` with the cells called by their names, before lines are broken."""
    if not names:
        return facts
    renamed: F = _renamed(facts, {f"In[{number}]": clean(name) for number, name in names.items()})
    return renamed


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if type(value) is str:
        for cell, name in names.items():
            value = value.replace(cell, name)
    elif type(value) is tuple:
        return tuple(_renamed(one, names) for one in value)
    elif is_dataclass(value) and not isinstance(value, type):
        held = {one.name: _renamed(getattr(value, one.name), names) for one in fields(value) if one.init}
        return replace(value, **held)
    return value


def _print(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
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
        _environ={},
    )
    with console.capture() as capture:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _line(line: FailingLine) -> Text:
    return Text.assemble("  ", (f"{line.place} │ ", "dim"), (line.source, "bold"))


def _findings(rows: tuple[FindingRow, ...]) -> list[RenderableType]:
    if not rows:
        return [indented(Text("No rule recognised the cause."))]
    table = grid()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    for number, row in enumerate(rows, 1):
        is_told = number <= TOLD
        text = Text.assemble((row.title, "bold" if is_told else ""), f" ({row.confidence})")
        for sentence in row.because if is_told else ():
            text.append("\n").append_text(prose(sentence))
        table.add_row(f"{number}.", text)
    return [indented(table)]


def _prices(priced: Prices, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [indented(prose(priced.unchanged))]
    if priced.unfixed:
        parts.append(indented(Text(priced.unfixed)))
    if priced.fixes:
        table = _narrow_fixes(priced.fixes) if width < _NARROW else _fix_table(priced.fixes)
        parts += ["", indented(table)]
    if priced.refusals:
        parts += ["", heading("Considered and refused")]
        nearest = priced.refusals[:_MOST_REFUSALS]
        parts += [indented(Text.assemble((row.fix, "bold"), f": {row.reason}")) for row in nearest]
        if more := len(priced.refusals) - len(nearest):
            parts.append(indented(Text(f"and {more} more, which the page and the JSON form list", "dim")))
    return parts


def _fix_table(rows: tuple[FixRow, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("Change", ratio=5)
    table.add_column("Forecast peak", ratio=3, min_width=25)
    table.add_column("Verdict", min_width=11)
    table.add_column("Time", no_wrap=True)
    for row in rows:
        table.add_row(
            "•" if row.number is None else str(row.number),
            _change(row),
            "\n".join(filter(None, (row.peak, row.quantity, row.basis))),
            Text(row.verdict_text, _VERDICT_STYLES[row.verdict]),
            row.slowdown,
        )
        if row is not rows[-1]:
            table.add_row()
    return table


def _narrow_fixes(rows: tuple[FixRow, ...]) -> Table:
    table = grid()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        price = Text.assemble((row.verdict_text, _VERDICT_STYLES[row.verdict]), f": {row.peak}")
        price.append(f" {row.quantity}, {row.basis}" if row.quantity else "")
        number = "•" if row.number is None else f"{row.number}."
        table.add_row(number, _change(row, price.append(f"; time {row.slowdown}")))
        if row is not rows[-1]:
            table.add_row()
    return table


def _change(row: FixRow, price: Text | None = None) -> Text:
    """Return what a fix changes, what it promises, how to have it, and what to know before."""
    text = Text.assemble((row.title, "bold"), f" ({row.dose})" if row.dose else "")
    text.append(f"\n{row.effect}: {row.promise}")
    if price is not None:
        text.append("\n").append_text(price)
    commands = [command for command in (row.apply, row.diff) if command]
    if commands:
        text.append("\n").append("   ".join(commands), "cyan")
    for note in row.notes:
        text.append(f"\n{note}", "dim")
    return text
