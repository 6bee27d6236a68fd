"""How a case ended: the notice that is seen after a retry, or after one was refused.

A healed cell answers ``ok``, so the notice is the only sign that something else ran than what stands in the cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomdoctor.model.case import Outcome, OutcomeKind, State
from oomdoctor.model.plan import Candidate, Forecast, MeasuredPeak, Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views import labels
from oomdoctor.views.document import FixRow, Notice
from oomdoctor.views.prices import basis, fix_rows, keeps, made_anew, measured_by, needed, pace, tensors, took_of

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
