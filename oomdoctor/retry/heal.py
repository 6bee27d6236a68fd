"""The healing loop: restore, apply, run, and commit or go on. Whatever happens, the state is a known one."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, TypeAlias

from oomdoctor.errors import OomDoctorError, StateError
from oomdoctor.model.case import Outcome, OutcomeKind, State
from oomdoctor.model.memory import Measured
from oomdoctor.model.session import Accelerator, Attempt
from oomdoctor.model.unavailable import Refused
from oomdoctor.program.modules import importing
from oomdoctor.retry.release import release
from oomdoctor.retry.transaction import Transaction
from oomdoctor.sandbox.openmp import teams_in_room
from oomdoctor.sandbox.reserve import large_blocks_apart

_NAMED: Final = 4
Run: TypeAlias = Callable[[Attempt], Awaitable[BaseException | None]]
"""Runs an attempt's source in the user's namespace; returns what the user's code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One attempt that may be made, with the fix that it is of and the label of what it changes."""

    fix: str
    label: str
    attempt: Attempt


async def heal(
    transaction: Transaction,
    choices: Iterable[Choice],
    run: Run,
    *,
    accelerator: Accelerator,
    is_oom: Callable[[BaseException], bool],
    most_attempts: int,
    time_budget_s: float,
    failed: set[str] | None = None,
    unfit: dict[str, str] | None = None,
    shell: Any = None,
    admit: Callable[[Choice], Choice | Refused] = lambda choice: choice,
    writes: bool = False,
    further: Callable[[Choice, BaseException], Callable[[], Sequence[Choice]] | None] = lambda choice, error: None,
    last: Callable[[], Iterable[Choice]] = lambda: (),
    is_final: Callable[[Choice, BaseException | None], bool] = lambda choice, error: False,
) -> tuple[Outcome, BaseException | None]:
    """Try ``choices`` in their order until one runs through.

    Args:
        is_oom: tells whether an error is one that a further attempt may cure.
        most_attempts: how many attempts may run out of memory. A fix that finds itself unfit for the program does not
            count, and its stronger doses are passed over.
        time_budget_s: no further attempt is begun after this time.
        failed: labels of the attempts that ran out of memory from this very state, by which they are passed over: they
            would again. Those that do so now are added.
        unfit: ids of the fixes that found themselves unfit for the program, each with why; they are passed over, and
            those that do so now are added.
        shell: the IPython shell, whose copies of tracebacks are released as well.
        admit: asked before each attempt; returns what is to be run, or why it is not.
        further: asked when memory ran out with a choice, while the failure holds what it held; what it returns is asked
            afterwards what to try next.
        last: asked when nothing is left to try, until it has no more either.
        is_final: asked of each attempt that failed, likewise: whether no other may follow.
        writes: whether the cell writes files, which it must not read as its failed run has left them.

    Returns:
        The outcome, and the error of the user's code that ended it; if it was healed, None or its ``SystemExit``. After
        ``healed`` the state is that of the changed cell, after everything else that of the cell's start.
    """
    known = set() if failed is None else failed
    doubts = transaction.doubts()
    log = _Log(transaction, accelerator, failed=known, unfit={} if unfit is None else unfit, made=transaction.made())
    waiting = iter(choices)
    while (choice := _next(transaction, waiting) or _next(transaction, waiting := iter(last()))) is not None:
        if choice.fix in log.unfit:
            continue
        if choice.label in log.failed:
            log.why = log.why if log.tried else "every fix that could be tried has run out of memory before"
            continue
        if log.ran_out == most_attempts:
            break
        if log.tried and log.elapsed_s > time_budget_s:
            log.why = f"the time allowed for retries ({time_budget_s:g} s) was used up"
            break
        admitted = admit(choice)
        if isinstance(admitted, Refused):
            log.why = f"{choice.label}: {admitted.reason}"
            continue
        log.tried.append(choice.label)
        try:
            with _peaks_before_resets(accelerator) as peaks:
                error, run_s = await _attempt(transaction, admitted.attempt, run, accelerator, peaks, writes=writes)
        except OomDoctorError as exc:
            log.unfit_for(choice, exc)
            continue
        except BaseException:
            transaction.restore()
            raise
        if (error is None or isinstance(error, SystemExit)) and not transaction.stopped:  # it ended itself
            healed = log.outcome(OutcomeKind.HEALED, State.UNVERIFIED if doubts else State.CLEAN, "; ".join(doubts))
            tensors, reserved = _highest([*peaks, _peak(accelerator)])
            return replace(healed, peak=tensors, peak_reserved=reserved, run_s=run_s), error
        # Of what a change raised, its cause tells: a few rows that it tried out. Asked before its frames let go.
        cause = error.__cause__ if isinstance(error, OomDoctorError) else error
        ran_out = cause is not None and is_oom(cause)
        more, is_last = None, is_final(choice, error)
        if error is not None and error is cause and ran_out and not is_last and log.ran_out + 1 < most_attempts:
            more = further(choice, error)
        if error is not None:
            release(error, shell)
        if not log.goes_on_after(choice, error, ran_out=ran_out):
            ended = log.back(OutcomeKind.FAILED, f"the changed cell raised {type(error).__name__}")
            return replace(ended, interrupted=isinstance(error, KeyboardInterrupt)), error
        if is_last or transaction.losses():
            break
        if more is not None:
            waiting = chain(more(), waiting)
    return log.back(OutcomeKind.REFUSED if log.error is None else OutcomeKind.ROLLED_BACK, log.why), log.error


