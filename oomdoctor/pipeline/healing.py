"""From a plan to an outcome: the cell run again with a change in place.

A trial shows first that the change keeps the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Any, Final

from oomdoctor import fixes
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.plan import Candidate, Trial
from oomdoctor.model.session import Attempt, Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.frames import is_of_signal, set_traceback, traceback_of
from oomdoctor.pipeline.failure import (
    admitted,
    besides,
    choices_of,
    diagnose,
    observe,
    plan,
    refused,
    stronger_of,
    uncounted,
    was_seen_to_fit,
    with_made,
)
from oomdoctor.pipeline.reports import rulebook
from oomdoctor.retry import Choice, Transaction
from oomdoctor.retry import heal as retry
from oomdoctor.retry.heal import Run
from oomdoctor.sandbox.copies import unsafe

_FOLLOWING: Final = 3
"""How many changes may be tried besides one with which memory ran out, and how many doses of each."""


async def heal(
    case: Case,
    session: Session,
    transaction: Transaction,
    chosen: Sequence[Candidate],
    run: Run,
    *,
    most_attempts: int,
    time_budget_s: float,
    anyway: bool = False,
    failed: set[str] | None = None,
    by_itself: bool = False,
    places: Callable[[], Mapping[str, int]] | None = None,
    plan_s: float = 0.0,
) -> tuple[Case, BaseException | None]:
    """Run the cell again with ``chosen`` in their order, each escalated if it must be. See ``retry.heal``.

    Args:
        places: returns the number of the cell by the file name of its code, for a failure of an attempt: where memory
            runs out with a change in place, another one is looked for in the changed program, and made besides.
        plan_s: time for the forecasts of that.
        by_itself: whether nobody asked for these changes by name: what could not be tried out is left alone then.
    """
    from oomdoctor.incident import find_oom

    lost = (*transaction.losses(), *(f"{call} cannot be undone" for call in case.evidence.code.not_repeatable))
    ranks = case.evidence.code.world_size or 1
    alone = f"this process is one of {ranks} ranks, and the others would wait for it" if ranks > 1 else None
    if alone or (lost and not anyway):
        return refused(case, alone or "; ".join(lost), anyway=alone is None), None
    unfit = dict[str, str]()
    checks = Checks(evidence=case.evidence, session=session, transaction=transaction, unfit=unfit, by_itself=by_itself)
    ahead = case.evidence.code.not_reached
    failures = _Failures(case, checks, places, plan_s)
    outcome, error = await retry(
        transaction,
        checks.choices(case, chosen),
        run,
        accelerator=session.accelerator,
        is_oom=lambda exc: find_oom(exc) is not None,
        most_attempts=most_attempts,
        time_budget_s=time_budget_s,
        failed=failed,
        unfit=unfit,
        shell=session.shell,
        admit=checks.admit,
        writes=bool(case.evidence.code.written_anew),
        further=failures.further,
        last=failures.without_refuted,
        is_final=lambda choice, error: bool(ahead) and failures.may_have_come_to_calls(choice, error),
    )
    is_healed = outcome.kind is OutcomeKind.HEALED
    if failures.came_further and not is_healed:
        lost = (*lost, *(f"{call} may have been made by the attempt" for call in ahead))
    outcome = _with_losses(replace(outcome, checked=checks.told if is_healed else ""), error, lost)
    made = next(filter(None, map(checks.candidates.get, outcome.fixes)), None)
    if made is not None:
        made = replace(made, patch=checks.patches.get(made.label, made.patch))
    return replace(case, plan=with_made(case.plan.without(unfit), made, outcome), outcome=outcome), error


def _with_losses(outcome: Outcome, error: BaseException | None, lost: Sequence[str]) -> Outcome:
    """Return the outcome with what of the state is lost; a fault of the device leaves nothing certain on it."""
    if outcome.kind is OutcomeKind.FAILED and error is not None and (fault := _device_fault(error)):
        lost = (fault, *lost)
    why = "; ".join(filter(None, (outcome.why, *lost)))
    return replace(outcome, state=State.UNVERIFIED, why=why) if lost else outcome


@dataclass(eq=False)
class _Failures:
    """What the failures of attempts show of the changed program: where memory ran out, and what it had come to.

    Attributes:
        case: the failure of the unchanged program; ``checks``: of the changes that are attempted.
        came_further: whether an attempt may have made a call that the failed run had not come to.
        has_planned_anew: whether changes were looked for without those that a trial has refuted.
    """

    case: Case
    checks: Checks
    places: Callable[[], Mapping[str, int]] | None
    plan_s: float
    came_further: bool = False
    has_planned_anew: bool = False
    _seen: tuple[BaseException, tuple[Case, Session] | None] | None = None

    def __post_init__(self) -> None:
        # Of what was compiled before the attempts: functions that a change leaves as they are stand in other lines.
        self._files = self.places() if self.places is not None else {}

    def may_have_come_to_calls(self, choice: Choice, error: BaseException | None) -> bool:
        """Return whether an attempt may have made calls that cannot be undone, for all that its failure shows."""
        seen = None if error is None else self._look(choice, error)
        self.came_further = seen is None or bool(seen[0].evidence.code.not_repeatable)
        return self.came_further

    def further(self, choice: Choice, error: BaseException) -> Callable[[], Sequence[Choice]] | None:
        """Look at where memory ran out with a change in place; return what plans the next change besides it.

        The program with the first change is diagnosed and planned as if the user had written it so.
        """
        candidate = self.checks.candidates[choice.label]
        is_mildest = candidate.stronger and candidate.dose not in [one.dose for one in candidate.stronger]
        if is_mildest and not was_seen_to_fit(candidate):
            return None  # it was too mild, for all that is known: a stronger dose is next
        seen = self._look(choice, error) if candidate.effect.keeps_results else None
        return None if seen is None else partial(self._planned, choice, candidate, *seen)

    def without_refuted(self) -> Iterable[Choice]:
        """Plan once more without what a trial has refuted, where nothing is left to try.

        What was seen to fit had ended the search, and may have been what does not keep the results. Of two together,
        it is laid to the one that promises less.
        """
        known = self.checks.candidates
        refuted = frozenset(fix for one in known.values() if one.fix in self.checks.unfit for fix in _weakest(one))
        if self.has_planned_anew or not (refuted and self.checks.by_itself):
            return []
        self.has_planned_anew = True
        terms: dict[str, Any] = {"time_budget_s": self.plan_s, "is_hurried": True, "without": refuted}
        priced = plan(self.case, self.checks.session, self.checks.transaction, **terms)
        fresh = [one for one in admitted(priced, "exact") if one.label not in known]
        return self.checks.choices(priced, fresh)

    def _look(self, choice: Choice, error: BaseException) -> tuple[Case, Session] | None:
        """Return the failure of an attempt diagnosed as one of the changed program; None where it cannot be."""
        if self._seen is None or self._seen[0] is not error:
            self._seen = error, self._diagnosed(choice, error)
        return self._seen[1]

    def _diagnosed(self, choice: Choice, error: BaseException) -> tuple[Case, Session] | None:
        from oomdoctor.forecast.attempts import unchanged_lines

        patch = self.checks.patches.get(choice.label, self.checks.candidates[choice.label].patch)
        if self.places is None or isinstance(patch, Refused):
            return None
        texts = {one.cell: one.after for one in patch.edits}
        changed = replace(self.checks.session, cells=self.checks.session.cells.changed(texts), base=patch)
        moved = {edit.cell: unchanged_lines(edit) for edit in patch.edits if edit.file is None}
        traceback, files = traceback_of(error), self._files
        try:
            lines = _with_lines(traceback, lambda name, at: moved.get(files.get(name, 0), {}).get(at, at))
            set_traceback(error, lines)
            found, changed = observe(error, lambda _: changed, self.places())
            return diagnose(found, rulebook()), changed
        except Exception as exc:
            if is_of_signal(exc):
                raise
            return None
        finally:
            set_traceback(error, traceback)

    def _planned(self, choice: Choice, candidate: Candidate, found: Case, changed: Session) -> list[Choice]:
        from oomdoctor.forecast.attempts import attempt_with

        priced = plan(found, changed, self.checks.transaction, time_budget_s=self.plan_s, is_hurried=True)
        more: list[Choice] = []
        fits = [one for one in admitted(priced, "exact") if one.fix not in candidate.answers_to and not one.parts]
        for one in (dose for fit in fits[:_FOLLOWING] for dose in (fit, *stronger_of(fit))[:_FOLLOWING]):
            both = besides(candidate, one)
            _, attempt = attempt_with(fixes.get(one.fix), one.dose, changed, found.evidence)
            if isinstance(attempt, Refused):
                continue
            self.checks.candidates[both.label] = both
            live = (*choice.attempt.live, *attempt.live)
            more.append(Choice(fix=both.fix, label=both.label, attempt=replace(attempt, live=live)))
        return more


def _weakest(candidate: Candidate) -> list[str]:
    """Return the fixes of a candidate that promise least, of those that a trial shows anything of."""
    made_of = [fix for fix in (fixes.get(fix) for fix, _ in candidate.made_of) if fix.is_tried]
    least = max((fix.effect for fix in made_of), key=[*Effect].index)
    return [fix.id for fix in made_of if fix.effect is least]


def _with_lines(traceback: TracebackType | None, line_of: Callable[[str, int], int]) -> TracebackType | None:
    """Return a traceback with other line numbers: ``line_of`` returns them by file name and line."""
    if traceback is None:
        return None
    line = line_of(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
    return TracebackType(_with_lines(traceback.tb_next, line_of), traceback.tb_frame, traceback.tb_lasti, line)


def _device_fault(error: BaseException) -> str | None:
    """Return what a fault of the device means for the state on it, None where ``error`` is none."""
    from oomdoctor.incident import describe, from_exception

    incident = from_exception(error, {})
    if incident.is_oom or incident.format not in ("device_assert", "illegal_access", "misaligned", "device_fault"):
        return None
    return f"{describe(incident)} What was on the device can be neither read nor put back until the kernel is restarted"


_MOST_PARTS: Final = 64
_SHARE: Final = 0.5
"""Share of the host's free memory that copies of what lies on a device may take."""


