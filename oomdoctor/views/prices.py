"""What changes cost: the fixes of a plan as rows, and after a retry, or after one was refused, the visible notice.

A figure from a forecast carries ``≈`` and the name of what it was found by. A healed cell answers ``ok``, so the notice
is the only sign that something else ran than what stands in the cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from oomdoctor.model.case import Outcome, OutcomeKind, State
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
_SAME_PACE: Final = 0.05
"""Within this, one way to write the same work takes as long as another for all that counted operations tell."""
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
    budget = f" of {format_size(unchanged.budget)}" if unchanged.budget is not None else ""
    verdict = f"{labels.verdict(unchanged.verdict)} ({basis(unchanged)}{_tensors(unchanged)})"
    need = f"{labels.about(needed(unchanged))}{budget}{line}"
    return _with_reason(f"As written, this cell needs {need}: {verdict}.", unchanged)


def fix_rows(plan: Plan) -> tuple[FixRow, ...]:
    """Return the candidates in their order, numbered as ``%oomdoctor fix N`` counts them."""
    return tuple(fix_row(number, one, plan) for number, one in enumerate(plan.candidates, 1))


def fix_row(number: int, candidate: Candidate, plan: Plan) -> FixRow:
    """Return one candidate as a row of its plan, without commands where it was refuted.

    All rows of a plan tell one quantity: what the allocator would hold, where one stands between.
    """
    unchanged = plan.unchanged
    forecast, is_offered = candidate.forecast, candidate.refuted is None
    effect, promise = labels.EFFECTS[candidate.effect]
    if candidate.is_tried and candidate.effect in (Effect.EXACT, Effect.EQUIVALENT) and is_offered:
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
        peak=_peak(forecast),
        basis=f"{basis(forecast)}{_tensors(forecast, unchanged)}" if forecast.peak is not None else "",
        verdict=forecast.verdict,
        verdict_text=labels.verdict(forecast.verdict),
        slowdown=pace(candidate),
        gauge=_gauge(forecast, plan),
        apply=f"%oomdoctor fix {number}" if is_offered and is_applied else None,
        diff=f"%oomdoctor diff {number}" if is_offered and is_written else None,
        notes=tuple(_notes(candidate, unchanged)),
    )


def _notes(candidate: Candidate, unchanged: Forecast) -> list[str]:
    notes = [f"Refused when it was tried: {labels.clean(candidate.refuted, 600)}"] if candidate.refuted else []
    notes += [_IN_VAIN] if _is_in_vain(candidate.forecast, unchanged) else []
    notes += [labels.clean(candidate.caveat, 600)] if candidate.caveat else []
    if candidate.forecast.refused and candidate.forecast.refused != unchanged.refused:  # that one is said above all
        notes.append(_lacking(candidate.forecast))
    if isinstance(candidate.patch, Refused):
        notes.append(f"No diff: {labels.clean(candidate.patch.reason)}")
    return notes


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
    limit = "" if forecast.budget is None else f" of {format_size(forecast.budget)}"
    return f"{labels.about(needed(forecast))}{limit}"


def _tensors(forecast: Forecast, unchanged: Forecast | None = None) -> str:
    """Return how much of a forecast tensors take, where that is another number; or that it is of them alone."""
    if forecast.reserved is None:
        return "" if unchanged is None or unchanged.reserved is None else "; tensors alone, the allocator may hold more"
    if forecast.peak is None or forecast.reserved <= forecast.peak * _ALIKE:
        return ""
    return f"; {labels.about(forecast.peak)} in tensors"


def basis(forecast: Forecast) -> str:
    """Return what a forecast was found by, and how far off such forecasts may be."""
    name = labels.clean(forecast.basis, _BASIS)
    if forecast.estimated is not None:
        low, high = forecast.estimated
        return f"{name}; a rough estimate: the real peak may be {low:g} to {high:g} times this"
    return f"{name}, ± {labels.percent(forecast.error_ratio)}" if forecast.error_ratio else name


def offered(candidate: Candidate) -> str:
    """Return a change in one sentence: what it does, what it keeps, and what it costs."""
    forecast = candidate.forecast
    dose = f" ({labels.clean(candidate.dose.short, 120)})" if candidate.dose.values else ""
    parts = [_keeps(candidate.effect), told] if (told := pace(candidate)) else [_keeps(candidate.effect)]
    if forecast.peak is not None:
        rough = " by a rough estimate" if forecast.estimated is not None else ""
        parts.append(f"peak {_peak(forecast)}{rough}")
    return f"{labels.clean(candidate.title)}{dose}: {', '.join(parts)}."


def _keeps(effect: Effect) -> str:
    """Return what becomes of the results, in a list of facts."""
    name, promise = labels.EFFECTS[effect]
    return promise if effect in (Effect.EXACT, Effect.EQUIVALENT) else name


def pace(candidate: Candidate) -> str:
    """Return how long the changed cell takes beside the unchanged one; nothing where that is not known.

    The ratio is of operations that were counted and not timed. It tells what work is added. A change of the results
    may do less work than was asked for, which is no speed.
    """
    ratio, keeps = candidate.forecast.slowdown, candidate.effect in (Effect.EXACT, Effect.EQUIVALENT)
    if ratio is None or (ratio < 1 - _SAME_PACE and not keeps):
        return ""
    if ratio <= 1 + _SAME_PACE:
        return "about as fast"
    return f"about {labels.percent(ratio - 1)} slower" if ratio < _TWICE else f"about {ratio:.1f} times as long"


def _gauge(forecast: Forecast, plan: Plan) -> Gauge | None:
    """Return how much of the limit a change needs, on one scale for all rows of a plan."""
    if forecast.peak is None or forecast.budget is None:
        return None
    known = (plan.unchanged, forecast, *(one.forecast for one in plan.candidates))
    scale = max(*map(needed, known), forecast.budget)
    return Gauge(needed(forecast) / scale, forecast.budget / scale) if scale else None


_KEEP, _BACK, _OFFERED, _ANYWAY = _COMMANDS = ("Keep it", "Undo it", "Offered", "Anyway")
"""Names of the facts that are commands to type."""

_IN_VAIN: Final = "It does not lower the peak here, so it is not offered."

CHANGED: Final = "Changed"
"""Name of the facts that say what a healed cell ran with."""

WHY: Final = "Why"
"""Name of the fact that says why a cell was not healed, or what a healed one did not get back."""


def aftermath(case: Case, *, in_notebook: bool = True) -> Notice:
    """Return how ``case`` ended: what was changed, at what price, and how to keep it.

    Args:
        in_notebook: whether commands can be typed.
    """
    mark = "✓" if case.outcome.kind is OutcomeKind.HEALED and not _passed(case) else "!"
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
    if outcome.interrupted:
        return (
            "Interrupted. Everything is as before the cell ran." if _is_as_before(outcome) else f"Interrupted; {start}."
        )
    return {
        OutcomeKind.OFFERED: f"{what} ran out of memory; nothing was changed.",
        OutcomeKind.HEALED: f"Healed{_passed(case)}: {what} ran to its end with {changes} in place, {after}.",
        OutcomeKind.REFUSED: f"Not healed: no fix kept the results of {what}; {start}."
        if outcome.attempts or outcome.state is State.RESTORED
        else f"Not retried: {what} was left as it failed.",
        OutcomeKind.ROLLED_BACK: f"Rolled back: {what} did not run to its end {after}; {start}.",
        OutcomeKind.FAILED: f"Retry failed: {what} did not run to its end {after}.",
    }[outcome.kind]


def _is_as_before(outcome: Outcome) -> bool:
    return outcome.interrupted and outcome.state is State.RESTORED


def _passed(case: Case) -> str:
    """Return that a healed cell took more than it was to fit in, which the user may have typed."""
    limit, peak = case.plan.unchanged.budget, case.outcome.peak
    if limit is None or peak is None or peak <= limit:
        return ""
    return f", but over the limit ({format_size(peak)} of {format_size(limit)})"


def _facts(case: Case) -> list[tuple[str, str]]:
    outcome = case.outcome
    if _is_as_before(outcome):
        return _commands(case, [])
    did = CHANGED if outcome.kind is OutcomeKind.HEALED else "Tried"
    known = {one.label: (number, one) for number, one in enumerate(case.plan.candidates, 1)}
    used = [known[label] for label in outcome.fixes if label in known]
    forecast = used[0][1].forecast if len(used) == 1 else None
    facts = [(WHY, labels.clean(outcome.why, 600))]
    facts += [(did, _change(known[one][1]) if one in known else labels.code(one, 120)) for one in outcome.fixes]
    if outcome.kind is OutcomeKind.HEALED:
        facts.append(("Checked", labels.clean(outcome.checked, 600)))
        facts += [("Mind", labels.clean(one.caveat, 600)) for _, one in used if one.caveat not in (None, outcome.why)]
    facts += [("Peak", _measured(case, forecast)), ("Time", _time(case, used))]
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
    return f"{labels.clean(candidate.title)}{dose}: {_keeps(candidate.effect)}"


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
        parts.append(f"limit {format_size(budget)}")
    return "; ".join(parts)


def _off(forecast_bytes: int, measured_bytes: int) -> str:
    off = forecast_bytes / measured_bytes - 1
    return "met" if abs(off) < 0.0005 else f"{labels.percent(abs(off), 1)} too {'high' if off > 0 else 'low'}"


def _time(case: Case, used: list[tuple[int, Candidate]]) -> str:
    if case.outcome.elapsed_s is None:
        return ""
    told = pace(used[0][1]) if len(used) == 1 else ""
    return f"{case.outcome.elapsed_s:.1f} s{f'; forecast: {told}' if told else ''}"


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
