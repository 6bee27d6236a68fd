"""Compares two programs by running both in a sandbox: a copy of the process with the start of the cell brought back.

The sandbox forks a run of the unchanged program, one of the changed one, and where they differ one of the
unchanged program begun a last digit off, which shows how far rounding carries. First on a few rows, then on as many as
the time allows: what depends on how many rows there are shows then.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import torch

from oomdoctor.model.fix import Effect
from oomdoctor.model.trial import Trial
from oomdoctor.program.names import bound_names, read_names
from oomdoctor.sandbox.fork import answered, forked
from oomdoctor.sandbox.openmp import keep_one_thread
from oomdoctor.sandbox.silence import orphan_workers
from oomdoctor.sandbox.walls import bound_memory, raise_limits
from oomdoctor.trial.differences import Difference, differences, is_blurred, rounding
from oomdoctor.trial.run import End, run
from oomdoctor.trial.stage import Stage

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session

__all__ = ["compare", "warm_up"]

_FEW_ROWS: Final = 13
"""A number that no usual number of parts divides: the last part is smaller than the others."""
AIM_S: Final = 2.0
"""Time that a trial aims to take."""
_RUN_S: Final = 20.0
"""Time after which a single run is given up."""
_FASTER: Final = 4
"""How many times as many rows are taken next, where that takes no more than ``_PATIENCE`` times as long as before."""
_PATIENCE: Final = 2
_NAMED: Final = 4
_TOLD: Final = 600


def compare(
    session: Session,
    prepare: Callable[[], None],
    before: Attempt,
    after: Attempt,
    *,
    effect: Effect,
    leaves: tuple[str, ...] = (),
    parts: int = 1,
    aim_s: float = AIM_S,
) -> Trial:
    """Run both programs for a step or two on a few rows and tell whether they leave the same.

    Args:
        session: the program, live. Nothing of it is changed.
        prepare: brings back the start of the cell; called in the copy alone.
        before: the unchanged program; ``after``: the changed one.
        effect: EXACT asks for the same bit for bit, anything else for the same up to rounding.
        leaves: endings of the paths of what the change leaves otherwise by its nature.
        parts: in how many parts the change takes a batch: there are rows enough for a last one that is smaller.
        aim_s: time that the trial is to take; as many rows are taken as that allows.
    """
    if not hasattr(os, "fork"):
        return Trial(same=None, why="this system cannot copy a process")
    limit_s, rows = aim_s + 6 * _RUN_S, max(_FEW_ROWS, 2 * parts - 1)
    answer = answered(
        lambda: _told(_tried(session, prepare, before, after, effect, leaves, rows, aim_s)),
        limit_s=limit_s,
        prepare=raise_limits,
    )
    if answer is None:
        return Trial(same=None, why="the system gives no further process")
    if answer.text is None:
        late = f"it did not end within {limit_s:.0f} s"
        return Trial(same=None, why=late if answer.is_late else f"the copy of the process ended ({answer.status})")
    told = json.loads(answer.text)
    return Trial(**{**told, "beside": tuple(told["beside"])})


def _told(trial: Trial) -> str:
    return json.dumps(asdict(trial))


def _tried(
    session: Session,
    prepare: Callable[[], None],
    before: Attempt,
    after: Attempt,
    effect: Effect,
    leaves: tuple[str, ...],
    rows: int,
    aim_s: float,
) -> Trial:
    orphan_workers()
    torch.autograd.set_multithreading_enabled(False)
    try:
        prepare()
    except Exception as error:  # noqa: BLE001  border to what restores the user's objects, in a process that ends here
        return Trial(same=None, why=f"the start of the cell could not be brought back: {_sentence(error)}")
    bound_memory()
    keep_one_thread()
    warm_up()
    begun, stage = time.monotonic(), Stage.set_up(session)
    trial, took_s, whole = _on(session, stage, before, after, effect, leaves, rows)
    while trial.same and rows < whole and took_s * _PATIENCE < aim_s - (time.monotonic() - begun):
        rows = min(whole, rows * _FASTER)
        wider, took_s, whole = _on(session, stage, before, after, effect, leaves, rows)
        if wider.same is None:
            break
        trial = wider
    return trial


def warm_up() -> None:
    """Load what the first step of an optimizer loads, so that no run waits for it or seeds generators by it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.0).step()


