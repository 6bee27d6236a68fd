"""One cell, or one script, as a part of a job of several ranks: how it ends on all of them, and what follows then.

Where all have come to the end, it is done. Where one has failed, each rank has its own error. Where memory ran out on
one, all are healed together, or none is.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.language import say
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.plan import Candidate
from oomdoctor.model.sizes import format_size
from oomdoctor.program.compiled import source_of
from oomdoctor.ranks.presence import SilentRank
from oomdoctor.retry.release import release, uncollected
from oomdoctor.shell.background_work import end_since, left_since, threads_at_work
from oomdoctor.shell.cells import is_own
from oomdoctor.shell.doctor import CellRun, looked_at, observe_cell, plan
from oomdoctor.shell.job_calls import C10D, hand_over
from oomdoctor.shell.open_case import Attempts
from oomdoctor.shell.showing import Shown

if TYPE_CHECKING:
    from oomdoctor.pipeline.job import Job
    from oomdoctor.ranks.circle import Word
    from oomdoctor.ranks.gather import RankReport
    from oomdoctor.shell.extension import Extension

_ANSWER_S: Final = 2.0
"""Time for the threads of other ranks to answer, where somebody asks who is there."""
_SENT_S: Final = 3.0
"""Time in which a cell that was sent to all ranks has begun on each."""
_ROLES: Final = 4
_WATCHDOG: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Whether NCCL's watchdog ends the process when a collective fails: 0 does not. Source: ``ProcessGroupNCCL.hpp``."""


