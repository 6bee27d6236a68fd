"""The visible notice after a retry, or after one was refused: what was changed, and what the user is left with.

A healed cell answers ``ok``, so this notice is the only sign that something else ran than what stands in the cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.model.plan import Verdict
from oomdoctor.model.sizes import format_size
from oomdoctor.views import prices, words
from oomdoctor.views.document import FixRow, Notice

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Candidate, Forecast

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
    after = f"after {words.count(outcome.attempts, 'attempt')}"
    changes = words.count(len(outcome.fixes), "change")
    start = "the state of its start is back" if outcome.state is State.RESTORED else "not all of its start is back"
    return {
        OutcomeKind.OFFERED: f"{what} ran out of memory; nothing was changed.",
        OutcomeKind.HEALED: f"Healed: {what} ran to its end with {changes} in place, {after}.",
        OutcomeKind.REFUSED: f"Not healed: no change kept its promise for {what}; {start}."
        if outcome.attempts or outcome.state is State.RESTORED
        else f"Not retried: {what} was left as it failed.",
        OutcomeKind.ROLLED_BACK: f"Rolled back: {what} did not run to its end {after}; {start}.",
        OutcomeKind.FAILED: f"Retry failed: {what} did not run to its end {after}.",
    }[outcome.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """A fix that was in place: the label it ran under, and the candidate it comes from where there is one.

    A retry that ran out of memory again may have taken the candidate's fix in a stronger dose, which has no price.
    """

    label: str
    number: int = 0
    candidate: Candidate | None = None

    @property
    def as_priced(self) -> Candidate | None:
        """The candidate, if it ran in the dose that was priced."""
        return self.candidate if self.candidate is not None and self.candidate.label == self.label else None

    @property
    def dose(self) -> str:
        """The dose within the label, empty where it has none."""
        _, _, dose = self.label.partition("(")
        return words.clean(dose.removesuffix(")"), 120)


def _used(case: Case, label: str) -> _Used:
    numbered = enumerate(case.plan.candidates, 1)
    same_fix = [pair for pair in numbered if label == pair[1].label or label.startswith(f"{pair[1].fix}(")]
    number, candidate = max(same_fix, key=lambda pair: pair[1].label == label, default=(0, None))
    return _Used(label=label, number=number, candidate=candidate)


def _facts(case: Case) -> list[tuple[str, str]]:
    outcome = case.outcome
    used = [_used(case, label) for label in outcome.fixes]
    did = CHANGED if outcome.kind is OutcomeKind.HEALED else "Tried"
    priced = used[0].as_priced if len(used) == 1 else None
    forecast = priced.forecast if priced is not None else None
    facts = [(WHY, words.clean(outcome.why, 600))]
    facts += [(did, _change(one)) for one in used]
    if outcome.kind is OutcomeKind.HEALED:
        facts.append(("Checked", words.clean(outcome.checked, 600)))
        caveats = [one.candidate.caveat for one in used if one.candidate is not None and one.candidate.caveat]
        facts += [("Mind", words.clean(caveat, 600)) for caveat in caveats if caveat != outcome.why]
    facts += [("Peak", _peak(case, forecast)), ("Time", _time(case, forecast))]
    if outcome.kind is not OutcomeKind.OFFERED:
        facts.append(("State", words.STATES[outcome.state]))
    return facts + _commands(case, used)


def _change(used: _Used) -> str:
    if used.candidate is None:
        return words.code(used.label, 120)
    dose = f" ({used.dose})" if used.dose else ""
    effect, promise = words.EFFECTS[used.candidate.effect]
    return f"{words.clean(used.candidate.title)}{dose}; {effect}: {promise}"


def _peak(case: Case, forecast: Forecast | None) -> str:
    """Return forecast and measured peak side by side, and how far apart they are."""
    measured, expected = case.outcome.peak, forecast.peak if forecast is not None else None
    parts = []
    if forecast is not None and expected is not None:
        quantity = " in tensors" if forecast.reserved is not None else ""
        parts.append(f"forecast {words.about(expected)}{quantity} ({prices.basis(forecast)})")
    if measured is not None:
        means = f" ({words.clean(case.outcome.measure)})" if case.outcome.measure else ""
        parts.append(f"measured {format_size(measured)}{means}")
    if expected is not None and measured:
        parts.append(f"forecast {_off(expected, measured)}")
    budget = forecast.budget if forecast is not None else case.plan.unchanged.budget
    if parts and budget is not None:
        parts.append(f"budget {format_size(budget)}")
    return "; ".join(parts)


def _off(forecast_bytes: int, measured_bytes: int) -> str:
    off = forecast_bytes / measured_bytes - 1
    return "met" if abs(off) < 0.0005 else f"{words.percent(abs(off), 1)} too {'high' if off > 0 else 'low'}"


def _time(case: Case, forecast: Forecast | None) -> str:
    parts = []
    if case.outcome.elapsed_s is not None:
        parts.append(f"{case.outcome.elapsed_s:.1f} s")
    if forecast is not None and forecast.slowdown is not None:
        parts.append(f"{prices.slowdown(forecast)} the unchanged cell's time (forecast)")
    return "; ".join(parts)


def _commands(case: Case, used: list[_Used]) -> list[tuple[str, str]]:
    """Return how to keep a change or take it back; where there was none, what can still be done."""
    if case.outcome.kind is OutcomeKind.HEALED:
        kept = [(_KEEP, _keep(one, one.candidate)) for one in used if one.candidate is not None]
        return [*kept, (_BACK, "`%oomdoctor undo`")]
    offered = _untried(case)
    if offered is None:
        return []
    if case.outcome.anyway:
        told = f"`{offered.apply} --anyway` ({offered.title}) retries all the same; what is named stays as it is"
        return [(_ANYWAY, told)]
    if case.outcome.kind is OutcomeKind.REFUSED and not case.outcome.attempts:  # and so would any other change be
        return []
    return [(_OFFERED, f"`{offered.apply}` {offered.title}")]


def _keep(used: _Used, candidate: Candidate) -> str:
    if isinstance(candidate.patch, Refused):
        return f"there is no diff: {words.clean(candidate.patch.reason)}"
    shows = f"`%oomdoctor diff {used.number}` shows the change to make in your source"
    if used.as_priced is not None:
        return f"{shows}, `%oomdoctor fix {used.number} --insert` puts it into the next cell"
    return f"{shows}, there with {words.clean(candidate.dose.short, 120)}: write {used.dose} instead"


def _untried(case: Case) -> FixRow | None:
    """Return the best fix that may still help."""
    for row, candidate in zip(prices.fix_rows(case.plan), case.plan.candidates, strict=True):
        if row.apply and candidate.label not in case.outcome.fixes and row.verdict is not Verdict.TOO_LARGE:
            return row
    return None
