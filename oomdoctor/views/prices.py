"""The fixes of a plan as rows: what changes, what it does to the results, and what it was forecast to cost.

A figure from a forecast carries ``≈`` and the name of what it was found by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Candidate, Forecast, Plan, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.document import Block, Fixes, FixRow, Fold, Gauge, Items, Line, prose

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident

_BASIS: Final = 600
"""Characters of a basis, which is a sentence of a fix: of two fixes together it is two. It is told to its end."""
_MOST_REFUSALS: Final = 6
"""Refused fixes that text shows; those that the findings suggest come first, and the page folds the rest away."""
_ALIKE: Final = 1.05
"""Up to this much less than what the allocator holds, what tensors take of it tells a reader nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A whole plan: what the cell needs unchanged, the fixes or why there are none, and what was refused."""

    unchanged: str
    fixes: tuple[FixRow, ...]
    unfixed: str | None
    refusals: tuple[tuple[str, str], ...]

    def blocks(self) -> Iterator[Block]:
        """Yield what is shown of it."""
        yield Line(self.unchanged, "inner")
        if self.unfixed:
            yield Line(self.unfixed, "inner")
        if self.fixes:
            yield Fixes(self.fixes)
        if self.refusals:
            rows = (Text.assemble((fix, "path"), ": ", prose(reason)) for fix, reason in self.refusals)
            yield Fold("Considered and refused", (Items(tuple(rows), most=_MOST_REFUSALS),))

    def without_commands(self) -> Prices:
        """Return it for where no command can be typed, or would apply to something else."""
        return replace(self, fixes=tuple(replace(row, apply=None, diff=None) for row in self.fixes))


def prices(plan: Plan, incident: Incident | None = None) -> Prices:
    """Return the facts of ``plan``; its fixes are numbered as ``%oomdoctor fix N`` counts them.

    Args:
        incident: the failure that the plan answers, None where the cell has not failed.
    """
    unsized = incident is not None and _unsized(plan.unchanged, incident)
    return Prices(
        unchanged=_unknown_need(plan.unchanged) if unsized else _need(plan.unchanged),
        fixes=fix_rows(plan),
        unfixed=_unfixed(plan, fits=not unsized),
        refusals=tuple((words.clean(fix, 120), words.clean(reason)) for fix, reason in plan.refusals),
    )


def _unsized(unchanged: Forecast, incident: Incident) -> bool:
    """Return whether a forecast that fits is contradicted by a failure that did not say how much it asked for."""
    fits = unchanged.peak is not None and (unchanged.peak == 0 or unchanged.verdict is Verdict.FITS)
    return incident.is_oom and incident.requested is None and fits


def _unknown_need(unchanged: Forecast) -> str:
    seen = f" ({words.about(unchanged.peak)} was found: {basis(unchanged)})" if unchanged.peak else ""
    told = f"What this cell needs unchanged is not known: it failed, and the failure gave no size{seen}."
    return _with_reason(told, unchanged)


def _lacking(forecast: Forecast) -> str:
    """Return why there is no forecast, or no better one."""
    return f"No {'better ' if forecast.peak else ''}forecast: {words.clean(forecast.refused or '')}"


def _with_reason(told: str, unchanged: Forecast) -> str:
    return f"{told} {_lacking(unchanged).removesuffix('.')}." if unchanged.refused else told


def _unfixed(plan: Plan, *, fits: bool) -> str | None:
    """Return why there are no fixes, or none that are settled; None where the forecast of the cell says it already."""
    unchanged = plan.unchanged
    if plan.pending:
        what = "Their numbers and commands are shown" if plan.candidates else "The changes are shown"
        return f"Forecasts are being made. {what} when they are there."
    if plan.candidates or (unchanged.peak is None and unchanged.refused is None):
        return None
    is_enough = fits and unchanged.verdict is Verdict.FITS
    return "No change is needed." if is_enough else "No fix was found that could be offered."


def _need(unchanged: Forecast) -> str:
    """Return in one sentence what the cell needs without any change."""
    if unchanged.peak is None:
        reason = words.clean(unchanged.refused or unchanged.basis).removesuffix(".")
        return f"Unchanged, this cell has no forecast: {reason}."
    line = f", at line {unchanged.peak_line}" if unchanged.peak_line is not None else ""
    budget = f" of {format_size(unchanged.budget)}" if unchanged.budget is not None else ""
    verdict = f"{words.verdict(unchanged.verdict)}{_tensors(unchanged)} ({basis(unchanged)})"
    need = f"{words.about(_counted(unchanged))} ({_quantity(unchanged)})"
    return _with_reason(f"Unchanged, this cell needs {need}{budget}{line}: {verdict}.", unchanged)


def fix_rows(plan: Plan) -> tuple[FixRow, ...]:
    """Return the candidates in their order, numbered as ``%oomdoctor fix N`` counts them once that is settled."""
    numbered = enumerate(plan.candidates, 1)
    return tuple(fix_row(None if plan.pending else number, one, plan.unchanged) for number, one in numbered)


def fix_row(number: int | None, candidate: Candidate, unchanged: Forecast) -> FixRow:
    """Return one candidate as a row, without commands where it has no number."""
    forecast, is_offered = candidate.forecast, candidate.refuted is None and number is not None
    effect, promise = words.EFFECTS[candidate.effect]
    if candidate.is_tried and candidate.effect in (Effect.EXACT, Effect.EQUIVALENT) and candidate.refuted is None:
        promise = f"{promise}, to be checked"
    is_written = not isinstance(candidate.patch, Refused)
    is_applied = candidate.effect is not Effect.ADVICE and (is_written or candidate.applies_live)
    return FixRow(
        number=number,
        title=words.clean(candidate.title),
        dose=words.clean(candidate.dose.short, 120),
        effect=effect,
        promise=promise,
        peak=_peak(forecast, unchanged),
        quantity=f"{_quantity(forecast)}{_tensors(forecast)}" if forecast.peak is not None else "",
        basis=basis(forecast) if forecast.peak is not None else "",
        verdict=forecast.verdict,
        verdict_text=words.verdict(forecast.verdict),
        slowdown=slowdown(forecast),
        gauge=_gauge(forecast, unchanged),
        apply=f"%oomdoctor fix {number}" if is_offered and is_applied else None,
        diff=f"%oomdoctor diff {number}" if is_offered and is_written else None,
        notes=tuple(_notes(candidate, unchanged)),
    )


def _notes(candidate: Candidate, unchanged: Forecast) -> list[str]:
    notes = [f"Refused when it was tried: {words.clean(candidate.refuted, 600)}"] if candidate.refuted else []
    notes += [words.clean(candidate.caveat, 600)] if candidate.caveat else []
    if candidate.forecast.refused and candidate.forecast.refused != unchanged.refused:  # that one is said above all
        notes.append(_lacking(candidate.forecast))
    if isinstance(candidate.patch, Refused):
        notes.append(f"No diff: {words.clean(candidate.patch.reason)}")
    return notes


def _counted(forecast: Forecast) -> int:
    """Return what the verdict goes by."""
    return max(forecast.peak or 0, forecast.reserved or 0)


def _quantity(forecast: Forecast) -> str:
    is_larger = forecast.reserved is not None and forecast.reserved >= (forecast.peak or 0)
    return "reserved" if is_larger else "allocated"


def _before(forecast: Forecast, unchanged: Forecast) -> int | None:
    """Return what the unchanged cell needs of the quantity that ``forecast`` is judged by, else what is known."""
    return unchanged.peak if unchanged.peak is None or forecast.reserved is None else _counted(unchanged)


def _peak(forecast: Forecast, unchanged: Forecast) -> str:
    if forecast.peak is None:
        return "no forecast"
    after, before = words.about(_counted(forecast)), _before(forecast, unchanged)
    if before is None:
        return after
    other = " allocated" if unchanged.reserved is None and forecast.reserved is not None else ""
    return f"{words.about(before)}{other} → {after}"


def _tensors(forecast: Forecast) -> str:
    if forecast.reserved is None or forecast.peak is None or forecast.reserved <= forecast.peak * _ALIKE:
        return ""
    return f", {words.about(forecast.peak)} in tensors"


def basis(forecast: Forecast) -> str:
    """Return what a forecast was found by, and how far off such forecasts may be."""
    name = words.clean(forecast.basis, _BASIS)
    if forecast.estimated is not None:
        low, high = forecast.estimated
        return f"{name}; an estimate: of such, 9 in 10 measured peaks are {low:g} to {high:g} times as large"
    return f"{name}, ± {words.percent(forecast.error_ratio)}" if forecast.error_ratio else name


def slowdown(forecast: Forecast) -> str:
    """Return the forecast time as a multiple of the unchanged cell's."""
    return "unknown" if forecast.slowdown is None else f"≈ {words.times(forecast.slowdown)}"


def _gauge(forecast: Forecast, unchanged: Forecast) -> Gauge | None:
    if forecast.peak is None or forecast.budget is None:
        return None
    needed = _counted(forecast)
    scale = max(needed, forecast.budget, _before(forecast, unchanged) or 0)
    return Gauge(needed / scale, forecast.budget / scale) if scale else None