def _on(
    session: Session, stage: Stage, before: Attempt, after: Attempt, effect: Effect, leaves: tuple[str, ...], rows: int
) -> tuple[Trial, float, int]:
    """Return what comes of so many rows, how long it took, and how many rows there are."""
    begun = time.monotonic()

    def ended(attempt: Attempt, **terms: Any) -> End:
        return _end_of(lambda: run(session, stage, attempt, rows=rows, **terms))

    unchanged = ended(before)
    if unchanged.error is not None and (unchanged.is_ours or not unchanged.computes):
        return Trial(same=None, why=f"the unchanged cell could not be tried: {unchanged.error}"), 0.0, 0
    own = _own_names(session, before, after)
    terms: dict[str, Any] = {"known": unchanged.known, "names": [name for name in unchanged.names if name not in own]}
    changed, basis = ended(after, **terms), _basis(unchanged, rows)
    if changed.is_ours:
        return Trial(same=None, why=f"the changed cell could not be tried: {changed.error}"), 0.0, 0
    if changed.error != unchanged.error:
        raised = (
            f"the changed cell raises {changed.error}" if changed.error else f"it no longer raises {unchanged.error}"
        )
        return Trial(same=False, basis=basis, why=raised), 0.0, 0
    left = {path: leaf for path, leaf in unchanged.leaves.items() if _root(path) not in own}
    found = list(differences(left, changed.leaves, None))
    is_exact = not found
    if found and effect is not Effect.EXACT:
        control = ended(before, **terms, nudged="coarse" if unchanged.computes_in_16_bits else "fine")
        if not control.is_ours:
            if is_blurred(left, control.leaves):
                return Trial(same=None, why="rounding alone changes what the cell leaves"), 0.0, 0
            found = list(differences(left, changed.leaves, control.leaves))
    beside = tuple(one.path for one in found if one.is_rows and one.path.isidentifier())
    told = [one for one in found if one.path not in beside and not one.path.endswith(leaves)]
    took_s = time.monotonic() - begun
    if told:
        return Trial(same=False, basis=basis, why=_why(told), beside=beside), took_s, unchanged.rows
    equal = "bit for bit" if is_exact else f"up to {rounding(left, changed.leaves):.1g} of the largest value"
    return Trial(same=True, is_exact=is_exact, basis=f"{basis}, {equal}", beside=beside), took_s, unchanged.rows


def _end_of(make: Callable[[], End]) -> End:
    """Return the end that ``make`` returns in a copy of this process."""
    reader, writer = os.pipe()
    pid = forked(keep={writer})
    if pid == 0:
        try:
            try:
                made = make()
            except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
                made = End(error=_sentence(error), is_ours=True)
            data = pickle.dumps(made)
            while data:
                data = data[os.write(writer, data) :]
        finally:
            os._exit(0)
    os.close(writer)
    deadline, received = time.monotonic() + _RUN_S, bytearray()
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (chunk := os.read(reader, 1 << 20)):
            break
        received += chunk
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    if received and status == 0:
        end: End = pickle.loads(received)
        return end
    late = f"it did not end within {_RUN_S:.0f} s"
    return End(error=late if status == signal.SIGKILL else f"its process ended with status {status}", is_ours=True)


def _root(path: str) -> str:
    """Return the name that a path begins with."""
    return path.partition(".")[0].partition("[")[0].partition(",")[0]


def _own_names(session: Session, before: Attempt, after: Attempt) -> set[str]:
    """Return the names that the change makes for itself and no cell mentions: an earlier retry may have left them."""
    told = [*before.replays, before.source, *(cell.source for cell in session.cells.history)]
    known = {name for text in told for name in (*bound_names(text), *read_names(text))}
    return {name for text in (*after.replays, after.source) for name in bound_names(text)} - known


def _basis(unchanged: End, rows: int) -> str:
    steps = f"{unchanged.steps} step{'s' * (unchanged.steps != 1)}" if unchanged.steps else "a run"
    taken = min(rows, unchanged.rows)
    return f"{steps} of {taken} rows" if taken else steps


def _why(found: list[Difference]) -> str:
    """Return the differences in words, those of numbers last: what is not there at all is told first."""
    found = sorted(found, key=lambda one: (one.size is not None, -(one.size or 0.0)))
    told = "; ".join(f"`{one.path}` {one.why}" for one in found[:_NAMED])
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{told[:_TOLD]}{more}"


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