def join_job(extension: Extension) -> None:
    """Take part in the job that a launcher has started this process for; nothing where it has started none.

    NCCL's watchdog is set not to end the process, unless the user has set it.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or not os.environ.get("RANK"):
        return
    from oomdoctor.pipeline.job import of_environment
    from oomdoctor.ranks.restart import read
    from oomdoctor.ranks.vote import digest

    job = extension.job = of_environment()
    if job is None:
        return
    os.environ.setdefault(_WATCHDOG, "0")
    job.groups.watch()
    atexit.register(job.leave)
    script = getattr(extension.shell, "script", None)
    if script is not None and (change := read(job.circle, digest([source_of(script)]))) is not None:
        extension.shell.source = change.source
        told = f"{script.name} begins with {change.label}, which rank {change.rank} has written down before the restart"
        print(say(f"oomdoctor: {told}"), file=sys.stderr)


def watch_groups(extension: Extension) -> None:
    """Note the process groups that cells make from now on, where they may make some."""
    is_script = getattr(extension.shell, "script", None) is not None
    if extension.groups is None and not is_script and C10D in sys.modules:
        from oomdoctor.ranks.groups import Groups

        extension.groups = hand_over() or Groups(0)
        extension.groups.watch()


def join_group(extension: Extension) -> None:
    """Take part in the job whose group of all ranks a cell has made; later cells are healed on all of them."""
    if extension.config.auto == "off" or extension.job is not None or extension.groups is None:
        return
    from oomdoctor.pipeline.job import of_group

    job = extension.job = of_group(extension.groups, begun_s=_SENT_S)
    if job is not None:
        atexit.register(job.circle.close)


def begin_run(extension: Extension, raw_cell: str) -> bool:
    """Begin a cell as a run of the job; return whether it is one."""
    watch_groups(extension)
    if extension.job is None or is_own(raw_cell):
        return False
    try:
        extension.job.begin(keeps_group=extension.job.in_parts)
    except SilentRank as why:
        _leave_job(extension, why)
        return False
    return True


def _leave_job(extension: Extension, why: SilentRank) -> None:
    extension.tracebacks.send_held()
    print(say(f"oomdoctor: the ranks are not healed together any more: {why}"), file=sys.stderr)
    job, extension.job = extension.job, None
    if job is not None:
        job.leave()


def abandon_run(extension: Extension, error: BaseException) -> None:
    """End a cell that is not answered, as it was interrupted: the others are not to wait for it."""
    from oomdoctor.pipeline.job import told_of
    from oomdoctor.ranks.circle import WordKind

    def end() -> None:
        if (job := extension.job) is not None and job.end(error).kind is not WordKind.DONE:
            job.circle.leave_talk(told_of(error))
            job.mend()

    extension.borders.guarded("ranks", end)


async def follow_job(extension: Extension, failure: BaseException | None, result: Any, run: CellRun) -> bool:
    """Follow the end of a cell with what the others make of it; return whether it is answered.

    ``failure`` is what memory ran out with on this rank.
    """
    from oomdoctor.ranks.circle import WordKind

    job, error = extension.job, failure or result.error_before_exec or result.error_in_exec
    if job is None:
        return False
    try:
        extension.tracebacks.heed()
        if job.is_apart(error):
            extension.tracebacks.send_held()
            return False
        word = job.end(error)
    except SilentRank as why:
        _leave_job(extension, why)
        return False
    except KeyboardInterrupt as exc:  # while it waited for the others
        extension.tracebacks.send_held()
        abandon_run(extension, exc)
        raise
    if word.kind in (WordKind.DONE, WordKind.FAILED):
        if word.kind is WordKind.FAILED and word.rank != job.circle.rank:
            print(say(f"oomdoctor: rank {word.rank} has failed: {word.why}"), file=sys.stderr)
        if word.kind is WordKind.FAILED:
            extension.borders.guarded("ranks", job.mend)
        if failure is None:
            extension.tracebacks.send_held()
        return False
    await _answer(extension, job, word, failure, result, run)
    return True


async def _answer(
    extension: Extension, job: Job, word: Word, failure: BaseException | None, result: Any, run: CellRun
) -> None:
    from oomdoctor.pipeline.job import ended_by
    from oomdoctor.pipeline.together import Together

    borders, shown = extension.borders, run.shown or Shown(extension)
    ended = failure or result.error_before_exec or result.error_in_exec or ended_by(word)
    with uncollected():
        found = _observed(extension, failure, ended, word, result, run)
    opened = extension.open
    if found is None or opened is None:
        borders.guarded("ranks", lambda: job.circle.leave_talk("memory could not be inspected"))
        extension.tracebacks.send_held()
        return
    failing = opened.session.cells.failing
    attempts = Attempts(extension, opened, run.kwargs, extension.is_source_awaited(failing), in_its_place=True)
    still = [*threads_at_work(), *left_since(opened.beside)]
    still += filter(None, [await end_since(opened.beside, waits=attempts.waits)])

    def planned() -> tuple[Case, Sequence[Candidate]]:
        known: Case = borders.guarded("forecast", lambda: plan(extension, found, is_hurried=True)) or found
        return known, pipeline.admitted(known, extension.config.auto)

    together = Together(
        job=job,
        word=word,
        case=found,
        session=opened.session,
        transaction=opened.transaction,
        plan=planned,
        losses=still,
        **extension.config.limits,
    )
    try:
        done = await borders.retried(together.heal(attempts.run), opened.transaction.restore)
    except KeyboardInterrupt as exc:  # beside an attempt: the state is that of the cell's start by now
        done = pipeline.interrupted(together.case, opened.transaction), exc.with_traceback(None)
    case, error = done or (pipeline.refused(together.case, "oomdoctor itself failed"), None)
    if case.outcome.kind is not OutcomeKind.HEALED and not together.is_silent:
        borders.guarded("ranks", job.mend)
    pipeline.record(case)
    is_healed = case.outcome.kind is OutcomeKind.HEALED
    if is_healed:
        result.error_in_exec, result.result = error, getattr(attempts.last, "result", None)
        extension.tracebacks.drop_held()
        extension.changed.update(attempts.changes)
    elif case.outcome.interrupted:
        result.error_in_exec = error
    elif case.outcome.attempts and result.success:
        result.error_in_exec = ended
    extension.shell.last_execution_succeeded, extension.shell.last_execution_result = result.success, result
    extension.close()
    if is_healed or failure is None:
        extension.tracebacks.send_held()
    else:
        shown.show_with(extension.tracebacks.send_held, case)
    borders.guarded("notice", lambda: extension.notice(case))


def _observed(
    extension: Extension, failure: BaseException | None, ended: BaseException, word: Word, result: Any, run: CellRun
) -> Case | None:
    """Return the case of this rank, as far as it could be looked at."""
    from oomdoctor.pipeline.job import of_peer

    if failure is not None:
        return looked_at(extension, failure, lambda: observe_cell(extension, failure, result, run))
    return extension.borders.observed(
        lambda: pipeline.record(of_peer(observe_cell(extension, ended, result, run), word)),
        lambda: release(ended, extension.shell),
    )


def circle_lines(job: Job) -> Iterator[str]:
    """Yield who is in the circle of a job, a line each."""
    circle = job.circle
    silent, told = list[int](), "does not answer"
    try:
        silent = circle.presence.not_answering(_ANSWER_S)
    except SilentRank as gone:
        silent, told = list(range(circle.world)), f"unknown, {gone}"
    for rank in range(circle.world):
        state = "this process" if rank == circle.rank else told if rank in silent else "answers"
        yield f"rank {rank}: {state}"
    if job.groups.refused is not None:
        yield f"not healed together: {job.groups.refused}"


def rank_lines(reports: list[RankReport]) -> Iterator[str]:
    """Yield what each rank holds, a line each, and how far apart they are."""
    from oomdoctor.ranks.gather import held_bytes, imbalance, roles_of

    for one in reports:
        held, roles = held_bytes(one), sorted(roles_of(one).items(), key=lambda role: -role[1])
        most = ", ".join(f"{role.replace('_', ' ')} {format_size(size)}" for role, size in roles[:_ROLES])
        yield f"rank {one.rank}: {one.why}" if held is None else f"rank {one.rank}: {format_size(held)}: {most}"
    ratio = imbalance(reports)
    if ratio is not None:
        yield f"The fullest rank holds {ratio:.2f} times what the emptiest does."
