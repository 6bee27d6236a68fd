"""Calls of healed functions as parts of a job: how a call ends on all ranks, and what follows then.

The ranks find each other when the program makes its group of all of them, before the call or within it, whatever has
started them: ``torch.multiprocessing``, accelerate, Lightning, Ray Train. No call returns before it has come to its end
on all ranks. Where memory ran out on one, the call is healed on all, or on none. An error of the program's own is its
own: a rank that has one leaves, and no other is let out of anything.

Limits: the healed function is the outermost one; where it is called in a cell or a script that is healed on all ranks,
that one is.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.language import say

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.pipeline.job import Job
    from oomdoctor.pipeline.together import Together
    from oomdoctor.ranks.circle import Word
    from oomdoctor.ranks.groups import Groups

C10D: Final = "torch.distributed.distributed_c10d"
_REACHED_S: Final = 60.0
"""Time in which the other ranks have come to a call that runs out of memory on one."""


class _Process:
    """This process as a rank.

    Attributes:
        groups: its process groups, None as long as ``torch.distributed`` is not loaded.
        job: its part in a job, None where it has none.
        call: the call that is on, the outermost one.
        has_left: whether it takes no part any more.
        is_forgotten_in_copies: whether copies of the process take none.
    """

    groups: Groups | None = None
    job: Job | None = None
    call: JobCall | None = None
    has_left = False
    is_forgotten_in_copies = False


def watch_groups() -> None:
    """Note the process groups that the program makes from now on, where it may make some."""
    c10d = sys.modules.get(C10D)
    if c10d is None or _Process.groups is not None:
        return
    from oomdoctor.ranks.groups import Groups

    if not Groups.are_watched():
        _Process.groups = Groups(0, made=_join)
        _Process.groups.watch()
        if c10d.is_initialized():
            _join()


def hand_over() -> Groups | None:
    """Return the process groups that were noted; who asks takes part in the job from now on, and calls do not."""
    groups, _Process.has_left = _Process.groups, True
    if groups is not None:
        groups.made = lambda: None
    return groups


def is_in_job() -> bool:
    """Whether a run of this rank is on, which is healed on all ranks: what it calls is a part of it."""
    known = sys.modules.get("oomdoctor.pipeline.job")
    return known is not None and known.Job.running is not None


def _join() -> None:
    """Take part in the job whose group of all ranks was made; a call that is on is a run of it."""
    from multiprocessing.util import Finalize

    from oomdoctor.pipeline.job import of_group

    groups, call = _Process.groups, _Process.call
    if groups is None or _Process.job is not None or _Process.has_left:
        return
    try:
        _Process.job = of_group(groups, begun_s=_REACHED_S)
    except Exception as why:  # noqa: BLE001 - border: the program has its group, and goes on without us
        _Process.has_left = True
        told = f"{type(why).__name__}: {why}".partition("\n")[0]
        print(say(f"oomdoctor: the ranks are not healed together: {told}"), file=sys.stderr)
    if _Process.job is not None:
        if not _Process.is_forgotten_in_copies and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget)
            _Process.is_forgotten_in_copies = True
        _Process.job.releases_on_error = False
        # At the end of processes that multiprocessing has forked as well, where ``atexit`` is not heeded.
        Finalize(None, _Process.job.retire, exitpriority=1)
        if call is not None:
            call.join(_Process.job, keeps_group=False)


def _forget() -> None:
    """Take no part in a copy of the process, which is no rank."""
    if _Process.job is not None:
        type(_Process.job).running = None
        _Process.has_left, _Process.job, _Process.call = True, None, None


class JobCall:
    """One call of a healed function on this rank: alone, or a run of ``job``, which ``word`` may have ended."""

    def __init__(self, *, takes_part: bool) -> None:
        self.job: Job | None = None
        self.word: Word | None = None
        self._takes_part = takes_part

    def begin(self) -> None:
        """Begin the call."""
        if not self._takes_part or _Process.call is not None:
            return
        watch_groups()
        _Process.call = self
        if _Process.job is not None:
            from oomdoctor.pipeline.job import has_group

            self.join(_Process.job, keeps_group=has_group())

    def join(self, job: Job, *, keeps_group: bool) -> None:
        """Have the call be a run of ``job``."""
        from oomdoctor.ranks.presence import SilentRank

        try:
            job.begin(keeps_group=keeps_group)
            self.job = job
        except SilentRank as why:
            self._leave(why)

    def goes_back(self, error: BaseException | None) -> bool:
        """Say how the call has ended on this rank; return whether it is taken back together with the others."""
        if _Process.call is self:
            _Process.call = None
        if self.job is None:
            return False
        from oomdoctor.ranks.circle import WordKind
        from oomdoctor.ranks.presence import SilentRank

        try:
            if self.job.is_apart(error):
                return False
            word = self.job.end(error)
        except SilentRank as why:
            self._leave(why)
            return False
        if word.kind in (WordKind.OUT_OF_MEMORY, WordKind.UNFIT):
            self.word = word
        return self.word is not None

    def failure(self, error: BaseException | None) -> BaseException:
        """Return what the call ends with on this rank, where it is not healed."""
        if self.word is None or self.job is None or (error is not None and self.job.is_oom(error)):
            assert error is not None
            return error
        from oomdoctor.pipeline.job import ended_by

        ended = ended_by(self.word)
        ended.__cause__ = error
        return ended

    def leave_talk(self, why: str) -> None:
        """Tell the other ranks that this one goes on no more."""
        if self.job is not None:
            self.job.circle.leave_talk(why)

    def of_peer(self, case: Case) -> Case:
        """Return the case of this rank, where another one has run out of memory."""
        from oomdoctor.pipeline.job import of_peer

        return case if self.word is None else of_peer(case, self.word)

    def together(self, **terms: Any) -> Together:
        """Return the healing of the call on this rank, in step with the others."""
        from oomdoctor.pipeline.together import Together

        assert self.job is not None
        assert self.word is not None
        return Together(job=self.job, word=self.word, **terms)

    def _leave(self, why: Any) -> None:
        print(say(f"oomdoctor: the ranks are not healed together any more: {why}"), file=sys.stderr)
        _Process.has_left, job = True, self.job or _Process.job
        self.job = _Process.job = None
        if job is not None:
            job.retire()


def alone(why: str) -> Any:
    """Return the context in which this process makes no group of several ranks, and says why."""
    from contextlib import nullcontext

    return nullcontext() if _Process.groups is None else _Process.groups.none_of_several(why)
