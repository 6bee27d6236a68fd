"""From a failure to a plan: the incident, the evidence, the findings, what is worth trying and what it would cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import fixes
from oomdoctor.model.case import Case, Cause, Outcome, OutcomeKind, State
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Fix
from oomdoctor.model.plan import Forecast, Plan
from oomdoctor.model.session import Accelerator, Cells, Session
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.frames import is_of_signal
from oomdoctor.objects.named import find, other_names, own_modules
from oomdoctor.program.modules import with_modules

if TYPE_CHECKING:
    from oomdoctor.forecast.ranking import Planning
    from oomdoctor.retry import Transaction
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

    ``open_on`` makes the session for the device that ran out.
    """
    from oomdoctor.evidence.collect import collect
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
    from oomdoctor.evidence.collect import unlooked
    from oomdoctor.incident import from_exception

    incident, evidence = from_exception(exc, filenames), unlooked()
    incident = replace(incident, device=incident.device or evidence.device.name)
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced())
    return refused(case, why)


def unpriced(*, pending: bool = False) -> Plan:
    """Return a plan with nothing in it, ``pending`` where it is still to be priced."""
    basis = "not priced yet" if pending else "nothing was priced"
    return Plan(unchanged=Forecast(basis=basis), pending=pending)


def diagnose(case: Case, rules: RuleBook, *, by_message: bool = False, docs_url: str = "") -> Case:
    """Find the causes, ``by_message`` by what the failure says alone; ``docs_url`` has a page of each rule."""
    found = rules.match(case.incident, None if by_message else case.evidence)
    if docs_url:
        found = tuple(replace(one, page=f"{docs_url.rstrip('/')}/rules/{one.rule}/") for one in found)
    return replace(case, findings=found)


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


def memories(*, beside: bool = False, sizes: bool = True) -> tuple[Accelerator, ...]:
    """Return the memories in use, the host last. A simulated device stands for the real one of its name.

    ``beside`` the program, on a thread, nothing is loaded and nothing is booked. ``sizes``: storages of a simulated
    device
    that were resized are booked too, for which each is looked at.
    """
    from oomdoctor.evidence.host import HostAccelerator

    if "torch" in sys.modules and not beside:
        import_module("oomdoctor.evidence.devices")
    virtual, devices = simulated(), sys.modules.get("oomdoctor.evidence.devices")
    found: tuple[Accelerator, ...] = (HostAccelerator(),) if devices is None else devices.in_use()
    if virtual is None:
        return found
    if not beside:
        virtual.settle(sizes=sizes)
    return (virtual, *(one for one in found if one.name != virtual.name))


_cases: list[Case] = []


def record(case: Case) -> Case:
    """Keep a case, or replace the record of the same number; return it. Its fixes keep the numbers that they had."""
    for before in _cases[case.number - 1 : case.number]:
        case = replace(case, plan=case.plan.after(before.plan))
    _cases[case.number - 1 : case.number] = [case]
    return case


def refused(case: Case, why: str, *, anyway: bool = False) -> Case:
    """Return a case that is not run again for the reason ``why``, unless the user asks for it ``anyway``."""
    return replace(case, outcome=Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=why, anyway=anyway))


def interrupted(case: Case, transaction: Transaction) -> Case:
    """Return a case whose retry the user has ended, and whose state was put back."""
    lost = tuple(transaction.losses())
    state = State.UNVERIFIED if lost else State.RESTORED
    ended = Outcome(kind=OutcomeKind.FAILED, state=state, why="; ".join(lost), interrupted=True)
    return replace(case, outcome=ended)


def cases() -> tuple[Case, ...]:
    """Return the cases of this process, oldest first."""
    return tuple(_cases)


def last_case() -> Case | None:
    """Return the case of the last failure, None if there was none."""
    return _cases[-1] if _cases else None


INTERRUPTED: Final = "the forecasts were interrupted"
_NO_TENSORS: Final = "forecasts are of tensors, and torch is not loaded"


def plan(
    case: Case,
    session: Session,
    transaction: Transaction | None,
    *,
    time_budget_s: float,
    set_aside: int = 0,
    at_most: int | None = None,
    is_hurried: bool = False,
    without: Collection[str] = (),
    tell: Callable[[Plan], None] = lambda _: None,
) -> Case:
    """Price the fixes, and wait for it. For the arguments see ``planning``.

    ``tell`` is called with the plan whenever it is another one.

    Raises:
        BaseException: an interrupt, or what another handler of a signal raised. The case is recorded with a plan then.
    """
    begun = None
    terms: dict[str, Any] = {"set_aside": set_aside, "at_most": at_most, "waits": True, "is_hurried": is_hurried}
    terms |= {"without": without}
    try:
        begun = planning(case, session, transaction, time_budget_s=time_budget_s, **terms)
        with uncounted():
            for priced in begun.wait():
                tell(priced)
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt) or is_of_signal(exc):
            begun = begun or planning(case, session, transaction, time_budget_s=0.0, unforecast=INTERRUPTED, **terms)
            begun.cancel(INTERRUPTED)
            record(replace(case, plan=begun.plan))
        raise
    return replace(case, plan=begun.plan)


def planning(
    case: Case,
    session: Session,
    transaction: Transaction | None,
    *,
    time_budget_s: float,
    set_aside: int = 0,
    at_most: int | None = None,
    waits: bool = False,
    is_hurried: bool = False,
    unforecast: str | None = None,
    without: Collection[str] = (),
) -> Planning:
    """Begin to price the fixes while the user's process goes on. The failure's frames should be released by now.

    Args:
        transaction: restores the start of the cell, in the process of a dry run. Without one there is none: what cannot
            be run again is priced by estimates alone.
        set_aside: bytes of the host's memory that something else will take, beside the copies of the transaction.
        at_most: bytes that tensors may take, where the user wants them to take less than there is.
        waits: whether the caller waits for the end of it; ``is_hurried``: until a change that keeps results fits.
        unforecast: why there is no dry run, where there is no time for any.
        without: ids of fixes that are left out.
    """
    from oomdoctor.forecast.ranking import Planning

    if transaction is None:
        time_budget_s, unforecast = 0.0, "what cannot be run again has no dry run"
    if "torch" not in sys.modules:  # it is not loaded where memory has run out
        time_budget_s, unforecast = 0.0, _NO_TENSORS
    is_host = session.accelerator.name == "cpu"
    reserve = set_aside + (0 if transaction is None else transaction.bytes_to_copy) if is_host else 0
    budget, held = budget_of(case.evidence, reserve), case.evidence.device.reserved
    if case.incident.format == "guard" and case.incident.total is not None:  # a limit above the cell may be lower
        given = case.incident.total + (held if isinstance(held, int) else 0)
        at_most = given if at_most is None else min(at_most, given)
    leaks = [finding for finding in case.findings if finding.cause is Cause.LEAK_OR_PINNED_GRAPH]
    with uncounted():
        return Planning(
            *(session, case.incident, case.evidence, [fix for fix in _fixes_in_order(case) if fix.id not in without]),
            budget=budget if budget is None or at_most is None else min(budget, at_most),
            prepare=(lambda: None) if transaction is None else transaction.restore,
            time_budget_s=time_budget_s,
            leaks=frozenset(fix for finding in leaks for fix in finding.fixes),
            waits=waits,
            is_hurried=is_hurried,
            unforecast=unforecast,
        )


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