def _next(transaction: Transaction, waiting: Iterator[Choice]) -> Choice | None:
    """Return the next choice, None where there is none; it is written now, which nothing of an attempt may outlive."""
    try:
        return next(waiting, None)
    except BaseException:
        transaction.restore()
        raise


@dataclass(slots=True)
class _Log:
    """What was tried, and how the last of it ended.

    Attributes:
        failed: labels of the attempts that ran out of memory, in an earlier loop or in this one.
        unfit: ids of the fixes that found themselves unfit for the program, each with what it found.
        made: the names that the failed cell has made, which the way back takes away.
        ran_out: how many attempts ran out of memory.
        error: what the user's code raised in the last attempt, unless it was a fix that stopped it.
    """

    transaction: Transaction
    accelerator: Accelerator
    failed: set[str]
    unfit: dict[str, str]
    made: list[str]
    started_s: float = field(default_factory=time.monotonic)
    tried: list[str] = field(default_factory=list)
    ran_out: int = 0
    why: str = "there was no fix to try"
    error: BaseException | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def unfit_for(self, choice: Choice, why: object) -> None:
        """Note that the change, or its guard, found that it would not be right for this program."""
        self.unfit[choice.fix] = str(why)
        self.why = f"{choice.label}: {why}"

    def goes_on_after(self, choice: Choice, error: BaseException | None, *, ran_out: bool) -> bool:
        """Note how an attempt failed; return whether another one may cure that."""
        is_ours = isinstance(error, OomDoctorError)
        if self.transaction.stopped:
            self.ran_out += 1
            self.why, self.error = f"{choice.label}: {self.transaction.stopped}", None
        elif ran_out:
            self.ran_out += 1
            self.failed.add(choice.label)
            self.why = f"memory ran out with {choice.label} as well" + (f": {error}" if is_ours else "")
            self.error = None if is_ours else error
        elif is_ours:
            self.unfit_for(choice, error)
            self.error = None
        else:
            return False
        return True

    def back(self, kind: OutcomeKind, why: str) -> Outcome:
        """Put the state of the cell's start back, and return the outcome."""
        missing = dict.fromkeys((*self.transaction.losses(), *self.transaction.settle(), *self.transaction.doubts()))
        gone = [f"`{name}`" for name in self.made[:_NAMED]] + ["more"] * (len(self.made) > _NAMED)
        told = [f"what the cell had made before it failed is gone: {', '.join(gone)}"] if gone else []
        return self.outcome(kind, State.UNVERIFIED if missing else State.RESTORED, "; ".join([why, *told, *missing]))

    def outcome(self, kind: OutcomeKind, state: State, why: str) -> Outcome:
        return Outcome(
            kind=kind,
            fixes=tuple(self.tried[-1:]),
            attempts=len(self.tried),
            state=state,
            measure=self.accelerator.measure,
            elapsed_s=self.elapsed_s,
            why=why,
        )


_Peak: TypeAlias = tuple[Measured, Measured]
"""High-water marks in bytes: of live tensors, and of what the allocator has held."""


async def _attempt(
    transaction: Transaction, attempt: Attempt, run: Run, accelerator: Accelerator, peaks: list[_Peak], *, writes: bool
) -> tuple[BaseException | None, float]:
    """Run one attempt from the restored state, with copies made just in time for the way back.

    Returns:
        What the user's code raised, and how many seconds it ran.
    """
    transaction.restore()
    gc.collect()  # what the last run has made and is held in a cycle by itself, as every class is
    transaction.hold(attempt, accelerator.holds if accelerator.name != "cpu" else None)
    if lost := transaction.unrestored():
        raise StateError("; ".join(lost))
    transaction.recompile(attempt.modules)
    accelerator.empty_cache()
    accelerator.reset_peak()
    peaks.clear()
    with ExitStack() as live:
        for enter in attempt.live:
            live.enter_context(enter())
        if writes:
            live.enter_context(transaction.unread())
        texts = {str(edit.file): edit.after for edit in attempt.modules}
        live.enter_context(transaction.made_again())
        with importing(texts), teams_in_room(), large_blocks_apart(), transaction.armed(strict=True):
            begun_s = time.monotonic()
            return await run(attempt), time.monotonic() - begun_s


def _peak(accelerator: Accelerator) -> _Peak:
    read = accelerator.read()
    return read.peak_allocated, read.peak_reserved


def _highest(peaks: Sequence[_Peak]) -> list[int | None]:
    """Return the highest of each mark, None of one that is not counted here."""
    return [max((size for size in sizes if isinstance(size, int)), default=None) for sizes in zip(*peaks, strict=True)]


@contextmanager
def _peaks_before_resets(accelerator: Accelerator) -> Iterator[list[_Peak]]:
    """Note the peaks whenever CUDA's are reset in the body: a program that does so would hide its own.

    All of PyTorch's functions for it come to this one. Source: ``reset_peak_memory_stats`` in torch/cuda/memory.py.
    """
    torch = sys.modules.get("torch")
    core: Any = None if torch is None else torch._C
    reset: Any = getattr(core, "_cuda_resetPeakMemoryStats", None)
    peaks: list[_Peak] = []

    def noted(*device: Any) -> None:
        peaks.append(_peak(accelerator))
        reset(*device)

    if reset is None or accelerator.name == "cpu":
        yield peaks
        return
    core._cuda_resetPeakMemoryStats = noted
    try:
        yield peaks
    finally:
        core._cuda_resetPeakMemoryStats = reset
