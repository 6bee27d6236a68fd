"""From a failure to a plan: the incident, the evidence, the findings, what is worth trying and what it would cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import fixes
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.finding import Cause
from oomdoctor.model.fix import Fix, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Forecast, Plan
from oomdoctor.model.session import Accelerator, Cells, Session
from oomdoctor.objects.frames import is_of_signal
from oomdoctor.objects.named import find, other_names, own_modules
from oomdoctor.program.modules import with_modules
from oomdoctor.retry.heal import Remedy

if TYPE_CHECKING:
    from oomdoctor.forecast.planning import Planning
    from oomdoctor.rulebook import RuleBook


def open_session(
    namespace: dict[str, Any], cells: Cells, accelerator: Accelerator, shell: Any = None, *, is_kept: bool = False
) -> Session:
    """Bind the user's namespace and cells, and the modules of their own that these import, into a session."""
    cells = with_modules(replace(cells, other_names=other_names(namespace)), own_modules())
    return Session(namespace=namespace, cells=cells, accelerator=accelerator, find=find, shell=shell, is_kept=is_kept)


def observe(
    exc: BaseException, open_on: Callable[[Accelerator], Session], filenames: Mapping[str, int]
) -> tuple[Case, Session]:
    """Recognise a failure and collect the evidence. What only the frames of ``exc`` hold is seen while they do.

    Args:
        open_on: makes the session for the device that ran out.
        filenames: number of the cell by the file name of its code.
    """
    from oomdoctor.evidence.moment import collect
    from oomdoctor.incident import from_exception

    incident = from_exception(exc, filenames)
    session = open_on(accelerator_of(incident.device))
    modules = {str(module.file): module.number for module in session.cells.modules}
    if modules:
        filenames = {**modules, **filenames}
        incident, names = from_exception(exc, filenames), {one.number: one.name for one in session.cells.modules}
        named = [line and replace(line, file=names.get(line.number or 0)) for line in (incident.cell, incident.inner)]
        incident = replace(incident, cell=named[0], inner=named[1])
    cell = incident.cell
    line = cell.line if cell is not None and cell.number == session.cells.failing.number else None
    with uncounted():
        evidence = collect(session, exc, filenames, line=line, detectors=fixes.detectors())
    incident = replace(incident, device=incident.device or evidence.device.name)
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced())
    return case, session


def by_message(exc: BaseException, filenames: Mapping[str, int], why: str) -> Case:
    """Return the case of a failure of which its message is all that is known, and ``why`` it is not run again."""
    from oomdoctor.evidence.moment import unlooked
    from oomdoctor.incident import from_exception

    incident, evidence = from_exception(exc, filenames), unlooked()
    incident = replace(incident, device=incident.device or evidence.device.name)
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced())
    return refused(case, why)


def unpriced(*, pending: bool = False) -> Plan:
    """Return a plan with nothing in it, ``pending`` where it is still to be priced."""
    basis = "not priced yet" if pending else "nothing was priced"
    return Plan(unchanged=Forecast(basis=basis), pending=pending)


def diagnose(case: Case, rules: RuleBook, *, by_message: bool = False) -> Case:
    """Find the causes, ``by_message`` by what the failure says alone."""
    return replace(case, findings=rules.match(case.incident, None if by_message else case.evidence))


def accelerator_of(name: str | None) -> Accelerator:
    """Return the device of this name: the virtual accelerator where it is on and so called, else a real one."""
    virtual: Accelerator | None = simulated()
    if virtual is not None and virtual.name.startswith(name or ""):
        return virtual
    if "torch" not in sys.modules:
        from oomdoctor.evidence.host import HostAccelerator

        return HostAccelerator()
    from oomdoctor.evidence import devices

    return devices.of_name(name)


def uncounted() -> Any:
    """Return a context whose tensors a virtual accelerator does not count."""
    return nullcontext() if simulated() is None else sys.modules["oomdoctor.allocator.virtual"].uncounted()


def simulated() -> Any:
    """Return the virtual accelerator that is on, None if there is none. Nothing is loaded to find out."""
    virtual = sys.modules.get("oomdoctor.allocator.virtual")
    return None if virtual is None else virtual.active()


_cases: list[Case] = []


def record(case: Case) -> Case:
    """Keep a case, or replace the record of the same number; return it."""
    _cases[case.number - 1 : case.number] = [case]
    return case


def refused(case: Case, why: str, *, anyway: bool = False) -> Case:
    """Return a case that is not run again for the reason ``why``, unless the user asks for it ``anyway``."""
    return replace(case, outcome=Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=why, anyway=anyway))


def cases() -> tuple[Case, ...]:
    """Return the cases of this process, oldest first."""
    return tuple(_cases)


def last_case() -> Case | None:
    """Return the case of the last failure, None if there was none."""
    return _cases[-1] if _cases else None


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
    leaks = [finding for finding in case.findings if finding.cause is Cause.LEAK_OR_PINNED_GRAPH]
    with uncounted():
        return Planning(
            *(session, case.incident, case.evidence, _fixes_in_order(case)),
            budget=budget_of(case.evidence, reserve),
            prepare=prepare,
            time_budget_s=time_budget_s,
            leaks=frozenset(fix for finding in leaks for fix in finding.fixes),
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
