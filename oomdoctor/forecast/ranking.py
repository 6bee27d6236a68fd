"""Makes the plan: which fixes in which dose, each with its price, best first.

Fixes come as values. Each proposes doses, and the mildest that fits by a dry run is taken. All of it happens in one
forked copy of this process (see ``copy``), which says how the plan stands whenever it knows more: at first by
estimates alone, then by what the dry runs of the likeliest fixes tell, and in the end by those of all of them. So
the user's process may wait, or go on and look from time to time. Where no dry run can be had, or time runs out, the
estimate is the price, and says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from oomdoctor.forecast.dry_run_result import late
from oomdoctor.forecast.dry_runs import DryRuns, unsupported
from oomdoctor.forecast.planner import PENDING, Planner
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Fix
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Forecast, Plan
from oomdoctor.model.session import Session
from oomdoctor.sandbox.copies import Copy

_OFF: Final = "forecasts are switched off"


class Planning:
    """A plan in the making, while the user's process goes on.

    Args:
        fixes: in the order in which the findings suggest them; it decides between equals.
        budget: bytes that tensors may take.
        prepare: restores the start of the cell; runs in the forked process alone.
        time_budget_s: for all forecasts together; 0 makes no dry run.
        leaks: ids of fixes that free what should not be there.
        waits: whether the caller waits for the end of it.
        is_hurried: whether that is as soon as a change that keeps the results is seen to fit.
        unforecast: why there is no dry run, where there is no time for any.

    Attributes:
        plan: as it stands; there is one from the first.
    """

    def __init__(
        self,
        session: Session,
        incident: Incident,
        evidence: Evidence,
        fixes: Sequence[Fix],
        *,
        budget: int | None,
        prepare: Callable[[], None],
        time_budget_s: float,
        leaks: Collection[str] = (),
        waits: bool = False,
        is_hurried: bool = False,
        unforecast: str | None = None,
    ) -> None:
        self._planner = Planner(
            *(session, incident, evidence, fixes, budget, frozenset(leaks), time_budget_s), is_hurried=is_hurried
        )
        self._copy: Copy | None = None
        why = unsupported() if time_budget_s > 0 else unforecast or _OFF
        if why is None:
            runs = DryRuns(session, prepare, budget=budget, timeout_s=time_budget_s)
            self._copy = runs.in_copy(self._planner.plans, waits=waits)
            self.plan = Plan(unchanged=self._planner.least(PENDING))
        else:
            self.plan = self._planner.estimated(why)

    @property
    def over(self) -> bool:
        """Whether the plan is as good as it gets."""
        return self._copy is None

    def wait(self) -> Iterator[Plan]:
        """Yield the plan whenever it is another one, until it is as good as it gets."""
        if self._copy is not None:
            for plan in self._copy.wait():
                self.plan = plan
                yield plan
            self._finish()
        yield self.plan

    async def listen(self) -> AsyncIterator[Plan]:
        """Yield the plan whenever it is another one, while other things run on the loop."""
        if self._copy is not None:
            async for plan in self._copy.listen():
                self.plan = plan
                yield plan
            self._finish()
        yield self.plan

    def cancel(self, why: str = "the forecasts were skipped") -> None:
        """Forecast nothing more; what has no forecast yet keeps its estimate."""
        if self._copy is not None:
            self._copy.end()
            self._finish(why)

    def _finish(self, why: str | None = None) -> None:
        copy, self._copy = self._copy, None
        if copy is None or copy.finished:
            return
        why = why or copy.failed or late(self._planner.time_budget_s)
        if self.plan.unchanged.refused == PENDING:
            self.plan = self._planner.estimated(why)
            return
        cut = [replace(one, forecast=_without(one.forecast, why)) for one in self.plan.candidates]
        self.plan = replace(self.plan, candidates=tuple(cut))


def _without(forecast: Forecast, why: str) -> Forecast:
    """Return the forecast; of an estimate it says why it is none better."""
    is_estimate = forecast.estimated is not None and forecast.refused is None
    return replace(forecast, refused=why) if is_estimate else forecast


def make_plan(
    session: Session,
    incident: Incident,
    evidence: Evidence,
    fixes: Sequence[Fix],
    *,
    budget: int | None,
    prepare: Callable[[], None],
    time_budget_s: float,
    leaks: Collection[str] = (),
) -> Plan:
    """Return what is worth trying, best first. See ``Planning``; this waits for the end of it."""
    planning = Planning(
        *(session, incident, evidence, fixes),
        budget=budget,
        prepare=prepare,
        time_budget_s=time_budget_s,
        leaks=leaks,
        waits=True,
    )
    *_, plan = planning.wait()
    return plan
