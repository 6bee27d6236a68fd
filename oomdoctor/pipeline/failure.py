"""From a failure to what it means: the incident, the evidence, the findings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomdoctor import fixes
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Forecast, Plan
from oomdoctor.model.session import Accelerator, Cells, Session
from oomdoctor.objects.named import find, other_names, own_modules
from oomdoctor.program.modules import with_modules

if TYPE_CHECKING:
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
        incident = _in_modules(from_exception(exc, filenames), session.cells)
    cell = incident.cell
    line = cell.line if cell is not None and cell.number == session.cells.failing.number else None
    with uncounted():
        evidence = collect(session, exc, filenames, line=line, detectors=fixes.detectors())
    incident = replace(incident, device=incident.device or evidence.device.name)
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced())
    return case, session


def _in_modules(incident: Incident, cells: Cells) -> Incident:
    """Return the incident with the names of the files of lines that stand in modules of the user's own."""
    names = {module.number: module.name for module in cells.modules}
    named = [line and replace(line, file=names.get(line.number or 0)) for line in (incident.cell, incident.inner)]
    return replace(incident, cell=named[0], inner=named[1])


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
