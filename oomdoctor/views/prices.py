"""What changes cost: the fixes of a plan as rows.

A figure from a forecast carries ``≈`` and the name of what it was found by. What healed a cell has what was measured in
the place of its forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Candidate, Forecast, MeasuredPeak, Plan, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views import labels
from oomdoctor.views.document import Block, Fixes, FixRow, Fold, Gauge, Items, Line, prose

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident

_BASIS: Final = 600
"""Characters of a basis, which is a sentence of a fix: of two fixes together it is two. It is told to its end."""
_MOST_REFUSALS: Final = 6
"""Refused fixes that text shows; those that the findings suggest come first, and the page folds the rest away."""
_SAME_PACE: Final = 0.05
"""Within this, one way to write the same work takes as long as another for all that counted operations tell."""
_TWICE: Final = 2.0
_FAR: Final = 2.0
"""From this many times the limit on, a need is far over it."""
_VAGUE: Final = 10.0
"""An estimate whose ends are as many times apart tells no more than the lower one."""
_ALIKE: Final = 1.05
"""Up to this much less than what the allocator holds, what tensors take of it tells a reader nothing new."""


_IN_VAIN: Final = "It does not lower the peak here, so it is not offered."


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
            alike: dict[str, list[str]] = {}
            for fix, reason in self.refusals:
                alike.setdefault(reason, []).append(fix)
            rows = (Text.assemble((", ".join(ids), "path"), ": ", prose(reason)) for reason, ids in alike.items())
            number = labels.count(len(self.refusals), "fix", "fixes")
            yield Fold("Considered and refused", (Items(tuple(rows), most=_MOST_REFUSALS),), aside=number)

    def without_commands(self) -> Prices:
        """Return it for where no command can be typed, or would apply to something else."""
        return replace(self, fixes=tuple(replace(row, apply=None, diff=None) for row in self.fixes))


def prices(plan: Plan, incident: Incident | None = None) -> Prices:
    """Return the facts of ``plan``, for ``incident`` if the cell has failed; fixes have their numbers in commands."""
    unchanged = plan.unchanged
    fits = unchanged.peak is not None and (unchanged.peak == 0 or unchanged.verdict is Verdict.FITS)
    # A failure contradicts a forecast that fits, unless it tells of another limit than that of the forecast.
    failed = incident is not None and incident.is_oom and not (fits and incident.requested is not None)
    is_contradicted = failed and unchanged.verdict is not Verdict.TOO_LARGE
    return Prices(
        unchanged=_failed_need(unchanged)
        if is_contradicted and not plan.pending
        else _need(unchanged, is_failed=incident is not None),
        fixes=fix_rows(plan),
        unfixed=_unfixed(plan, fits=not is_contradicted),
        refusals=tuple((labels.clean(fix, 120), labels.clean(reason)) for fix, reason in plan.refusals),
    )


def _failed_need(unchanged: Forecast) -> str:
    """Return what is known of the need of a cell that has failed, whatever was forecast: more than there is."""
    more = "there was" if unchanged.budget is None else format_size(unchanged.budget)
    return _with_reason(f"As written, this cell needs more than {more}.", unchanged)


def _lacking(forecast: Forecast) -> str:
    """Return why there is no forecast, or no better one."""
    return f"{'Rough estimate' if forecast.peak else 'No forecast'}: {labels.clean(forecast.refused or forecast.basis)}"


def _with_reason(told: str, unchanged: Forecast) -> str:
    is_lacking = unchanged.refused or unchanged.peak is None
    return f"{told} {_lacking(unchanged).removesuffix('.')}." if is_lacking else told


def _unfixed(plan: Plan, *, fits: bool) -> str | None:
    """Return why there are no fixes, or none that are settled; None where the forecast of the cell says it already."""
    unchanged = plan.unchanged
    if plan.pending:
        return "Forecasts are running. Fixes appear when they are done."
    if plan.candidates or (unchanged.peak is None and unchanged.refused is None):
        return None
    is_enough = fits and unchanged.verdict is Verdict.FITS
    return "No change is needed." if is_enough else "No fix applies here."


def _need(unchanged: Forecast, *, is_failed: bool = False) -> str:
    """Return in one sentence what the cell needs without any change; of one that has failed, its line is known."""
    if unchanged.peak is None:
        reason = labels.clean(unchanged.refused or unchanged.basis).removesuffix(".")
        return f"As written, this cell has no forecast: {reason}."
    line = "" if unchanged.peak_line is None or is_failed else f", at line {unchanged.peak_line}"
    verdict = f"{labels.verdict(unchanged.verdict)} ({basis(unchanged)}{tensors(unchanged)})"
    need = f"{_peak(unchanged)}{line}"
    return _with_reason(f"As written, this cell needs {need}: {verdict}.", unchanged)


def fix_rows(plan: Plan) -> tuple[FixRow, ...]:
    """Return the candidates in their order, numbered as ``%oomdoctor fix N`` counts them."""
    return tuple(fix_row(plan.number(one), one, plan) for one in plan.candidates)


def fix_row(number: int, candidate: Candidate, plan: Plan) -> FixRow:
    """Return one candidate as a row of its plan, without commands where it was refuted.

    All rows of a plan tell one quantity: what the allocator would hold, where one stands between.
    """
    unchanged, took = plan.unchanged, candidate.measured
    forecast, is_offered = candidate.forecast, candidate.refuted is None
    verdict = forecast.verdict if took is None else Verdict.FITS
    effect, promise = labels.EFFECTS[candidate.effect]
    if candidate.is_tried and candidate.effect.keeps_results and is_offered:
        promise = f"{promise}, to be checked"
    is_written = not isinstance(candidate.patch, Refused)
    is_applied = candidate.effect is not Effect.ADVICE and (is_written or candidate.applies_live)
    is_applied = is_applied and not _is_in_vain(forecast, unchanged)
    return FixRow(
        number=number,
        title=labels.clean(candidate.title),
        dose=labels.clean(candidate.dose.short, 120),
        effect=effect,
        promise=promise,
        peak=_peak(forecast) if took is None else took_of(took, forecast.budget),
        basis=_found_by(forecast, unchanged) if took is None else measured_by(took),
        verdict=verdict,
        verdict_text=labels.verdict(verdict) if took is None else f"{labels.MARKS[verdict]} measured",
        slowdown=pace(candidate),
        gauge=_gauge(candidate, plan),
        apply=f"%oomdoctor fix {number}" if is_offered and is_applied else None,
        diff=f"%oomdoctor diff {number}" if is_offered and is_written else None,
        notes=tuple(_notes(candidate, unchanged)),
    )


def _notes(candidate: Candidate, unchanged: Forecast) -> list[str]:
    notes = [f"Refused when it was tried: {labels.clean(candidate.refuted, 600)}"] if candidate.refuted else []
    notes += [_IN_VAIN] if _is_in_vain(candidate.forecast, unchanged) else []
    notes += [labels.clean(candidate.caveat, 600)] if candidate.caveat else []
    notes += made_anew(candidate)
    if candidate.forecast.refused and candidate.forecast.refused != unchanged.refused:  # that one is said above all
        notes.append(_lacking(candidate.forecast))
    if isinstance(candidate.patch, Refused):
        notes.append(f"No diff: {labels.clean(candidate.patch.reason)}")
    return notes


def made_anew(candidate: Candidate) -> list[str]:
    """Return what a retry makes anew of what earlier cells have made, a sentence for each of them."""
    edits = () if isinstance(candidate.patch, Refused) else candidate.patch.edits
    listed = [(", ".join(map(labels.code, edit.anew)), edit.name) for edit in edits if edit.anew]
    return [f"a retry makes {names} of {cell} anew and runs nothing else of that cell" for names, cell in listed]


def needed(forecast: Forecast) -> int:
    """Return what the verdict goes by: what the allocator would hold, where that is known."""
    return max(forecast.peak or 0, forecast.reserved or 0)


def _is_in_vain(forecast: Forecast, unchanged: Forecast) -> bool:
    """Return whether a change that does not fit needs no less than the cell as it is; of estimates it is not known."""
    is_told = all(one.refused is None and one.estimated is None for one in (forecast, unchanged))
    if not is_told or unchanged.peak is None or forecast.verdict is not Verdict.TOO_LARGE:
        return False
    return (forecast.reserved is None) == (unchanged.reserved is None) and needed(forecast) >= needed(unchanged)


def _peak(forecast: Forecast) -> str:
    if forecast.peak is None:
        return "no forecast"
    least = _at_least(forecast)
    need = forecast.peak if _is_pooled(forecast) else needed(forecast)
    told = labels.about(need) if least is None else f"more than {format_size(least)}"
    told = f"{told} in tensors" if _is_pooled(forecast) else told
    if forecast.budget is None:
        return told
    if not forecast.budget:  # what a retry keeps for itself is more than is free
        return f"{told}, more than is left"
    limit = format_size(forecast.budget)
    is_far = (least or need) > _FAR * forecast.budget
    return f"{told}, far over the {limit} for tensors" if is_far else f"{told} of {limit}"


def _is_pooled(forecast: Forecast) -> bool:
    """Return whether it is the allocator's cache, and no tensor, that is far over the limit: it would be given back."""
    if forecast.peak is None or forecast.budget is None or forecast.reserved is None:
        return False
    return forecast.peak <= _FAR * forecast.budget < forecast.reserved


