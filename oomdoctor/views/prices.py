"""What changes cost: the fixes of a plan as rows, and after a retry, or after one was refused, the visible notice.

A figure from a forecast carries ``≈`` and the name of what it was found by. A healed cell answers ``ok``, so the notice
is the only sign that something else ran than what stands in the cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Candidate, Forecast, Plan, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views import labels
from oomdoctor.views.document import Block, Fixes, FixRow, Fold, Gauge, Items, Line, Notice, prose

if TYPE_CHECKING:
    from oomdoctor.model.case import Case, RanksTogether
    from oomdoctor.model.incident import Incident

_BASIS: Final = 600
"""Characters of a basis, which is a sentence of a fix: of two fixes together it is two. It is told to its end."""
_MOST_REFUSALS: Final = 6
"""Refused fixes that text shows; those that the findings suggest come first, and the page folds the rest away."""
_SAME_PACE: Final = 0.02
_TWICE: Final = 2.0
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
    """Return the facts of ``plan``; its fixes are numbered as ``%oomdoctor fix N`` counts them.

    Args:
        incident: the failure that the plan answers, None where the cell has not failed.
    """
    unchanged = plan.unchanged
    fits = unchanged.peak is not None and (unchanged.peak == 0 or unchanged.verdict is Verdict.FITS)
    # A failure contradicts a forecast that fits, unless it tells of another limit than that of the forecast.
    failed = incident is not None and incident.is_oom and not (fits and incident.requested is not None)
    is_contradicted = failed and unchanged.verdict is not Verdict.TOO_LARGE
    return Prices(
        unchanged=_failed_need(unchanged) if is_contradicted and unchanged.peak is not None else _need(unchanged),
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
    return f"{'Rough estimate' if forecast.peak else 'No forecast'}: {labels.clean(forecast.refused or '')}"


def _with_reason(told: str, unchanged: Forecast) -> str:
    return f"{told} {_lacking(unchanged).removesuffix('.')}." if unchanged.refused else told


def _unfixed(plan: Plan, *, fits: bool) -> str | None:
    """Return why there are no fixes, or none that are settled; None where the forecast of the cell says it already."""
    unchanged = plan.unchanged
    if plan.pending:
        return "Forecasts are running. Fixes appear when they are done."
    if plan.candidates or (unchanged.peak is None and unchanged.refused is None):
        return None
    is_enough = fits and unchanged.verdict is Verdict.FITS
    return "No change is needed." if is_enough else "No fix applies here."


def _need(unchanged: Forecast) -> str:
    """Return in one sentence what the cell needs without any change."""
    if unchanged.peak is None:
        reason = labels.clean(unchanged.refused or unchanged.basis).removesuffix(".")
        return f"As written, this cell has no forecast: {reason}."
    line = f", at line {unchanged.peak_line}" if unchanged.peak_line is not None else ""
    budget = f" of {format_size(unchanged.budget)}" if unchanged.budget is not None else ""
    verdict = f"{labels.verdict(unchanged.verdict)}{_tensors(unchanged)} ({basis(unchanged)})"
    need = f"{labels.about(_counted(unchanged))} ({_quantity(unchanged)})"
    return _with_reason(f"As written, this cell needs {need}{budget}{line}: {verdict}.", unchanged)


def fix_rows(plan: Plan) -> tuple[FixRow, ...]:
    """Return the candidates in their order, numbered as ``%oomdoctor fix N`` counts them."""
    return tuple(fix_row(number, one, plan.unchanged) for number, one in enumerate(plan.candidates, 1))


def fix_row(number: int, candidate: Candidate, unchanged: Forecast) -> FixRow:
    """Return one candidate as a row, without commands where it was refuted."""
    forecast, is_offered = candidate.forecast, candidate.refuted is None
    effect, promise = labels.EFFECTS[candidate.effect]
    if candidate.is_tried and candidate.effect in (Effect.EXACT, Effect.EQUIVALENT) and is_offered:
        promise = f"{promise}, to be checked"
    is_written = not isinstance(candidate.patch, Refused)
    is_applied = candidate.effect is not Effect.ADVICE and (is_written or candidate.applies_live)
    return FixRow(
        number=number,
        title=labels.clean(candidate.title),
        dose=labels.clean(candidate.dose.short, 120),
        effect=effect,
        promise=promise,
        peak=_peak(forecast, unchanged),
        quantity=f"{_quantity(forecast)}{_tensors(forecast)}" if forecast.peak is not None else "",
        basis=basis(forecast) if forecast.peak is not None else "",
        verdict=forecast.verdict,
        verdict_text=labels.verdict(forecast.verdict),
        slowdown=slowdown(forecast),
        gauge=_gauge(forecast, unchanged),
        apply=f"%oomdoctor fix {number}" if is_offered and is_applied else None,
        diff=f"%oomdoctor diff {number}" if is_offered and is_written else None,
        notes=tuple(_notes(candidate, unchanged)),
    )


def _notes(candidate: Candidate, unchanged: Forecast) -> list[str]:
    notes = [f"Refused when it was tried: {labels.clean(candidate.refuted, 600)}"] if candidate.refuted else []
    notes += [labels.clean(candidate.caveat, 600)] if candidate.caveat else []
    if candidate.forecast.refused and candidate.forecast.refused != unchanged.refused:  # that one is said above all
        notes.append(_lacking(candidate.forecast))
    if isinstance(candidate.patch, Refused):
        notes.append(f"No diff: {labels.clean(candidate.patch.reason)}")
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
    after, before = labels.about(_counted(forecast)), _before(forecast, unchanged)
    if before is None:
        return after
    other = " allocated" if unchanged.reserved is None and forecast.reserved is not None else ""
    return f"{labels.about(before)}{other} → {after}"


def _tensors(forecast: Forecast) -> str:
    if forecast.reserved is None or forecast.peak is None or forecast.reserved <= forecast.peak * _ALIKE:
        return ""
    return f", {labels.about(forecast.peak)} in tensors"


def basis(forecast: Forecast) -> str:
    """Return what a forecast was found by, and how far off such forecasts may be."""
    name = labels.clean(forecast.basis, _BASIS)
    if forecast.estimated is not None:
        low, high = forecast.estimated
        return f"{name}; an estimate: of such, 9 in 10 measured peaks are {low:g} to {high:g} times as large"
    return f"{name}, ± {labels.percent(forecast.error_ratio)}" if forecast.error_ratio else name


def offered(candidate: Candidate) -> str:
    """Return a change in one sentence: what it does, what it keeps, and what it costs."""
    forecast = candidate.forecast
    dose = f" ({labels.clean(candidate.dose.short, 120)})" if candidate.dose.values else ""
    parts = [labels.EFFECTS[candidate.effect][1]]
    if forecast.slowdown is not None:
        parts.append(_pace(forecast.slowdown))
    if forecast.peak is not None:
        budget = f" of {format_size(forecast.budget)}" if forecast.budget is not None else ""
        rough = " by a rough estimate" if forecast.estimated is not None else ""
        parts.append(f"peak {labels.about(_counted(forecast))}{budget}{rough}")
    return f"{labels.clean(candidate.title)}{dose}: {', '.join(parts)}."


def _pace(ratio: float) -> str:
    if abs(ratio - 1) < _SAME_PACE:
        return "as fast as before"
    if ratio < _TWICE:
        return f"about {labels.percent(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"
    return f"about {ratio:.1f} times as long"


def slowdown(forecast: Forecast) -> str:
    """Return the forecast time as a multiple of the unchanged cell's."""
    return "unknown" if forecast.slowdown is None else f"≈ {labels.times(forecast.slowdown)}"


