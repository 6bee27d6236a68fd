"""From findings to a plan: what is worth trying, and what it would cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import fixes
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.case import Case
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.finding import Cause
from oomdoctor.model.fix import Fix, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Forecast
from oomdoctor.model.session import Session
from oomdoctor.objects.frames import is_of_signal
from oomdoctor.pipeline.failure import record, uncounted
from oomdoctor.retry.heal import Remedy

if TYPE_CHECKING:
    from oomdoctor.forecast.planning import Planning

_INTERRUPTED: Final = "the forecasts were interrupted"
_NO_TENSORS: Final = "forecasts are of tensors, and torch is not loaded"


def plan(
    case: Case,
    session: Session,
    prepare: Callable[[], None],
    *,
    time_budget_s: float,
    reserve: int,
    is_hurried: bool = False,
    unforecast: str | None = None,
) -> Case:
    """Price the fixes. The frames of the failure should be released by now.

    Args:
        prepare: restores the start of the cell, in the process of a shadow run.
        reserve: bytes of the budget that something else will take.
        is_hurried: whether it is enough that one change which keeps the results is seen to fit.
        unforecast: why there is no shadow run, where there is no time for any.

    Raises:
        BaseException: an interrupt, or what another handler of a signal raised. The case is recorded with a plan then.
    """
    begun = None
    terms: dict[str, Any] = {"reserve": reserve, "waits": True, "is_hurried": is_hurried}
    try:
        begun = planning(case, session, prepare, time_budget_s=time_budget_s, unforecast=unforecast, **terms)
        with uncounted():
            *_, priced = begun.wait()
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt) or is_of_signal(exc):
            if begun is None:
                begun = planning(case, session, prepare, time_budget_s=0.0, unforecast=_INTERRUPTED, **terms)
            begun.cancel(_INTERRUPTED)
            record(replace(case, plan=begun.plan))
        raise
    return replace(case, plan=priced)


def planning(
    case: Case,
    session: Session,
    prepare: Callable[[], None],
    *,
    time_budget_s: float,
    reserve: int,
    waits: bool = False,
    is_hurried: bool = False,
    unforecast: str | None = None,
) -> Planning:
    """Begin to price the fixes while the user's process goes on. For the other arguments see ``plan``.

    Args:
        waits: whether the caller waits for the end of it.
    """
    from oomdoctor.forecast.planning import Planning

    if "torch" not in sys.modules:  # it is not loaded where memory has run out
        time_budget_s, unforecast = 0.0, _NO_TENSORS
    with uncounted():
        return Planning(
            *(session, case.incident, case.evidence, _fixes_in_order(case)),
            budget=budget_of(case.evidence, reserve),
            prepare=prepare,
            time_budget_s=time_budget_s,
            leaks=_freeing(case),
            waits=waits,
            is_hurried=is_hurried,
            unforecast=unforecast,
        )


def recall(case: Case, session: Session, remedy: Remedy, *, reserve: int) -> Case | None:
    """Plan with what healed this failure before at the head, in the dose that did, and with no forecast made.

    Returns:
        The case with its plan; None where that dose is no longer proposed, or needed more then than there is now.
    """
    from oomdoctor.forecast.planning import make_plan

    if remedy.fix not in fixes.ids():
        return None  # two together, which are found anew
    healer = fixes.get(remedy.fix)

    found = healer.propose(case.incident, case.evidence)
    proposals = [] if isinstance(found, Refused) else list(found)
    at = next((at for at, one in enumerate(proposals) if one.dose == remedy.dose), None)
    if at is None:
        return None

    def propose(_incident: Incident, _evidence: Evidence) -> tuple[Proposal, ...]:
        return (proposals[at],)

    in_order = [replace(one, propose=propose) if one.id == remedy.fix else one for one in _fixes_in_order(case)]
    budget = budget_of(case.evidence, reserve)
    with uncounted():
        estimated = make_plan(
            session, case.incident, case.evidence, in_order, budget=budget, prepare=lambda: None, time_budget_s=0
        )
    known = next((one for one in estimated.candidates if one.fix == remedy.fix), None)
    if known is None:
        return None
    basis = f"measured when it healed {'the cell' if remedy.cell is None else f'In[{remedy.cell}]'}"
    measured = Forecast(basis=basis, budget=budget, peak=remedy.peak, slowdown=known.forecast.slowdown)
    if measured.fits is False:
        return None
    others = [one for one in estimated.candidates if one is not known]
    unchanged = replace(estimated.unchanged, refused="what healed the cell before comes before any new forecast")
    candidates = (replace(known, forecast=measured, stronger=tuple(proposals[at + 1 :])), *others)
    return replace(case, plan=replace(estimated, unchanged=unchanged, candidates=candidates))


def _freeing(case: Case) -> frozenset[str]:
    """Return the fixes of what was found to be a leak: they free what should not be there."""
    leaks = [finding for finding in case.findings if finding.cause is Cause.LEAK_OR_PINNED_GRAPH]
    return frozenset(fix for finding in leaks for fix in finding.fixes)


def _fixes_in_order(case: Case) -> list[Fix]:
    """Return every fix, those that the findings suggest first, in the findings' order."""
    suggested = dict.fromkeys(fix for finding in case.findings for fix in finding.fixes)
    catalogue = fixes.catalogue()
    return [catalogue[fix_id] for fix_id in dict.fromkeys([*suggested, *catalogue]) if fix_id in catalogue]


def budget_of(evidence: Evidence, reserve: int) -> int | None:
    """Return what tensors may take: what the allocator holds, and what the driver or the system can and may give."""
    held, free, cap = evidence.device.reserved, evidence.device.free, evidence.device.cap
    if isinstance(held, Unavailable) or isinstance(free, Unavailable):
        return None
    room = held + free if isinstance(cap, Unavailable) else min(held + free, cap)
    return max(room - reserve, 0)