def _at_least(forecast: Forecast) -> int | None:
    """Return the bytes that an estimate tells as the least, where it tells no more; None where it tells more."""
    if forecast.estimated is None or forecast.peak is None:
        return None
    low, high = forecast.estimated
    return round(needed(forecast) * min(low, 1.0)) if high >= _VAGUE * low else None


def took_of(took: MeasuredPeak, limit: int | None) -> str:
    """Return what a healed cell took, as the rows of a plan tell it: what the allocator held, where one counts."""
    most = _most(took, limit)
    if limit is None or took.reserved is None:  # the system counts otherwise, pages of files among them
        return format_size(most)
    told = format_size(most)
    return f"{told}, over the {format_size(limit)} for tensors" if most > limit else f"{told} of {format_size(limit)}"


def _most(took: MeasuredPeak, limit: int | None) -> int:
    """Return what a run took: a cache beyond the limit of a plan is nothing that it needed."""
    held = took.reserved or 0
    return took.tensors if limit is not None and held > limit else max(took.tensors, held)


def measured_by(took: MeasuredPeak) -> str:
    """Return how much of what was measured tensors take, where that is another number; else what it was measured by."""
    if took.reserved is not None and took.reserved > took.tensors * _ALIKE:
        return f"{format_size(took.tensors)} in tensors"
    return labels.clean(took.measure)


