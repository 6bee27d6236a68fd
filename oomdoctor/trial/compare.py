"""Compares two programs by running both in a sandbox: a copy of the process with the start of the cell brought back.

First on a few rows (see ``comparison``), then on as many rows and steps as the time allows: what depends on how many
there are shows then. Where a changed program does not keep the results, it is written in the next way.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, Final

import torch

from oomdoctor.model.fix import Effect
from oomdoctor.model.plan import Trial
from oomdoctor.model.session import Attempt, Session
from oomdoctor.sandbox.copies import answered, one_sentence
from oomdoctor.sandbox.openmp import keep_one_thread, teams_ended
from oomdoctor.sandbox.restrictions import bound_memory, orphan_workers
from oomdoctor.trial.comparison import Comparison
from oomdoctor.trial.run import End, Terms, run
from oomdoctor.trial.runs import RUN_S, Runs, Ways, at_once
from oomdoctor.trial.setup import HostCopies, Stage

_ROWS: Final = (13, 31, 61, 127, 251)
"""Numbers that no usual number of parts divides: the last part is smaller than the others. Primes: sizes of other
dimensions, by which the batch could be mistaken, seldom are."""
AIM_S: Final = 2.0
"""Time that a trial aims to take."""
_TRIAL_S: Final = 10 * RUN_S
_ROWS_OF_PART: Final = 4
_PATIENCE: Final = 2
"""How many times as long as the last comparison a wider one may take, for all that is known before."""


def compare(
    session: Session,
    prepare: Callable[[], None],
    before: Attempt,
    changed: Iterable[Attempt],
    *,
    effect: Effect,
    leaves: tuple[str, ...] = (),
    parts: int = 1,
    aim_s: float = AIM_S,
    copies: HostCopies | None = None,
    drops: bool = True,
) -> Trial:
    """Run the unchanged program and changed ones for a step or two on a few rows; tell which of them leaves the same.

    Args:
        session: the program, live. Nothing of it is changed.
        prepare: brings back the start of the cell; called in the copy alone.
        before: the unchanged program.
        changed: ways to write the changed one, the likeliest first: they are tried, and taken in the copy, until one
            leaves the same.
        effect: EXACT asks for the same bit for bit, anything else for the same up to rounding.
        leaves: endings of the paths of what the change leaves otherwise by its nature.
        parts: in how many parts the change takes a batch: there are rows enough for a last one that is smaller.
        aim_s: time that the trial is to take; as many rows are taken as that allows.
        copies: of what lies on a device, where the program uses one.
        drops: whether dropout drops anything, which differs between a batch and its parts.
    """
    if not hasattr(os, "fork"):
        return Trial(same=None, why="this system cannot fork")
    rows = max((few for few in _ROWS if few < _ROWS_OF_PART * parts), default=_ROWS[0])

    in_loop = asyncio._get_running_loop() is not None  # which a copy of the process is not told

    def tried() -> str:
        """Runs in the copy."""
        if why := _unprepared(prepare, copies):
            return json.dumps(asdict(Trial(same=None, why=why)))
        stage = Stage.set_up(session, copies, in_loop=in_loop, drops=drops)
        deadline = time.monotonic() + aim_s

        def ran(attempt: Attempt, terms: Terms, share: int) -> End:
            begin_teams(share)
            return run(session, stage, attempt, terms)

        given: dict[str, Any] = {"session": session, "stage": stage, "before": before, "effect": effect}
        runs = Runs(ran, at_once())
        try:
            first = Comparison(**given, runs=runs, ways=Ways(changed), leaves=leaves, rows=rows)
            return json.dumps(asdict(_found(first, deadline)))
        finally:
            runs.forget()

    with teams_ended() as begin_teams:
        answer, why = answered(tried, limit_s=_TRIAL_S)
    if answer is None:
        return Trial(same=None, why=why)
    told = json.loads(answer)
    return Trial(**{**told, "beside": tuple(told["beside"])})


def _unprepared(prepare: Callable[[], None], copies: HostCopies | None) -> str:
    """Bring back the start of the cell in this copy, bounded; return why that cannot be, nothing where it could."""
    orphan_workers()
    torch.autograd.set_multithreading_enabled(False)
    try:
        if copies is not None:
            copies.put_in_place()
        prepare()
    except Exception as error:  # noqa: BLE001  border to what restores the user's objects
        return f"the start of the cell could not be restored: {one_sentence(error)}"
    bound_memory()
    keep_one_thread()
    warm_up()
    return ""


def warm_up() -> None:
    """Load what the first step of an optimizer loads, so that no run waits for it or seeds generators by it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.0).step()


def _found(comparison: Comparison, deadline: float) -> Trial:
    """Try the changed programs, one after the other, on more and more rows until ``deadline``."""
    ways, first, seen_later = comparison.ways, None, dict[Attempt, Trial]()
    while (way := ways.current) is not None:
        trial = comparison.of(way)
        if trial.same and way not in seen_later:
            trial = seen_later[way] = comparison.in_later_steps(way, trial)
        if trial.same is None:
            return first or trial
        if trial.same is False:
            first = first or trial
            ways.go_on()
            comparison.runs.until = math.inf
            continue
        last = replace(trial, chosen=ways.at)
        if comparison.took_s * _PATIENCE >= deadline - time.monotonic():
            return last
        comparison.runs.until = deadline  # more is not worth a longer wait
        wider = comparison.wider()
        if wider is None or wider.of(way).same is None:
            return last
        comparison = wider
    return first or Trial(same=None, why="there is nothing to try")
