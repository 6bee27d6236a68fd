"""Checks a change that is to keep the results before it is made: both programs are tried on a few rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.evidence import host
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.session import Attempt
from oomdoctor.model.trial import Trial
from oomdoctor.pipeline.failure import uncounted

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.plan import Candidate
    from oomdoctor.model.session import Session
    from oomdoctor.retry import Choice, Transaction

_KEEP: Final = (Effect.EXACT, Effect.EQUIVALENT)
_MOST_PARTS: Final = 64
_SHARE: Final = 0.5
"""Share of the host's free memory that copies of what lies on a device may take."""


class Checks:
    """Admits what a trial has shown to keep the results, once for each fix, whatever its dose.

    Args:
        evidence: what the changes were written from.
        choices: the candidates that may be tried, each with its attempt.
        unfit: is filled with the fixes whose results differ, each with how.
        by_itself: whether what could not be tried is passed over, as nobody asked for it by name.

    Attributes:
        told: what the trial of what was admitted last has shown, empty where there was none to make.
        patches: by its label, the patch of what was admitted: in another way than planned, where that one keeps the
            results.
    """

    def __init__(
        self,
        evidence: Evidence,
        session: Session,
        transaction: Transaction,
        choices: Sequence[tuple[Candidate, Choice]],
        unfit: dict[str, str],
        *,
        by_itself: bool,
    ) -> None:
        self.told = ""
        self.patches: dict[str, Patch | Refused] = {}
        self._evidence, self._session, self._transaction = evidence, session, transaction
        self._candidates = {choice.label: candidate for candidate, choice in choices}
        self._known: dict[str, tuple[Trial, Dose]] = {}
        self._unfit, self._by_itself = unfit, by_itself

    def admit(self, choice: Choice) -> Choice | Refused:
        """Return what is to be run, in the way that keeps the results, or why the change is not to be made."""
        from oomdoctor import fixes

        candidate, self.told = self._candidates[choice.label], ""
        made_of = [fixes.get(fix) for fix, _ in candidate.made_of]
        drops = candidate.effect in _KEEP
        if not any(fix.is_tried for fix in made_of) or not (drops or all(fix.draws for fix in made_of)):
            return choice
        ways = self._ways(candidate, choice)
        if choice.fix not in self._known:
            parts = [value for _, dose in candidate.made_of for _, value in dose.values if type(value) is int]
            trial = self._tried(
                [attempt for _, attempt in ways.values()],
                effect=candidate.effect,
                leaves=tuple(ending for fix in made_of for ending in fix.leaves),
                parts=min(max(parts, default=1), _MOST_PARTS),
                drops=drops,
            )
            self._known[choice.fix] = trial, [*ways][trial.chosen]
        trial, way = self._known[choice.fix]
        if not drops and trial.draws:
            self.told = "not tried: it draws other random numbers, beside which nothing can be compared"
            return choice
        basis = trial.basis if drops else f"{trial.basis} without dropout"
        if trial.same is False:
            self._unfit[choice.fix] = why = f"tried on {basis}, the change does not keep the results: {trial.why}"
            return Refused(why)
        if trial.same is None:
            self.told = f"not tried: {trial.why}"
            why = f"whether it keeps the results could not be tried: {trial.why}"
            return Refused(why) if self._by_itself else choice
        others = ", ".join(f"`{name}`" for name in trial.beside)
        self.told = f"the same over {basis}" + (f"; {others} then holds other rows" if others else "")
        if way not in ways:
            return Refused(f"it cannot be written with {way}, which was seen to keep the results")
        self.patches[choice.label], attempt = ways[way]
        return replace(choice, attempt=attempt)

    def _ways(self, candidate: Candidate, choice: Choice) -> dict[Dose, tuple[Patch | Refused, Attempt]]:
        """Return how the change can be written, as it was planned first."""
        from oomdoctor import fixes
        from oomdoctor.forecast.attempts import attempt_with

        ways = {Dose(): (candidate.patch, choice.attempt)}
        for way in () if candidate.parts else fixes.get(candidate.fix).ways:
            fix, dose = fixes.get(candidate.fix), candidate.dose | way
            patch, attempt = attempt_with(fix, dose, self._session, self._evidence)
            if isinstance(attempt, Attempt) and (patch, attempt) not in ways.values():
                ways[way] = patch, attempt
        return ways

    def _tried(self, changed: Sequence[Attempt], **terms: Any) -> Trial:
        from oomdoctor.trial import HostCopies, compare

        restore, device = self._transaction.restore, self._session.accelerator
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
                restore = self._transaction.restore_on_host
        unchanged = Attempt(source=self._session.cells.failing.source)
        with uncounted():
            return compare(self._session, restore, unchanged, changed, **terms)
