"""The healing loop: restore, apply, run, and commit or go on. Whatever happens, the state is a known one."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from oomdoctor.errors import OomDoctorError, StateError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.case import Outcome, OutcomeKind, State
from oomdoctor.model.session import Accelerator, Attempt
from oomdoctor.retry.release import release
from oomdoctor.retry.transaction import Transaction

__all__ = ["Run", "Trial", "heal"]

Run: TypeAlias = Callable[[Attempt], Awaitable[BaseException | None]]
"""Runs an attempt's source in the user's namespace; returns what the user's code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt that may be made, with the fix that it is of and the label of what it changes."""

    fix: str
    label: str
    attempt: Attempt


async def heal(
    transaction: Transaction,
    trials: Sequence[Trial],
    run: Run,
    *,
    accelerator: Accelerator,
    is_oom: Callable[[BaseException], bool],
    most_attempts: int,
    time_budget_s: float,
    shell: Any = None,
) -> tuple[Outcome, BaseException | None]:
    """Try ``trials`` in their order until one runs through.

    Args:
        is_oom: tells whether an error is one that a further trial may cure.
        most_attempts: how many trials may run out of memory. A fix that finds itself unfit for the program does not
            count, and its stronger doses are passed over.
        time_budget_s: no further trial is begun after this time.
        shell: the IPython shell, whose copies of tracebacks are released as well.

    Returns:
        The outcome, and the error of the user's code that ended it, None if it was healed. After ``healed`` the state
        is that of the changed cell, after everything else that of the cell's start.
    """
    started_s = time.monotonic()
    tried: list[str] = []

    def outcome(kind: OutcomeKind, state: State, why: str, peak: int | None = None) -> Outcome:
        return Outcome(
            kind=kind,
            fixes=tuple(tried[-1:]),
            attempts=len(tried),
            state=state,
            peak=peak,
            measure=accelerator.measure,
            elapsed_s=time.monotonic() - started_s,
            why=why,
        )

    def back(kind: OutcomeKind, why: str) -> Outcome:
        missing = dict.fromkeys((*transaction.losses(), *transaction.settle()))
        return outcome(kind, State.UNVERIFIED if missing else State.RESTORED, "; ".join([why, *missing]))

    error: BaseException | None = None
    why = "there was no change to try"
    unfit: set[str] = set()
    ran_out = 0
    for trial in trials:
        if trial.fix in unfit:
            continue
        if ran_out == most_attempts:
            break
        if tried and time.monotonic() - started_s > time_budget_s:
            why = f"the time allowed for retries ({time_budget_s:g} s) was used up"
            break
        tried.append(trial.label)
        try:
            error = await _attempt(transaction, trial.attempt, run, accelerator)
        except OomDoctorError as exc:
            why = f"{trial.label}: {exc}"
            unfit.add(trial.fix)
            continue
        except BaseException:
            transaction.restore()
            raise
        if error is None and not transaction.stopped:
            return outcome(OutcomeKind.HEALED, State.CLEAN, "", _peak(accelerator)), None
        if error is not None:
            release(error, shell)
        if transaction.stopped:
            ran_out += 1
            why, error = f"{trial.label}: {transaction.stopped}", None
        elif isinstance(error, OomDoctorError):  # the change found in the user's code that it would not be right
            why, error = f"{trial.label}: {error}", None
            unfit.add(trial.fix)
        elif error is not None and is_oom(error):
            ran_out += 1
            why = f"memory ran out with {trial.label} as well"
        else:
            return back(OutcomeKind.FAILED, f"the changed cell raised {_name(error)}"), error
        if transaction.losses():
            break
    return back(OutcomeKind.REFUSED if error is None else OutcomeKind.ROLLED_BACK, why), error


async def _attempt(
    transaction: Transaction, attempt: Attempt, run: Run, accelerator: Accelerator
) -> BaseException | None:
    """Run one attempt from the restored state, with copies made just in time for the way back."""
    transaction.restore()
    if lost := transaction.unrestored():
        raise StateError(f"{', '.join(lost)} could not be brought back")
    accelerator.empty_cache()
    accelerator.reset_peak()
    with ExitStack() as live:
        for enter in attempt.live:
            live.enter_context(enter())
        with transaction.armed(strict=True):
            return await run(attempt)


def _peak(accelerator: Accelerator) -> int | None:
    peak = accelerator.read().peak_allocated
    return None if isinstance(peak, Unavailable) else peak


def _name(error: BaseException | None) -> str:
    return type(error).__name__
