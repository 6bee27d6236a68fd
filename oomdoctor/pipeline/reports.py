"""What is told without a cell that failed: what a text means, what holds memory now, what a cell would need."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from linecache import getlines
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomdoctor import fixes
from oomdoctor.errors import Fault, NotAvailable, UsageError
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.plan import MemPlan
from oomdoctor.model.session import Accelerator, Cell, Cells, Session
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.kinds import spelled
from oomdoctor.pipeline.failure import budget_of, open_session, simulated, uncounted

if TYPE_CHECKING:
    from oomdoctor.rulebook import RuleBook
    from oomdoctor.views.displayed import Explained, Report


def rulebook(folders: tuple[Path, ...] | None = None) -> RuleBook:
    """Return the rules of oomdoctor, of packages and of ``folders``; what has faults is left out and told there.

    Those folders are by default the ones that the settings of the notebook name.
    """
    from oomdoctor.rulebook import everything, of_notebook

    return everything(of_notebook() if folders is None else folders, known_fixes=fixes.ids())


def explain(text_or_exception: str | BaseException, *, rules: RuleBook | None = None) -> Explained:
    """Say what a failure means, from its text or its exception alone, by some rules. Loads no torch.

    Raises:
        UsageError: it is neither.
    """
    from oomdoctor.incident import all_from_exception, describe, from_text
    from oomdoctor.views.displayed import Explained

    given: Any = text_or_exception  # callers without a type checker give anything
    if not issubclass(type(given), (str, BaseException)):
        kind = type(given).__name__
        raise UsageError(f"explain takes the text of a failure (str) or an exception, and was given {kind}")
    if issubclass(type(given), BaseException):  # not isinstance: an exception may lie about its class, or raise
        first, *others = all_from_exception(given)
    else:
        first, *others = from_text(given)
    meanings = {incident: describe(incident) for incident in (first, *others)}
    book = rulebook() if rules is None else rules
    findings = book.match(first, None)
    return Explained(
        incident=first,
        findings=findings,
        others=tuple(others),
        meanings=meanings,
        titles={fix: fixes.title(fix) for finding in findings for fix in finding.fixes},
        notes=tuple(_left_out(book.faults)),
    )


def _left_out(faults: Sequence[Fault]) -> Iterator[str]:
    """Yield a line for each file that was left out, with its first fault."""
    for path, of_file in groupby(faults, key=lambda fault: fault.path):
        first, *others = of_file
        more = f" (and {len(others)} more: oomdoctor rules check {path})" if others else ""
        yield f"rule left out: {first}{more}"


def report(namespace: dict[str, Any], cells: Cells | None = None, filenames: Mapping[str, int] | None = None) -> Report:
    """Tell what holds memory now: see ``shell.memreport.report``."""
    from oomdoctor.evidence.collect import collect
    from oomdoctor.views.displayed import Report

    path = spelled(namespace).get("__file__")  # of the script or module whose globals these are
    source = "".join(getlines(path)) if cells is None and type(path) is str else ""
    run = cells or Cells(history=(Cell(number=0, source=source),))
    with uncounted():
        device, absent = _first_device()
        session = open_session(spelled(namespace), run, device)
        return Report(collect(session, None, filenames or {}), absent)


def _first_device() -> tuple[Accelerator, tuple[tuple[str, Unavailable], ...]]:
    """Return the first device in use, and those that there are not; nobody is asked where torch is not loaded."""
    if "torch" not in sys.modules:
        from oomdoctor.evidence.host import HostAccelerator

        return HostAccelerator(), ()
    from oomdoctor.evidence import devices

    return simulated() or devices.in_use()[0], devices.absent()


def check_snapshot() -> None:
    """Refuse where torch has no CUDA allocator to take a snapshot of."""
    torch = sys.modules.get("torch")
    if simulated() is not None:
        raise NotAvailable("there is no snapshot: the simulated GPU has no CUDA allocator")
    if torch is None or not torch.cuda.is_initialized():
        raise NotAvailable("there is no snapshot: this process uses no CUDA device, whose allocator keeps one")


def snapshot(path: Path) -> str:
    """Write torch's own snapshot of the CUDA allocator, for its visualiser; return in one line what it has.

    Without ``torch.cuda.memory._record_memory_history`` it has the segments and blocks as they stand, and not where
    they were allocated. Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory

    Raises:
        NotAvailable: there is none, or the file cannot be written.
    """
    check_snapshot()
    import torch

    # What ``torch.cuda.memory._dump_snapshot`` does, with a look at what there is to dump.
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    try:
        path.write_bytes(pickle.dumps(found))
    except OSError as exc:
        raise NotAvailable(f"{path} cannot be written: {exc.strerror}") from None
    opens = "the allocator's snapshot, for https://docs.pytorch.org/memory_viz"
    if any(found.get("device_traces", ())):
        return f"{opens}, with the traces recorded so far"
    return f"{opens}, without traces: torch.cuda.memory._record_memory_history() must be on before the allocations"


def foresee(
    namespace: dict[str, Any],
    cells: Cells,
    *,
    device: str | None = None,
    memory: int | None = None,
    shell: Any = None,
    time_s: float = 10.0,
) -> MemPlan:
    """Find out what the last of ``cells`` needs, without running it.

    Args:
        device: the name, or the beginning of it, of the device to plan for: the one in use by default.
        memory: bytes of another card to plan for.

    Raises:
        UsageError: no device in use is called so.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import devices
    from oomdoctor.forecast.memplan import another_card

    simulated = virtual.active()
    in_use = [*([simulated] if simulated is not None else []), *devices.in_use()]
    chosen = next((one for one in in_use if device is None or one.name == device), None)
    chosen = chosen or next((one for one in in_use if device and one.name.startswith(device)), None)
    if chosen is None:
        names = " and ".join(dict.fromkeys(one.name for one in in_use))
        raise UsageError(f"no device {device!r} is in use: there is {names}; --device-memory SIZE plans for another")
    with uncounted():
        if memory is None:
            return _foreseen(open_session(spelled(namespace), cells, chosen, shell), None, time_s)
        with another_card() as card:
            return _foreseen(open_session(spelled(namespace), cells, card, shell), memory, time_s)