def _gauge(forecast: Forecast, unchanged: Forecast) -> Gauge | None:
    if forecast.peak is None or forecast.budget is None:
        return None
    needed = _counted(forecast)
    scale = max(needed, forecast.budget, _before(forecast, unchanged) or 0)
    return Gauge(needed / scale, forecast.budget / scale) if scale else None


_KEEP, _BACK, _OFFERED, _ANYWAY = _COMMANDS = ("Keep it", "Take it back", "Offered", "Anyway")
"""Names of the facts that are commands to type."""

CHANGED: Final = "Changed"
"""Name of the facts that say what a healed cell ran with."""

WHY: Final = "Why"
"""Name of the fact that says why a cell was not healed, or what a healed one did not get back."""


def aftermath(case: Case, *, in_notebook: bool = True) -> Notice:
    """Return how ``case`` ended: what was changed, at what price, and how to keep it.

    Args:
        in_notebook: whether commands can be typed.
    """
    mark = "✓" if case.outcome.kind is OutcomeKind.HEALED else "!"
    facts = ((name, told) for name, told in _facts(case) if told and (in_notebook or name not in _COMMANDS))
    return Notice(mark, _title(case), tuple(facts))


def _title(case: Case) -> str:
    outcome, cell = case.outcome, case.incident.cell
    what = "The cell" if cell is None or cell.number is None else f"In[{cell.number}]"
    after = f"after {labels.count(outcome.attempts, 'attempt')}"
    changes = labels.count(len(outcome.fixes), "change")
    start = (
        "the state before it is restored"
        if outcome.state is State.RESTORED
        else "the state before it is only partly restored"
    )
    return {
        OutcomeKind.OFFERED: f"{what} ran out of memory; nothing was changed.",
        OutcomeKind.HEALED: f"Healed: {what} ran to its end with {changes} in place, {after}.",
        OutcomeKind.REFUSED: f"Not healed: no fix kept the results of {what}; {start}."
        if outcome.attempts or outcome.state is State.RESTORED
        else f"Not retried: {what} was left as it failed.",
        OutcomeKind.ROLLED_BACK: f"Rolled back: {what} did not run to its end {after}; {start}.",
        OutcomeKind.FAILED: f"Retry failed: {what} did not run to its end {after}.",
    }[outcome.kind]


