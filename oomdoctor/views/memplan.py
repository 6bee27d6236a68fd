"""A cell before it is run, as facts: what it needs, how its memory goes, where it fits, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.cards import CONTEXT_BYTES
from oomdoctor.model.fix import Patch
from oomdoctor.model.memplan import Fit, LargestBatch, MemPlan
from oomdoctor.model.plan import Course, Forecast, Verdict
from oomdoctor.model.session import Cell
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.bar import Bar, Segment
from oomdoctor.views.prices import Prices, basis, prices
from oomdoctor.views.timeline import Timeline, timeline

_CARDS: Final = f"as torch reports their memory, and {format_size(CONTEXT_BYTES)} of it set aside for CUDA itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One place and whether the cell fits there.

    Attributes:
        capacity: with what of it tensors may take.
    """

    name: str
    capacity: str
    need: str
    verdict: Verdict
    verdict_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """All that is told of a cell that was not run.

    Attributes:
        least: the least that it needs, where it could not be forecast.
        place, source_line: where the peak stands; empty where that was not seen.
        bar: what is alive at the peak; None where that was not seen.
        temporaries: what operations need for their own time at the peak.
        work: operations and bytes moved.
        batch: how large a batch may be, or why that is not told.
        prices: the fixes; None where none is needed.
        change: the diff of the first fix that fits, empty where there is none; ``changes``: what that fix is called.
        took: how long it took.
    """

    title: str
    headline: str
    verdict: Verdict
    least: str
    place: str
    source_line: str
    bar: Bar | None
    temporaries: tuple[str, ...]
    timeline: Timeline | None
    work: str
    batch: str
    places: tuple[PlaceRow, ...]
    places_note: str
    prices: Prices | None
    changes: str
    change: str
    took: str


def foresight(plan: MemPlan, names: Mapping[int, str] | None = None) -> Foresight:
    """Return the facts of ``plan``.

    Args:
        names: what the cells are called in a program that is no notebook.
    """
    forecast, course = plan.forecast, plan.forecast.course or Course()
    line = forecast.peak_line
    if "\n" not in plan.cell.source.strip():  # there is but one line to tell
        line, course = None, replace(course, points=tuple((size, None) for size, _ in course.points))
    changes, change = _change(plan)
    title = f"Forecast of In[{plan.cell.number}], made without running it"
    for number, name in (names or {}).items():
        title, change = (text.replace(f"In[{number}]", name) for text in (title, change))
    return Foresight(
        title=words.clean(title),
        headline=_headline(plan.here),
        verdict=plan.here.verdict,
        least=_least(plan),
        place="" if line is None else f"line {line}",
        source_line="" if line is None else _source_line(plan.cell, line),
        bar=_bar(forecast, course),
        temporaries=tuple(f"{format_size(size)} for {words.clean(name, 120)}" for name, size in course.temporaries),
        timeline=timeline(course),
        work=_work(course),
        batch=_batch(plan.batch),
        places=tuple(map(_place_row, plan.elsewhere)),
        places_note=_CARDS if plan.elsewhere else "",
        prices=None if plan.plan is None else _prices(plan),
        changes=changes,
        change=change,
        took=f"Found out in {plan.elapsed_s:.1f} s.",
    )


def _headline(fit: Fit) -> str:
    """Return in one sentence what the cell needs and whether that fits."""
    forecast, place = fit.forecast, fit.place
    where = f" on {words.clean(place.name, 60)}"
    if forecast.peak is None:
        reason = words.clean(forecast.refused or forecast.basis).removesuffix(".")
        return f"It has no forecast{where}: {reason}."
    of = "" if forecast.budget is None else f" of {format_size(forecast.budget)}"
    reserved = "" if forecast.reserved is None else f" ({words.about(forecast.reserved)} reserved)"
    verdict = "" if forecast.budget is None else f": {words.VERDICT_MARKS[fit.verdict]} {fit.verdict.value}"
    return f"It needs {words.about(forecast.peak)}{reserved}{of}{where}{verdict} ({basis(forecast)})."


def _least(plan: MemPlan) -> str:
    if plan.least is None or plan.least.peak is None:
        return ""
    budget, verdict = plan.here.place.budget, plan.here.verdict
    told = ""
    if budget is not None and verdict is Verdict.TOO_LARGE:
        told = f" of {format_size(budget)}: {words.VERDICT_MARKS[verdict]} {verdict.value}"
    return f"It needs at least {words.about(plan.least.peak)}{told} ({words.clean(plan.least.basis)})."


