"""One program healed on all ranks of a job at once: the same change on each of them, or on none.

    condition of each rank ─► offer of the rank that ran out first ─► votes ─► decision ─► run again, all at once

The loop is that of ``retry.heal``. Here its choices are what the ranks agree on, and its runs end as the epoch ends on
all ranks. Each rank makes the same decisions from the same words, so that nobody waits for one that has gone on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final

from oomdoctor import fixes
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.case import Case, OutcomeKind, RanksTogether
from oomdoctor.model.fix import Fix, Patch
from oomdoctor.model.plan import Candidate, Forecast
from oomdoctor.model.session import Attempt, Session
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.pipeline.failure import budget_of, choices_of, refused, uncounted, with_made
from oomdoctor.pipeline.healing import Checks
from oomdoctor.pipeline.job import Job, PeerOutOfMemory, ended_by, told_of
from oomdoctor.ranks.circle import Word, WordKind
from oomdoctor.ranks.presence import RankLeft, SilentRank
from oomdoctor.ranks.restart import Terminated, WrittenDown, end_as_an_error, restarts_left, write_down
from oomdoctor.ranks.vote import Condition, Offer, OfferedDose, Vote, decide, digest, objection
from oomdoctor.retry import Choice, Transaction
from oomdoctor.retry import heal as retry
from oomdoctor.retry.heal import Run

_REACH_S: Final = 120.0
"""Time that a rank gets to come out of what it is doing when it is released: a long step, until its next collective."""
_OFFER_S: Final = 600.0
"""Time for the plan and the trial of the rank that leads."""
_MOST_FORECASTS: Final = 3
"""Voters forecast as many doses of an offer at the most: the mildest, and where it does not fit stronger ones."""


@dataclass(kw_only=True, eq=False)
class Together:
    """The healing of one program on this rank, in step with the others.

    Attributes:
        word: what has ended the first run.
        plan: of the rank that leads, returns its case with a plan, and what of it may be tried.
        losses: what this rank did that cannot be taken back, beside what the transaction and the code tell.
        most_attempts: how many attempts may run out of memory; ``time_budget_s``: time after which none is begun.
        plan_s: time for the forecasts of one offer.
        program: the text that all ranks have to have alike; empty where it is that of the failing cell.
        why: why nothing more is tried; ``is_silent``: because a rank does not answer.
    """

    job: Job
    word: Word
    case: Case
    session: Session
    transaction: Transaction
    plan: Callable[[], tuple[Case, Sequence[Candidate]]]
    losses: Sequence[str]
    most_attempts: int
    time_budget_s: float
    plan_s: float
    program: str = ""
    why: str = ""
    is_silent: bool = False
    checked: str = ""
    released_s: float = 0.0
    agreed_s: float | None = None
    _made: dict[str, Candidate] = field(default_factory=dict)
    _unfit: dict[str, str] = field(default_factory=dict)
    _forecasts: dict[str, Forecast] = field(default_factory=dict)
    _begun: int = -1
    _rounds: int = 0
    _offer: Offer | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank makes the offers: it was the first that memory ran out on."""
        return self.word.rank == self.job.circle.rank

    async def heal(self, run: Run) -> tuple[Case, BaseException | None]:
        """Heal; return the case with its outcome, and the error that ended it."""
        job = self.job
        self._begun = job.circle.epoch
        job.keep_librarys()
        self.released_s = max((job.seen_s or job.ended_s) - self.word.at_s, 0.0)
        try:
            with end_as_an_error():
                return await self._healed(run)
        except RankLeft as left:
            why = str(left)
        except SilentRank as silent:
            why, self.is_silent = f"{silent}{self._written_down()}", True
        except Terminated:
            self._written_down()
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        except BaseException as exc:  # an interrupt, or a failure of ours
            self._leave(told_of(exc))
            raise
        return self._with_ranks(refused(self.case, why)), None

    async def _healed(self, run: Run) -> tuple[Case, BaseException | None]:
        choices = self._choices()
        if (first := next(choices, None)) is None:  # nothing was changed, and nothing is put back
            return self._with_ranks(refused(self.case, self.why)), None
        outcome, error = await retry(
            self.transaction,
            chain([first], choices),
            lambda attempt: self._run(attempt, run),
            accelerator=self.session.accelerator,
            is_oom=lambda exc: isinstance(exc, PeerOutOfMemory) or self.job.is_oom(exc),
            most_attempts=self.most_attempts + 1,  # what ends it is agreed on
            time_budget_s=float("inf"),
            unfit=self._unfit,
            shell=self.session.shell,
            writes=bool(self.case.evidence.code.written_anew),
        )
        if outcome.kind is not OutcomeKind.HEALED:
            self._leave(outcome.why)
            outcome = replace(outcome, why="; ".join(dict.fromkeys(filter(None, (self.why, outcome.why)))))
        else:
            outcome = replace(outcome, checked=self.checked)
        made = next(filter(None, map(self._made.get, outcome.fixes)), None)
        case = replace(self.case, plan=with_made(self.case.plan.without(self._unfit), made, outcome), outcome=outcome)
        return self._with_ranks(case), error

    def _with_ranks(self, case: Case) -> Case:
        circle = self.job.circle
        ranks = RanksTogether(
            rank=circle.rank,
            world=circle.world,
            first=self.word.rank,
            released_s=self.released_s,
            agreed_s=self.agreed_s,
            committed_s=self.job.committed_s,
        )
        return replace(case, outcome=replace(case.outcome, ranks=ranks))

    # What all agree on --------------------------------------------------------------------------------------------

    def _choices(self) -> Iterator[Choice]:
        """Yield what all ranks have agreed to run next."""
        offers: Iterator[Offer] | None = None
        while True:
            self._end_what_never_began()
            if (why := self._state()) is not None:
                self.why = why
                return
            offers = offers or (self._offers() if self.leads else None)
            choice = self._agreed(offers)
            if choice is None:
                return
            yield choice

    def _end_what_never_began(self) -> None:
        """Tell the others where this rank could not begin a run that was agreed on."""
        circle = self.job.circle
        if circle.epoch < self._begun:
            self.job.begin()
            circle.speak(WordKind.UNFIT, "; ".join(self._unfit.values()) or "the change could not be made")

    def _state(self) -> str | None:
        """Say in what condition this rank is; return why no change is made, None where one may be."""
        code, circle = self.case.evidence.code, self.job.circle
        calls = (f"{call} cannot be undone" for call in code.not_repeatable)
        parts = ["a group of some of the ranks cannot be made anew"] * (
            self.job.keeps_group and self.job.groups.has_parts
        )
        losses = (*parts, *self.losses, *self.transaction.losses(), *calls, *filter(None, [self.job.groups.refused]))
        text = digest([self.program or self.session.cells.failing.source])
        stuck = self.job.stuck
        own = Condition(rank=circle.rank, program=text, losses=tuple(losses), unfit=tuple(self._unfit), stuck=stuck)
        self._rounds = 0
        circle.say("condition", 0, [own.program, own.losses, own.unfit, own.stuck])
        told = circle.hear("condition", 0, range(circle.world), _REACH_S)
        conditions = [
            Condition(rank=rank, program=program, losses=tuple(losses), unfit=tuple(unfit), stuck=stuck)
            for rank, (program, losses, unfit, stuck) in enumerate(told)
        ]
        for one in conditions:
            for fix in one.unfit:
                self._unfit.setdefault(fix, f"it is unfit for the program on rank {one.rank}")
        why = objection(conditions)
        if any(one.stuck for one in conditions):
            why = f"{why}{self._written_down()}"
            circle.say("written", 0, "")
            circle.hear("written", 0, range(circle.world), _OFFER_S)  # who ends first ends the job
        return why

    def _written_down(self) -> str:
        """Write the likeliest change down for a restart, where there is one to come; return that it was, in words."""
        circle = self.job.circle
        if not self.leads or self.job.in_parts or restarts_left() <= 0:
            return ""
        offer = self._offer or next(self._offers())
        failing = self.session.cells.failing
        edits = offer.doses[0].patch.edits if offer.doses else ()
        if len(edits) != 1 or edits[0].cell != failing.number:
            return ""
        dose, text = offer.doses[0], digest([failing.source])
        change = WrittenDown(program=text, source=edits[0].after, label=dose.label, rank=circle.rank)
        with suppress(SilentRank):
            write_down(circle, change)
            return f"; {dose.label} is written down, and the restart begins with it"
        return ""

    def _leave(self, why: str) -> None:
        """Say that this rank goes on no more, whatever the others may still wait for."""
        with suppress(SilentRank):
            self.job.circle.leave_talk(why or "nothing more is tried")

    def _agreed(self, offers: Iterator[Offer] | None) -> Choice | None:
        """Return the next change that all ranks make, None where there is none."""
        circle, whys = self.job.circle, list[str]()
        while True:
            at, self._rounds = self._rounds, self._rounds + 1
            if offers is not None:
                offer = next(offers)
                circle.say("offer", at, offer.to_plain())
            else:
                (told,) = circle.hear("offer", at, [self.word.rank], _OFFER_S)
                offer = Offer.from_plain(told)
            self._offer = offer if offer.doses else None
            if not offer.doses:
                self.why = "; ".join(dict.fromkeys([*whys, offer.why]))
                return None
            own = self._vote(offer)
            circle.say("vote", at, [own.least, own.why])
            limit_s = _REACH_S + self.plan_s * _MOST_FORECASTS
            votes = [
                Vote(rank=rank, least=least, why=why)
                for rank, (least, why) in enumerate(circle.hear("vote", at, range(circle.world), limit_s))
            ]
            decision = decide(votes)
            if not isinstance(decision, Refused):
                return self._choice(offer, offer.doses[decision])
            whys.append(f"{offer.doses[0].label}: {decision.reason}")

    def _choice(self, offer: Offer, dose: OfferedDose) -> Choice:
        known = [fixes.get(fix) for fix in offer.made_of]
        self.checked, self._begun = offer.checked, self._begun + 1
        self.agreed_s = time.time() - self.job.ended_s
        self._made.setdefault(
            dose.label,
            Candidate(
                fix=offer.fix,
                title=offer.title,
                dose=dose.dose,
                effect=offer.effect,
                forecast=self._forecasts.get(dose.label, Forecast(basis="forecast by other ranks alone")),
                patch=dose.patch,
                applies_live=False,
                is_tried=any(fix.is_tried for fix in known),
            ),
        )
        return Choice(fix=offer.fix, label=dose.label, attempt=self._attempt(known, dose))

    def _attempt(self, made_of: Sequence[Fix], dose: OfferedDose) -> Attempt:
        from oomdoctor.forecast.attempts import patched

        session = replace(self.session, ranks=self.job.circle.world)
        guards = tuple(partial(fix.guard, session, dose.dose) for fix in made_of if fix.guard is not None)
        return patched(self.session.cells.failing, dose.patch, guards)

    # What this rank says --------------------------------------------------------------------------------------------

    def _vote(self, offer: Offer) -> Vote:
        """Vote for the mildest dose that fits this rank."""
        circle = self.job.circle
        texts = {cell.number: cell.source for cell in self.session.cells.history}
        for edit in offer.doses[0].patch.edits:
            if texts.get(edit.cell) != edit.before:
                return Vote(rank=circle.rank, least=None, why=f"{edit.name} is another text there")
        if self.leads:
            return Vote(rank=circle.rank, least=0)
        needed = ""
        for at, dose in list(enumerate(offer.doses))[:_MOST_FORECASTS]:
            forecast = self._forecasts[dose.label] = self._forecast(offer, dose)
            if forecast.fits is not False:
                return Vote(rank=circle.rank, least=at, why=forecast.refused or "")
            needed = f"{dose.label} needs {format_size(forecast.peak or 0)} of {format_size(forecast.budget or 0)}"
        return Vote(rank=circle.rank, least=None, why=needed)

    def _forecast(self, offer: Offer, dose: OfferedDose) -> Forecast:
        from oomdoctor.forecast.dry_runs import price

        is_host = self.session.accelerator.name == "cpu"
        reserve = self.transaction.bytes_to_copy if is_host else 0
        attempt = self._attempt([fixes.get(fix) for fix in offer.made_of], dose)
        terms: dict[str, Any] = {"budget": budget_of(self.case.evidence, reserve), "timeout_s": self.plan_s}
        with uncounted():
            return price(self.session, [attempt], prepare=self.transaction.restore, workers=1, **terms)[0]

    def _offers(self) -> Iterator[Offer]:
        """Yield what this rank offers: its changes in their order, each in the doses that are left of it."""
        self.case, chosen = self.plan()
        checks = Checks(
            evidence=self.case.evidence,
            session=self.session,
            transaction=self.transaction,
            unfit=self._unfit,
            by_itself=True,
        )
        begun_s, attempts, why = time.time(), 0, "no change that keeps the result is likely to fit"
        for candidate in chosen:
            doses, checked = list[OfferedDose](), ""
            for one, choice in choices_of(self.case, self.session, [candidate]):
                checks.candidates[choice.label] = one
                self._forecasts[choice.label] = one.forecast
                if candidate.fix in self._unfit or any(dose.label == choice.label for dose in doses):
                    continue
                admitted = checks.admit(choice)
                if isinstance(admitted, Refused):
                    why = f"{choice.label}: {admitted.reason}"
                    break
                patch = checks.patches.get(choice.label, one.patch)
                if not isinstance(patch, Patch):
                    why = f"{choice.label}: it changes live objects, which is not agreed on"
                    break
                checked = checks.told
                doses.append(OfferedDose(label=choice.label, dose=one.dose, patch=patch))
            while doses and candidate.fix not in self._unfit:
                if attempts and time.time() - begun_s > self.time_budget_s:
                    why, doses = f"the time allowed for retries ({self.time_budget_s:g} s) was used up", []
                    break
                if attempts == self.most_attempts:
                    why, doses = f"memory ran out {attempts} times with a change in place", []
                    break
                made_of = tuple(fix for fix, _ in candidate.made_of)
                terms: dict[str, Any] = {"title": candidate.title, "effect": candidate.effect, "checked": checked}
                begun = self._begun
                yield Offer(fix=candidate.fix, made_of=made_of, doses=tuple(doses), **terms)
                if self._begun == begun:  # refused
                    break
                attempts += 1
                tried = [label for label in self._made if any(dose.label == label for dose in doses)]
                last = max((at for at, dose in enumerate(doses) if dose.label in tried), default=0)
                doses = doses[last + 1 :]
                why = f"memory ran out with {tried[-1] if tried else candidate.label} as well"
        yield Offer(why=why)

    # One run ------------------------------------------------------------------------------------------------------

    async def _run(self, attempt: Attempt, run: Run) -> BaseException | None:
        """Run an attempt on this rank, and return what it ended with on all of them."""
        job = self.job
        if not job.keeps_group:
            job.groups.destroy()
        if (word := job.begin()) is not None:
            return ended_by(word)
        try:
            if job.keeps_group:
                job.groups.renew(rewraps=job.rewraps)
            error = await run(attempt)
        except Exception as exc:  # noqa: BLE001 - border: the change cannot be made here; the others are told
            error = exc
        except BaseException as exc:
            job.circle.announce(WordKind.FAILED, told_of(exc))
            raise
        is_unfit = bool(self.transaction.stopped) or isinstance(error, OomDoctorError)
        if is_unfit and error is None:
            error = OomDoctorError(self.transaction.stopped)
        word = job.end(error, is_unfit=is_unfit)
        if word.kind is WordKind.DONE or word.rank == job.circle.rank or is_unfit:
            return error
        if error is not None and job.is_oom(error):
            return error
        ended = ended_by(word)
        ended.__cause__ = error  # so that its frames are let go of as well
        return ended