def _facts(case: Case) -> list[tuple[str, str]]:
    outcome = case.outcome
    did = CHANGED if outcome.kind is OutcomeKind.HEALED else "Tried"
    known = {one.label: (number, one) for number, one in enumerate(case.plan.candidates, 1)}
    used = [known[label] for label in outcome.fixes if label in known]
    forecast = used[0][1].forecast if len(used) == 1 else None
    facts = [(WHY, labels.clean(outcome.why, 600))]
    facts += [(did, _change(known[one][1]) if one in known else labels.code(one, 120)) for one in outcome.fixes]
    if outcome.kind is OutcomeKind.HEALED:
        facts.append(("Checked", labels.clean(outcome.checked, 600)))
        facts += [("Mind", labels.clean(one.caveat, 600)) for _, one in used if one.caveat not in (None, outcome.why)]
    facts += [("Peak", _measured(case, forecast)), ("Time", _time(case, forecast))]
    if outcome.ranks is not None:
        facts.append(("Ranks", _together(outcome.ranks)))
    if outcome.kind is not OutcomeKind.OFFERED:
        facts.append(("State", labels.STATES[outcome.state]))
    return facts + _commands(case, used)


def _together(ranks: RanksTogether) -> str:
    """Return how the ranks of a job went together."""
    told = [f"this is {ranks.rank} of {ranks.world}", f"memory ran out on {ranks.first}"]
    told.append(f"out of its run after {ranks.released_s:.2f} s")
    if ranks.agreed_s is not None:
        told.append(f"agreed after {ranks.agreed_s:.1f} s")
    if ranks.committed_s is not None:
        told.append(f"all at the end after {ranks.committed_s:.2f} s")
    return "; ".join(told)


def _change(candidate: Candidate) -> str:
    dose = f" ({labels.clean(str(candidate.dose), 120)})" if candidate.dose.values else ""
    effect, promise = labels.EFFECTS[candidate.effect]
    return f"{labels.clean(candidate.title)}{dose}; {effect}: {promise}"


def _measured(case: Case, forecast: Forecast | None) -> str:
    """Return forecast and measured peak side by side, and how far apart they are."""
    measured, expected = case.outcome.peak, forecast.peak if forecast is not None else None
    parts = []
    if forecast is not None and expected is not None:
        quantity = " in tensors" if forecast.reserved is not None else ""
        parts.append(f"forecast {labels.about(expected)}{quantity} ({basis(forecast)})")
    if measured is not None:
        means = f" ({labels.clean(case.outcome.measure)})" if case.outcome.measure else ""
        parts.append(f"measured {format_size(measured)}{means}")
    if expected is not None and measured:
        parts.append(f"forecast {_off(expected, measured)}")
    budget = forecast.budget if forecast is not None else case.plan.unchanged.budget
    if parts and budget is not None:
        parts.append(f"budget {format_size(budget)}")
    return "; ".join(parts)


def _off(forecast_bytes: int, measured_bytes: int) -> str:
    off = forecast_bytes / measured_bytes - 1
    return "met" if abs(off) < 0.0005 else f"{labels.percent(abs(off), 1)} too {'high' if off > 0 else 'low'}"


def _time(case: Case, forecast: Forecast | None) -> str:
    parts = []
    if case.outcome.elapsed_s is not None:
        parts.append(f"{case.outcome.elapsed_s:.1f} s")
    if forecast is not None and forecast.slowdown is not None:
        parts.append(f"forecast: {_pace(forecast.slowdown)}")
    return "; ".join(parts)


def _commands(case: Case, used: list[tuple[int, Candidate]]) -> list[tuple[str, str]]:
    """Return how to keep a change or take it back; where there was none, what can still be done."""
    if case.outcome.kind is OutcomeKind.HEALED:
        return [*((_KEEP, _keep(*one)) for one in used), (_BACK, "`%oomdoctor undo`")]
    offered = _untried(case)
    if offered is None:
        return []
    if case.outcome.anyway:
        told = f"`{offered.apply} --anyway` ({offered.title}) retries all the same; what is named stays as it is"
        return [(_ANYWAY, told)]
    if case.outcome.kind is OutcomeKind.REFUSED and not case.outcome.attempts:  # and so would any other change be
        return []
    return [(_OFFERED, f"`{offered.apply}` {offered.title}")]


def _keep(number: int, candidate: Candidate) -> str:
    if isinstance(candidate.patch, Refused):
        return f"there is no diff: {labels.clean(candidate.patch.reason)}"
    shows = f"`%oomdoctor diff {number}` shows the change to make in your source"
    return f"{shows}, `%oomdoctor fix {number} --insert` puts it into the next cell"


def _untried(case: Case) -> FixRow | None:
    """Return the best fix that may still help."""
    for row, candidate in zip(fix_rows(case.plan), case.plan.candidates, strict=True):
        if row.apply and candidate.label not in case.outcome.fixes and row.verdict is not Verdict.TOO_LARGE:
            return row
    return None