def _source_line(cell: Cell, line: int) -> str:
    lines = cell.source.split("\n")
    return words.clean(lines[line - 1].strip(), 120) if line <= len(lines) else ""


def _bar(forecast: Forecast, course: Course) -> Bar | None:
    """Return what is alive at the peak, and how much of the budget is left."""
    parts = [(role.value, words.ROLES[role], size) for role, size in course.at_peak if size > 0]
    used = sum(size for *_, size in parts)
    if not used:
        return None
    total = forecast.budget
    within = used if total is None else min(total, used)
    if total is not None and used < total:
        parts.append(("free", "free", total - used))
    scale = max(used, total or 0)
    return Bar(
        title="At the peak",
        budget=None if total is None else format_size(total),
        budget_ratio=None if total is None else max(within, total) / scale,
        segments=tuple(
            Segment(kind=kind, label=label, size=format_size(size), ratio=size / scale) for kind, label, size in parts
        ),
    )


def _work(course: Course) -> str:
    if not course.flops and not course.moved:
        return ""
    return f"The part that was followed takes {_flops(course.flops)} and moves {format_size(int(course.moved))}."


def _flops(count: float) -> str:
    for unit in ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"):
        if count < 999.5 or unit == "TFLOPs":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _batch(batch: LargestBatch | Refused) -> str:
    """Return how large a batch may be in one sentence."""
    if isinstance(batch, Refused):
        return f"The largest batch that fits is not told: {words.clean(batch.reason).removesuffix('.')}."
    found = f"{basis(batch.forecast)}, {words.count(batch.tried, 'forecast')}"
    ended = f"; {words.clean(batch.end).removesuffix('.')}" if batch.end else ""
    if batch.size == 0:
        return (
            f"No batch was forecast to fit, down to {words.count(batch.above or batch.now, 'sample')} ({found}){ended}."
        )
    need = words.about(max(batch.forecast.peak or 0, batch.forecast.reserved or 0))
    fits = f"A batch of {batch.size} samples fits with {need}"
    above = "" if batch.above is None else f", one of {batch.above} not for certain"
    return f"{fits}{above}; now it has {batch.now} ({found}){ended}."


def _place_row(fit: Fit) -> PlaceRow:
    forecast, place = fit.forecast, fit.place
    shown = fit.least if forecast.peak is None and fit.least is not None else forecast
    need = None if shown.peak is None else max(shown.peak, shown.reserved or 0)
    share = "" if place.budget is None else f"{format_size(place.budget)} for tensors"
    total = "" if place.total is None else format_size(place.total)
    return PlaceRow(
        name=words.clean(place.name, 60),
        capacity=", ".join(filter(None, [total, share])),
        need="" if need is None else f"{'at least ' if shown is not forecast else ''}{words.about(need)}",
        verdict=fit.verdict,
        verdict_text=f"{words.VERDICT_MARKS[fit.verdict]} {fit.verdict.value}",
    )


def _prices(plan: MemPlan) -> Prices:
    """Return the fixes as rows without commands: there is no failed cell that they could be applied to.

    What the cell needs unchanged stands above them already, and that most changes have nothing to do here is left to
    the JSON.
    """
    assert plan.plan is not None
    found, refused = prices(plan.plan), len(plan.plan.refusals)
    priced = words.count(len(found.fixes), "change")
    told = f"{priced} priced, {refused} refused; the reasons are in the JSON form."
    fixes = tuple(replace(row, apply=None, diff=None) for row in found.fixes)
    return replace(found, unchanged=told, fixes=fixes, refusals=())


def _change(plan: MemPlan) -> tuple[str, str]:
    """Return the name and the diff of the first fix that fits and that can be written into the cells."""
    for title, patch in _fitting(plan):
        return title, patch.diff()
    return "", ""


def _fitting(plan: MemPlan) -> Iterator[tuple[str, Patch]]:
    for number, candidate in enumerate(plan.plan.candidates if plan.plan is not None else (), 1):
        if candidate.forecast.verdict is Verdict.FITS and isinstance(candidate.patch, Patch):
            yield f"{number}. {candidate.title}", candidate.patch