def _foreseen(session: Session, memory: int | None, time_s: float) -> MemPlan:
    from oomdoctor.evidence import devices
    from oomdoctor.evidence.collect import collect
    from oomdoctor.fixes import smaller_inputs
    from oomdoctor.forecast.batch_search import Batches
    from oomdoctor.forecast.memplan import foresee
    from oomdoctor.model.plan import Place
    from oomdoctor.views.labels import device_name, known

    def observed(
        session: Session, line: int | None, failure: BaseException | None, filenames: Mapping[str, int]
    ) -> Evidence:
        found = collect(session, failure, filenames, line=line, detectors=fixes.detectors())
        if memory is None:
            return found
        held = known(found.device.reserved) or 0
        return replace(found, devices=(replace(found.device, total=memory, free=memory - held), *found.devices[1:]))

    found = observed(session, None, None, {})
    device = found.device
    if memory is None:
        total = None if isinstance(device.total, Unavailable) else device.total
        here = Place(name=device_name(device), total=total, budget=budget_of(found, 0), source=device.basis)
    else:
        name = f"a device of {format_size(memory)}"
        here = Place(name=name, total=memory, budget=memory, source="as it was asked for")
    return foresee(
        session,
        here,
        lambda on, line, *failed: found if line is None and on is session else observed(on, line, *failed),
        list(fixes.catalogue().values()),
        Batches(now=smaller_inputs.batch_size, at=smaller_inputs.at_batch),
        host=devices.in_use()[-1],
        time_s=time_s,
    )
