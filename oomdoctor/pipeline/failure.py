"""From a failure to a plan: incident, evidence, findings, what is worth trying at which price, what may be tried."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import fixes
from oomdoctor.model.case import Case, Cause, Outcome, OutcomeKind, State
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.plan import Candidate, Forecast, MeasuredPeak, Plan
from oomdoctor.model.session import Accelerator, Cells, Session
from oomdoctor.model.unavailable import Refused, Unavailable
from oomdoctor.objects.frames import is_of_signal
from oomdoctor.objects.named import find, other_names, own_modules
from oomdoctor.program.modules import with_modules
from oomdoctor.retry import Choice

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
    return _new_case(incident, evidence), session


def by_message(exc: BaseException, filenames: Mapping[str, int], why: str) -> Case:
    """Return the case of a failure of which its message is all that is known, and ``why`` it is not run again."""
    from oomdoctor.evidence.collect import unlooked
    from oomdoctor.incident import from_exception

    return refused(_new_case(from_exception(exc, filenames), unlooked()), why)


def _new_case(incident: Incident, evidence: Evidence) -> Case:
    incident = replace(incident, device=incident.device or evidence.device.name)
    return Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced())


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
    device that were resized are booked too, for which each is looked at.
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
    tell: Callable[[Plan], None] = lambda _: None,
    **terms: Any,
) -> Case:
    """Price the fixes, and wait for it. For the arguments and the other ``terms`` see ``planning``.

    ``tell`` is called with the plan whenever it is another one.

    Raises:
        BaseException: an interrupt, or what another handler of a signal raised. The case is recorded with a plan then.
    """
    begun, terms = None, {**terms, "waits": True}
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


def admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    """Return the candidates that an automatic retry may use under this setting: those seen to fit, the others.

    What other processes hold comes and goes: beside them, a dry run of the change must fit. What broke in its dry run,
    where the unchanged cell did not, is left to the user.
    """
    if beyond_cure(case) is not None:
        return ()
    must_fit = _is_held_by_others(case)
    found = [
        candidate
        for candidate in case.plan.candidates
        if auto != "off"
        and (candidate.effect.keeps_results or (auto == "any" and candidate.effect is Effect.CHANGES_RESULT))
        and candidate.forecast.fits is not False
        and not candidate.breaks
        and candidate.refuted is None
        and (was_seen_to_fit(candidate) or not must_fit)
        and not any(fixes.get(fix).asks for fix, _ in candidate.made_of)
    ]
    return tuple(sorted(found, key=was_seen_to_fit, reverse=True))


def beyond_cure(case: Case) -> str | None:
    """Return why no change of the cell cures this failure, None where one may. It is not retried by itself then."""
    incident = case.incident
    why = _BEYOND_CURE.get(incident.format or "") or _BEYOND_CURE.get(incident.family)
    if why is None and _is_held_by_others(case) and not any(map(was_seen_to_fit, case.plan.candidates)):
        return "other processes use the device; no fix fits into what they leave free"
    return why


_BEYOND_CURE: Final[dict[str, str]] = {
    "onednn_create": "oneDNN creates no primitives in this thread until the kernel restarts",
    Family.CUDA_INIT: "the device had no room for this process; no fix of the cell changes that",
    Family.WORKER_KILLED: "a worker process died, and no fix is known to prevent it",
    Family.RANK_KILLED: "another process was killed; no fix of the cell brings it back",
    Family.KERNEL_KILLED: "the kernel was killed; no fix of the cell brings it back",
}


def _is_held_by_others(case: Case) -> bool:
    """Return whether the likeliest cause is that other processes hold the device."""
    return bool(case.findings) and case.findings[0].cause is Cause.OTHER_PROCESS


def was_seen_to_fit(candidate: Candidate) -> bool:
    """Return whether a dry run fits: an estimate goes by what the cell held, and it may have only begun."""
    return candidate.forecast.fits is True and candidate.forecast.course is not None


def choices_of(case: Case, session: Session, chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, Choice]]:
    """Yield what may be tried: each candidate with its stronger doses after it, those first that were seen to fit.

    A stronger dose has no forecast, so the stronger doses of these come after the last of them. Each is written when
    it is asked for.
    """
    from oomdoctor.forecast.attempts import attempt_with_all

    fitting = [candidate for candidate in chosen if was_seen_to_fit(candidate)]
    others = [candidate for candidate in chosen if candidate not in fitting]
    made = [*fitting, *(dose for one in fitting for dose in stronger_of(one))]
    made += [dose for one in others for dose in (one, *stronger_of(one))]
    for candidate in made:
        parts = [(fixes.get(fix), dose) for fix, dose in candidate.made_of]
        patch, attempt = attempt_with_all(parts, session, case.evidence)
        if not isinstance(attempt, Refused):
            choice = Choice(fix=candidate.fix, label=candidate.label, attempt=attempt)
            yield replace(candidate, patch=patch), choice


def stronger_of(candidate: Candidate) -> list[Candidate]:
    """Return the candidate in every other of its stronger doses; two fixes together have none."""
    steps = [one for at, one in enumerate(candidate.stronger, 1) if at % 2 == 0 or at == len(candidate.stronger)]
    unpriced = Forecast(basis="not priced: a stronger dose after a failure", budget=candidate.forecast.budget)
    stronger = replace(candidate, forecast=unpriced, follows=candidate.label)
    return [replace(stronger, dose=one.dose, caveat=one.caveat) for one in steps]


def besides(first: Candidate, second: Candidate) -> Candidate:
    """Return two changes as one, the second of which was planned for the program with the first."""
    return replace(
        second,
        fix=f"{first.fix} + {second.fix}",
        title=f"{first.title}; {second.title[:1].lower()}{second.title[1:]}",
        dose=Dose((*first.dose.values, *second.dose.values)),
        effect=max(first.effect, second.effect, key=[*Effect].index),
        is_tried=first.is_tried or second.is_tried,
        parts=(*first.made_of, *second.made_of),
        stronger=(),
        follows=first.label,
    )


def with_made(plan: Plan, made: Candidate | None, outcome: Outcome) -> Plan:
    """Return the plan with what healed the cell in the place of its milder dose, whatever refuted that."""
    if made is None:
        return plan
    if outcome.kind is OutcomeKind.HEALED and outcome.peak is not None:
        took = MeasuredPeak(tensors=outcome.peak, reserved=outcome.peak_reserved, measure=outcome.measure)
        made = replace(made, measured=took)
    others = [one for one in plan.candidates if one.fix != made.fix]
    known = [one.fix for one in plan.candidates]
    at = next((known.index(fix) for fix in (made.fix, made.made_of[0][0]) if fix in known), 0)
    refusals = tuple(told for told in plan.refusals if told[0] != made.fix)
    return replace(plan, candidates=(*others[:at], made, *others[at:]), refusals=refusals)