def _found_by(forecast: Forecast, unchanged: Forecast) -> str:
    return f"{basis(forecast)}{tensors(forecast, unchanged)}" if forecast.peak is not None else ""


def tensors(forecast: Forecast, unchanged: Forecast | None = None) -> str:
    """Return how much of a forecast tensors take, where that is another number; or that it is of them alone."""
    if forecast.reserved is None:
        return "" if unchanged is None or unchanged.reserved is None else "; tensors alone, the allocator may hold more"
    if forecast.peak is None or forecast.reserved <= forecast.peak * _ALIKE:
        return ""
    if _is_pooled(forecast):
        return f"; with no limit the allocator would hold {labels.about(forecast.reserved)}"
    return f"; {labels.about(forecast.peak)} in tensors"


def basis(forecast: Forecast) -> str:
    """Return what a forecast was found by, and how far off such forecasts may be."""
    name = labels.clean(forecast.basis, _BASIS)
    if _at_least(forecast) is not None:
        return f"{name}; a rough estimate: the real peak may be far higher"
    if forecast.estimated is not None:
        low, high = (format_size(round(needed(forecast) * end)) for end in forecast.estimated)
        return f"{name}; a rough estimate: 9 in 10 such peaks lie between {low} and {high}"
    return f"{name}, ± {labels.percent(forecast.error_ratio)}" if forecast.error_ratio else name


def offered(candidate: Candidate) -> str:
    """Return a change in one sentence: what it does, what it keeps, and what it costs."""
    forecast = candidate.forecast
    dose = f" ({labels.clean(candidate.dose.short, 120)})" if candidate.dose.values else ""
    parts = [keeps(candidate.effect), told] if (told := pace(candidate)) else [keeps(candidate.effect)]
    if candidate.measured is not None:
        parts.append(f"measured peak {took_of(candidate.measured, forecast.budget)}")
    elif forecast.peak is not None:
        parts += [f"peak {_peak(forecast)}", *(["a rough estimate"] if forecast.estimated is not None else [])]
    return f"{labels.clean(candidate.title)}{dose}: {', '.join(parts)}."


def keeps(effect: Effect) -> str:
    """Return what becomes of the results, in a list of facts."""
    name, promise = labels.EFFECTS[effect]
    return promise if effect.keeps_results else name


def pace(candidate: Candidate) -> str:
    """Return how long the changed cell takes beside the unchanged one; nothing where that is not known.

    The ratio is of operations that were counted and not timed. It tells what work is added. A change of the results
    may do less work than was asked for, which is no speed.
    """
    ratio, is_kept = candidate.forecast.slowdown, candidate.effect.keeps_results
    if ratio is None or (ratio < 1 - _SAME_PACE and not is_kept):
        return ""
    if ratio <= 1 + _SAME_PACE:
        return "about as fast"
    return f"about {labels.percent(ratio - 1)} slower" if ratio < _TWICE else f"about {ratio:.1f} times as long"


def _gauge(candidate: Candidate, plan: Plan) -> Gauge | None:
    """Return how much of the limit a change needs, on one scale for all rows of a plan."""
    forecast = candidate.forecast
    if _need_of(candidate) is None or forecast.budget is None:
        return None
    scale = max(needed(plan.unchanged), forecast.budget, *(_need_of(one) or 0 for one in (candidate, *plan.candidates)))
    return Gauge((_need_of(candidate) or 0) / scale, forecast.budget / scale) if scale else None


def _need_of(candidate: Candidate) -> int | None:
    took = candidate.measured
    if took is not None and took.reserved is not None:
        return _most(took, candidate.forecast.budget)
    return None if candidate.forecast.peak is None else needed(candidate.forecast)