@dataclass(kw_only=True, eq=False)
class Checks:
    """Admits what a trial has shown to keep the results, once for each fix, whatever its dose.

    Attributes:
        unfit: is filled with the fixes whose results differ, each with how.
        by_itself: whether what could not be tried is passed over, as nobody asked for it by name.
        candidates: those that have come to be tried, by their labels.
        told: what the trial of what was admitted last has shown, empty where there was none to make.
        patches: by its label, the patch of what was admitted: in another way than planned, where that one keeps the
            results.
    """

    evidence: Evidence
    session: Session
    transaction: Transaction
    unfit: dict[str, str]
    by_itself: bool
    candidates: dict[str, Candidate] = field(default_factory=dict)
    told: str = ""
    patches: dict[str, Patch | Refused] = field(default_factory=dict)
    _known: dict[str, tuple[Trial, Dose]] = field(default_factory=dict)

    def choices(self, case: Case, chosen: Sequence[Candidate]) -> Iterator[Choice]:
        """Yield what may be tried of ``chosen``, in the order in which it is. See ``choices_of``."""
        for candidate, choice in choices_of(case, self.session, chosen):
            self.candidates[choice.label] = candidate
            yield choice

    def admit(self, choice: Choice) -> Choice | Refused:
        """Return what is to be run, in the way that keeps the results, or why the change is not to be made."""
        candidate, self.told = self.candidates[choice.label], ""
        made_of = [fixes.get(fix) for fix, _ in candidate.made_of]
        drops = candidate.effect.keeps_results
        if not any(fix.is_tried for fix in made_of) or not (drops or all(fix.draws for fix in made_of)):
            return choice
        ways = self._ways(candidate, choice)
        if choice.fix not in self._known:
            parts = [value for _, dose in candidate.made_of for _, value in dose.values if type(value) is int]
            trial = self._tried(
                (attempt for _, _, attempt in self._ways(candidate, choice)),
                effect=candidate.effect,
                leaves=tuple(ending for fix in made_of for ending in fix.leaves),
                parts=min(max(parts, default=1), _MOST_PARTS),
                drops=drops,
            )
            written = next(islice(ways, trial.chosen, None))
            self._known[choice.fix], ways = (trial, written[0]), chain([written], ways)
        trial, way = self._known[choice.fix]
        if not drops and trial.draws:
            self.told = "not checked: it draws different random numbers, so results cannot be compared"
            return choice
        basis = trial.basis if drops else f"{trial.basis} without dropout"
        if trial.same is False:
            self.unfit[choice.fix] = why = f"tried on {basis}, results differ: {trial.why}"
            return Refused(why)
        if trial.same is None:
            self.told = f"not tried: {trial.why}"
            why = f"results could not be checked: {trial.why}"
            return Refused(why) if self.by_itself else choice
        others = ", ".join(f"`{name}`" for name in trial.beside)
        self.told = f"the same over {basis}" + (
            f"; afterwards {others} holds other rows of the batch" if others else ""
        )
        for one, patch, attempt in ways:
            if one == way:
                self.patches[choice.label] = patch
                return replace(choice, attempt=attempt)
        return Refused(f"it cannot be written with {way}, which was seen to keep the results")

    def _ways(self, candidate: Candidate, choice: Choice) -> Iterator[tuple[Dose, Patch | Refused, Attempt]]:
        """Yield how the change can be written, as it was planned first; each is written when it is asked for."""
        from oomdoctor.forecast.attempts import attempt_with_all

        yield Dose(), candidate.patch, choice.attempt
        known = [(candidate.patch, choice.attempt)]
        parts = [(fixes.get(fix), dose) for fix, dose in candidate.made_of]
        tried = [at for at, (fix, _) in enumerate(parts) if fix.is_tried]
        for way in parts[tried[0]][0].ways if len(tried) == 1 else ():
            written = [
                (fix, fix.without_way(dose) | way if at in tried else dose) for at, (fix, dose) in enumerate(parts)
            ]
            patch, attempt = attempt_with_all(written, self.session, self.evidence)
            if isinstance(attempt, Attempt) and (patch, attempt) not in known:
                known.append((patch, attempt))
                yield way, patch, attempt

    def _tried(self, changed: Iterable[Attempt], **terms: Any) -> Trial:
        from oomdoctor.evidence import host
        from oomdoctor.trial import HostCopies, compare

        if (why := unsafe()) is not None:
            return Trial(same=None, why=why)
        restore, device = self.transaction.restore, self.session.accelerator
        if not device.read().simulated:
            if device.name != "cpu" and not device.name.startswith("cuda"):
                return Trial(same=None, why=f"what lies on {device.name} is not copied to be tried on the CPU")
            cuda = sys.modules.get("torch.cuda")
            if cuda is not None and cuda.is_initialized():
                _, free, _ = host.binding_limit(host.read(in_full=False))
                try:
                    terms["copies"] = HostCopies(int(free * _SHARE))
                except OomDoctorError as why:
                    return Trial(same=None, why=str(why))
                restore = self.transaction.restore_on_host
        unchanged = Attempt(source=self.session.cells.failing.source)
        with uncounted():
            return compare(self.session, restore, unchanged, changed, **terms)
