"""A cell before it is run, as facts: what it needs, how its memory goes, where it fits, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from rich.text import Text

from oomdoctor.model.absence import Refused
from oomdoctor.model.cards import CONTEXT_BYTES
from oomdoctor.model.fix import Patch
from oomdoctor.model.memplan import Fit, LargestBatch, MemPlan
from oomdoctor.model.plan import Course, Forecast, Plan, Verdict
from oomdoctor.model.session import Cell
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.document import (
    Bar,
    Diff,
    Document,
    Fold,
    Head,
    Inline,
    Items,
    Line,
    Source,
    Table,
    Timeline,
    apart,
    given,
    prose,
)
from oomdoctor.views.prices import Prices, basis, prices

_CARDS: Final = f"as torch reports their memory, and {format_size(CONTEXT_BYTES)} of it set aside for CUDA itself"


def foresight(plan: MemPlan, names: Mapping[int, str] | None = None) -> Document:
    """Return what a cell needs that was not run, where that fits, and what would help."""
    forecast, course = plan.forecast, plan.forecast.course or Course()
    line = forecast.peak_line
    if "\n" not in plan.cell.source.strip():  # there is but one line to tell
        line, course = None, replace(course, points=tuple((size, None) for size, _ in course.points))
    changes, change = _change(plan)
    title = f"Forecast of In[{plan.cell.number}], made without running it"
    for number, name in (names or {}).items():
        title, change = (text.replace(f"In[{number}]", name) for text in (title, change))
    bar, goes, work = _bar(forecast, course), Timeline.of(course), _work(course)
    temporaries = tuple(f"{format_size(size)} for {words.clean(name, 120)}" for name, size in course.temporaries)
    return (
        Line(words.clean(title), "name"),
        Line(_headline(plan.here), "lead"),
        *_least(plan),
        *apart(None if line is None else Source(f"line {line}", _source_line(plan.cell, line), "peak at ")),
        *apart(bar),
        *((Head("Temporaries at the peak"), Items(temporaries)) if temporaries else ()),
        *((Head("How the memory goes"), goes) if goes else ()),
        *given(Line(work, "inner") if work else None),
        *(Head("Batch"), Line(_batch(plan.batch), "inner")),
        *((Head("Cards", _CARDS), Table("cards", tuple(map(_card, plan.elsewhere)))) if plan.elsewhere else ()),
        *((Head("What to change"), *_prices(plan.plan).blocks()) if plan.plan is not None else ()),
        *given(Fold("The change", (Diff(change),), changes) if change else None),
        *apart(Line(f"Found out in {plan.elapsed_s:.1f} s.", "muted")),
    )


def _headline(fit: Fit) -> Text:
    """Return in one sentence what the cell needs and whether that fits."""
    forecast, place = fit.forecast, fit.place
    where = f" on {words.clean(place.name, 60)}"
    if forecast.peak is None:
        reason = words.clean(forecast.refused or forecast.basis).removesuffix(".")
        return prose(f"It has no forecast{where}: {reason}.")
    of = "" if forecast.budget is None else f" of {format_size(forecast.budget)}"
    reserved = "" if forecast.reserved is None else f" ({words.about(forecast.reserved)} reserved)"
    need = Text(f"It needs {words.about(forecast.peak)}{reserved}{of}{where}")
    if forecast.budget is not None:
        need.append(": ").append_text(_verdict(fit.verdict))
    return need.append_text(prose(f" ({basis(forecast)})."))


def _verdict(verdict: Verdict) -> Text:
    return Text(words.verdict(verdict), words.TONES[verdict])


def _least(plan: MemPlan) -> Iterator[Line]:
    """Yield the least that it needs, where it could not be forecast."""
    if plan.least is not None and plan.least.peak is not None:
        budget, verdict = plan.here.place.budget, plan.here.verdict
        is_too_large = budget is not None and verdict is Verdict.TOO_LARGE
        told = f" of {format_size(budget or 0)}: {_verdict(verdict)}" if is_too_large else ""
        yield Line(f"It needs at least {words.about(plan.least.peak)}{told} ({words.clean(plan.least.basis)}).")


def _source_line(cell: Cell, line: int) -> str:
    lines = cell.source.split("\n")
    return words.clean(lines[line - 1].strip(), 120) if line <= len(lines) else ""


def _bar(forecast: Forecast, course: Course) -> Bar | None:
    """Return what is alive at the peak, and how much of the budget is left; None where that was not seen."""
    parts = [(role.value, words.ROLES[role], size) for role, size in course.at_peak if size > 0]
    used = sum(size for *_, size in parts)
    if not used:
        return None
    return Bar.of("At the peak", forecast.budget, [*parts, ("free", "free", (forecast.budget or 0) - used)])


def _work(course: Course) -> str:
    if not course.flops and not course.moved:
        return ""
    thousands = next((power for power in range(4) if course.flops < 999.5 * 1000**power), 4)
    flops = f"{course.flops / 1000**thousands:.3g} {('', 'k', 'M', 'G', 'T')[thousands]}FLOPs"
    return f"The part that was followed takes {flops} and moves {format_size(int(course.moved))}."


def _batch(batch: LargestBatch | Refused) -> str:
    """Return how large a batch may be in one sentence."""
    if isinstance(batch, Refused):
        return f"The largest batch that fits is not told: {words.clean(batch.reason).removesuffix('.')}."
    found = f"{basis(batch.forecast)}, {words.count(batch.tried, 'forecast')}"
    ended = f"; {words.clean(batch.end).removesuffix('.')}" if batch.end else ""
    if batch.size == 0:
        least = words.count(batch.above or batch.now, "sample")
        return f"No batch was forecast to fit, down to {least} ({found}){ended}."
    need = words.about(max(batch.forecast.peak or 0, batch.forecast.reserved or 0))
    fits = f"A batch of {batch.size} samples fits with {need}"
    above = "" if batch.above is None else f", one of {batch.above} not for certain"
    return f"{fits}{above}; now it has {batch.now} ({found}){ended}."


def _card(fit: Fit) -> tuple[Inline, ...]:
    """Return a card, whether the cell fits there, what it needs, and what there is, with the part for tensors."""
    forecast, place = fit.forecast, fit.place
    shown = fit.least if forecast.peak is None and fit.least is not None else forecast
    need = None if shown.peak is None else max(shown.peak, shown.reserved or 0)
    share = "" if place.budget is None else f"{format_size(place.budget)} for tensors"
    return (
        Text(words.clean(place.name, 60), "strong"),
        _verdict(fit.verdict),
        "" if need is None else f"{'at least ' if shown is not forecast else ''}{words.about(need)}",
        ", ".join(filter(None, ["" if place.total is None else format_size(place.total), share])),
    )


def _prices(plan: Plan) -> Prices:
    """Return the fixes as rows without commands: there is no failed cell that they could be applied to.

    What the cell needs unchanged stands above them already, and that most changes have nothing to do here is left to
    the JSON.
    """
    found, refused = prices(plan).without_commands(), len(plan.refusals)
    priced = words.count(len(found.fixes), "change")
    told = f"{priced} priced, {refused} refused; the reasons are in the JSON form."
    return replace(found, unchanged=told, refusals=())


def _change(plan: MemPlan) -> tuple[str, str]:
    """Return the name and the diff of the first fix that fits and that can be written into the cells."""
    for number, candidate in enumerate(plan.plan.candidates if plan.plan is not None else (), 1):
        if candidate.forecast.verdict is Verdict.FITS and isinstance(candidate.patch, Patch):
            return f"{number}. {candidate.title}", candidate.patch.diff()
    return "", ""
