"""How a case ended, which is told after a retry or after one was refused, and what a retry would do before that.

A healed cell answers ``ok``, so the notice is the only sign that something else ran than what stands in the cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomdoctor.model.case import Outcome, OutcomeKind, State
from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Candidate, Forecast, MeasuredPeak, Plan, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views import labels
from oomdoctor.views.document import FixRow, Notice
from oomdoctor.views.prices import (
    basis,
    fix_rows,
    keeps,
    made_anew,
    measured_by,
    needed,
    offered,
    pace,
    prices,
    tensors,
    took_of,
)

if TYPE_CHECKING:
    from oomdoctor.model.case import Case, RanksTogether

_KEEP, _BACK, _OFFERED, _ANYWAY = _COMMANDS = ("Keep it", "Undo it", "Offered", "Anyway")
"""Names of the facts that are commands to type."""

FOLLOWED: Final = "Added"
"""Name of the facts that say why a healed cell has more than what was asked for."""

_LONG_S: Final = 0.1
"""What takes less is not told."""

CHANGED: Final = "Changed"
"""Name of the facts that say what a healed cell ran with."""

WHY: Final = "Why"
"""Name of the fact that says why a cell was not healed, or what a healed one did not get back."""


def aftermath(case: Case, *, in_notebook: bool = True) -> Notice:
    """Return how ``case`` ended: what was changed, at what price, and how to keep it, by commands in a notebook."""
    mark = "✓" if case.outcome.kind is OutcomeKind.HEALED and not _passed(case) else "!"
    facts = ((name, told) for name, told in _facts(case) if told and (in_notebook or name not in _COMMANDS))
    return Notice(mark, _title(case), tuple(facts))


def _title(case: Case) -> str:
    outcome, cell = case.outcome, case.incident.cell
    what = "The cell" if cell is None or cell.number is None else f"In[{cell.number}]"
    after = f"after {labels.count(outcome.attempts, 'attempt')}"
    known = {one.label: len(one.made_of) for _, one in _used(case)}
    changes = labels.count(sum(known.get(label, 1) for label in outcome.fixes), "change")
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
        OutcomeKind.OFFERED: f"Undone: {what} is as before it ran."
        if outcome.why
        else f"{what} ran out of memory; nothing was changed.",
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
    is_counted = case.outcome.peak_reserved is not None
    if limit is None or peak is None or peak <= limit or not is_counted:
        return ""
    return f", but over the limit ({format_size(peak)} of {format_size(limit)})"


def _facts(case: Case) -> list[tuple[str, str]]:
    outcome = case.outcome
    if _is_as_before(outcome):
        return _commands(case, [])
    did, used = CHANGED if outcome.kind is OutcomeKind.HEALED else "Tried", _used(case)
    known = {one.label: one for _, one in used}
    forecast = used[0][1].forecast if len(used) == 1 else None
    facts = [(WHY, labels.clean(outcome.why, 600))]
    facts += [(did, _change(known[one]) if one in known else labels.code(one, 120)) for one in outcome.fixes]
    if outcome.kind is OutcomeKind.HEALED:
        facts += [(FOLLOWED, _followed(one)) for _, one in used if one.follows]
        facts.append(("Checked", labels.clean(outcome.checked, 600)))
        facts += [("Mind", labels.clean(one.caveat, 600)) for _, one in used if one.caveat not in (None, outcome.why)]
        facts += [("Mind", told) for _, one in used for told in made_anew(one)]
    facts += [("Peak", _measured(case, forecast)), ("Time", _time(case, used))]
    if outcome.ranks is not None:
        facts.append(("Ranks", _together(outcome.ranks)))
    if outcome.kind is not OutcomeKind.OFFERED:
        facts.append(("State", labels.STATES[outcome.state]))
    return facts + _commands(case, used)


def _used(case: Case) -> list[tuple[int, Candidate]]:
    """Return the changes of the last attempt that are known, each with its number."""
    return [(case.plan.number(one), one) for one in case.plan.candidates if one.label in case.outcome.fixes]


def _followed(candidate: Candidate) -> str:
    """Return why a retry has come to a change that it did not begin with."""
    failed = f"{labels.code(candidate.follows, 120)} alone ran out of memory too"
    if not candidate.parts:
        return f"{failed}, so {labels.code(str(candidate.dose), 120)} was taken"
    fix, dose = candidate.parts[-1]
    return f"{failed}, so {labels.code(f'{fix}({dose})' if dose.values else fix, 120)} was added"


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
    return f"{labels.clean(candidate.title)}{dose}: {keeps(candidate.effect)}"


def _measured(case: Case, forecast: Forecast | None) -> str:
    """Return what was measured, the forecast beside it, and how far apart they are."""
    outcome = case.outcome
    limit = forecast.budget if forecast is not None else case.plan.unchanged.budget
    parts, took = [], None
    if outcome.peak is not None:
        took = MeasuredPeak(tensors=outcome.peak, reserved=outcome.peak_reserved, measure=outcome.measure)
        how = f" ({means})" if (means := measured_by(took)) else ""
        parts.append(f"measured {took_of(took, limit)}{how}")
    if forecast is not None and forecast.peak is not None:
        is_whole = forecast.reserved is None or took is None or took.reserved is not None
        told = f"{labels.about(needed(forecast) if is_whole else forecast.peak)}{'' if is_whole else ' in tensors'}"
        parts.append(f"forecast {told} ({basis(forecast)}{tensors(forecast) if is_whole else ''})")
        if took is not None and took.tensors:
            is_held = forecast.reserved is not None and took.reserved is not None
            met = (needed(forecast), took.reserved or 0) if is_held else (forecast.peak, took.tensors)
            parts.append(f"forecast {_off(*met)}")
    if parts and took is None and limit is not None:
        parts.append(f"limit {format_size(limit)}")
    return "; ".join(parts)


def _off(forecast_bytes: int, measured_bytes: int) -> str:
    off = forecast_bytes / measured_bytes - 1
    return "met" if abs(off) < 0.0005 else f"{labels.percent(abs(off), 1)} too {'high' if off > 0 else 'low'}"


def _time(case: Case, used: list[tuple[int, Candidate]]) -> str:
    """Return how long the healed cell ran; apart from that, how long it took to come to it."""
    whole_s, run_s = case.outcome.elapsed_s, case.outcome.run_s
    if whole_s is None:
        return ""
    told = pace(used[0][1]) if len(used) == 1 else ""
    parts = [f"{whole_s:.1f} s" if run_s is None else f"the cell ran in {run_s:.1f} s"]
    parts += [f"forecast: {told}"] if told else []
    if run_s is not None and whole_s - run_s >= _LONG_S:
        parts.append(f"checks and failed attempts took {whole_s - run_s:.1f} s more")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What `%oomdoctor retry` would do: the candidates that it would try, or why none, if not for their forecasts."""

    chosen: tuple[Candidate, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Retry:
        """Return what it would do by the plan alone: try what keeps the result and is not known to be too large."""
        offered = (one for one in plan.candidates if one.refuted is None)
        keeping = (one for one in offered if one.effect.keeps_results)
        return cls(chosen=tuple(one for one in keeping if one.forecast.fits is not False))


def next_steps(case: Case, retry: Retry) -> tuple[str, ...]:
    """Return what happened, or what to type next: what is said to be run is what would be."""
    if case.outcome.kind is not OutcomeKind.OFFERED:
        end = aftermath(case)
        return (
            f"{end.mark} {end.title}",
            *(f"{name}: {text}." for name, text in end.facts if name in (WHY, CHANGED, FOLLOWED)),
        )
    if case.plan.pending:
        return ("`%oomdoctor retry` waits for the forecasts, then runs the cell again with the best fix that fits.",)
    rows = [row for row in prices(case.plan).fixes if row.apply]
    if not rows:
        return ()
    if retry.why:
        return (f"`%oomdoctor retry` runs nothing: {labels.clean(retry.why, 600)}.",)
    verdict = retry.chosen[0].forecast.verdict if retry.chosen else None
    if verdict is Verdict.FITS:
        return ("`%oomdoctor retry` runs the cell again with the best fix that fits; state is restored first.",)
    if verdict is not None:
        number = case.plan.number(retry.chosen[0])
        least = "no change that keeps the result is certain to fit"
        return (f"`%oomdoctor retry` tries fix {number} first, though {least}; state is restored first.",)
    fitting = next((row for row in rows if row.verdict is Verdict.FITS and row.effect in _KEEPING), None)
    if fitting is not None:
        nothing = "`%oomdoctor retry` runs nothing unasked"
        return (f"{nothing}: `{fitting.apply}` applies the fix that fits; state is restored first.",)
    other = changing(case.plan)
    if other is not None:
        return (why_nothing(case.plan), f"`%oomdoctor fix {case.plan.number(other)}` {CHANGES}: {offered(other)}")
    nothing = f"`%oomdoctor retry` runs nothing. {why_nothing(case.plan)}"
    return (f"{nothing} `{rows[0].apply}` tries one all the same; state is restored first.",)


_KEEPING: Final = [labels.EFFECTS[effect][0] for effect in Effect if effect.keeps_results]
CHANGES: Final = "changes results and runs only when you ask for it"


def changing(plan: Plan) -> Candidate | None:
    """Return the best change of a plan that changes results and may fit; it is never made unasked."""
    applied = {row.number for row in fix_rows(plan) if row.apply}
    found = [one for one in plan.candidates if one.effect is Effect.CHANGES_RESULT and plan.number(one) in applied]
    may_fit = [one for one in found if one.forecast.fits is not False and not one.breaks]
    return next((one for one in may_fit if not one.forecast.is_hopeless), None)


def why_nothing(plan: Plan) -> str:
    """Return in a sentence why a retry would try none of the plan's changes."""
    offered = [one for one in plan.candidates if one.refuted is None and one.effect is not Effect.ADVICE]
    keeping = [one for one in offered if one.effect.keeps_results]
    if not plan.candidates and not plan.refusals:
        return f"No fix was looked for: {labels.clean(plan.unchanged.refused or plan.unchanged.basis)}."
    if not offered:
        refused = labels.count(len(plan.refusals), "fix was refused", "fixes were refused")
        return f"No fix applies to this cell: {refused}." if plan.refusals else "No fix applies to this cell."
    if not keeping:
        return "The fixes that apply change results, so none runs unasked."
    if all(one.forecast.fits is False for one in keeping):
        return "No fix that keeps the results is forecast to fit."
    if all(one.breaks for one in keeping if one.forecast.fits is not False):
        return "The fixes that keep the results failed in their dry run."
    return "No fix that keeps the results is certain enough to run unasked."
