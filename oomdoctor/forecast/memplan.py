"""Looks at a cell before it is run: what it needs, where that fits, and what would make it fit.

All of it comes from dry runs; the user's process runs nothing of the cell. Each part has the whole time to itself:
the forecast, the cards, the fixes, the batch.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.allocator.device import VirtualAccelerator
from oomdoctor.forecast.batch_search import Batches, largest_batch
from oomdoctor.forecast.dry_run_result import BASIS, is_of_card, lacked_card, late
from oomdoctor.forecast.dry_runs import DryRuns, price, unsupported
from oomdoctor.forecast.ranking import make_plan
from oomdoctor.model.cards import CARDS, CONTEXT_BYTES, Card
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Fix
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Fit, Forecast, MemPlan, Place, Plan, Verdict
from oomdoctor.model.session import Accelerator, Attempt, Session
from oomdoctor.model.sizes import MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.alive import alive
from oomdoctor.sandbox.restrictions import do_nothing

if TYPE_CHECKING:
    from oomdoctor.sandbox.card import Card as Device

_GROWING: Final = (Role.GRADIENT, Role.OPTIMIZER_STATE, Role.ACTIVATION)
"""What a step adds: what it leaves there, and what is there while it runs."""
_ENDLESS: Final = 1 << 60
"""Bytes that no program fills; how much there is, the plan says."""
_STATES: Final = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}
"""Values that an optimizer keeps for each weight with its default settings. Source: ``torch.optim``, ``state[...]``."""


@contextmanager
def another_card() -> Iterator[Accelerator]:
    """Return a context with a card on which the tensors of the host live, however many: for planning alone."""
    card = VirtualAccelerator(_ENDLESS)
    card.adopt()
    try:
        yield card
    finally:
        card.close()


def foresee(
    session: Session,
    here: Place,
    collect: Callable[[Session, int | None, BaseException | None, Mapping[str, int]], Evidence],
    fixes: Sequence[Fix],
    batches: Batches,
    *,
    host: Accelerator,
    time_s: float,
) -> MemPlan:
    """Return what the last cell of ``session`` needs, and where that fits.

    Args:
        here: the memory that the cell is planned for, that of the session's accelerator.
        collect: collects the evidence of a session, with the line of its cell at which memory is expected to run out,
            a failure there, if there is one, and the numbers of cells by the file names of their code.
        fixes: those to price where it does not fit.
        host: the host's memory, by whose rules the scratch of kernels counts.
        time_s: for each part of the work; 0 makes no dry run.
    """
    begun = time.monotonic()
    source = session.cells.failing.source
    forecast = Forecast(basis=BASIS, budget=here.budget, refused="forecasts are switched off")
    if time_s > 0:
        forecast = _price(session, source, budget=here.budget, timeout_s=time_s)
    if forecast.peak is not None and is_of_card(forecast) and not session.accelerator.read().simulated:
        # It asks for a device that this machine lacks, so the memory of those that are here says nothing.
        here = Place(name="a device that this machine lacks", total=None, budget=None, source=forecast.basis)
        forecast = replace(forecast, budget=None)
    if forecast.refused == late(time_s):
        more = "OomDoctor.forecast_time_s" if session.shell is not None else "time_s"
        forecast = replace(forecast, refused=f"{forecast.refused}; `{more}` gives it more time")
    line = forecast.peak_line
    evidence = collect(session, line, None, {})

    @cache
    def ahead() -> Evidence:
        """Return the evidence with what the cell will have made, as far as that can be seen."""
        level = max((size for size, _ in forecast.course.points), default=0) if forecast.course is not None else 0
        found = evidence_ahead(
            session,
            lambda on, failure, files: collect(on, line, failure, files),
            level=level,
            card=lacked_card(forecast),
            timeout_s=time_s if level else 0.0,
        )
        return evidence if found is None else replace(evidence, code=found.code, censuses=found.censuses)

    estimate = _least(evidence, here.budget, forecast.refused) if forecast.refused is not None else None
    fit = Fit(place=here, forecast=forecast, least=estimate)
    return MemPlan(
        cell=session.cells.failing,
        here=fit,
        least=estimate,
        elsewhere=_on_cards(session, forecast, estimate, host, time_s=time_s),
        plan=_plan(session, fit, ahead, fixes, time_s=time_s),
        batch=largest_batch(session, forecast, evidence, ahead, batches, time_s=time_s),
        elapsed_s=time.monotonic() - begun,
    )


def _least(evidence: Evidence, budget: int | None, why: str) -> Forecast | None:
    """Return the least that the last cell needs without a dry run, None where it trains nothing that was found.

    What is there already and what training adds to it: this tells what cannot fit, and never what does. ``why`` says
    why there is no forecast.
    """
    allocated = evidence.device.allocated
    stepped = {text for loop in evidence.code.loops if loop.in_failing_run for text in loop.optimizers}
    trained = [facts for facts in evidence.code.steppers if facts.path in stepped]
    if isinstance(allocated, Unavailable) or not trained:
        return None
    gradients = sum(facts.parameter_bytes for facts in trained)
    states = sum(map(_state_bytes, trained))
    missing = max(gradients - evidence.census.bytes_of(Role.GRADIENT), 0)
    missing += max(states - evidence.census.bytes_of(Role.OPTIMIZER_STATE), 0)
    basis = "analytic estimate: what is held now, gradients and optimizer state; activations are not counted"
    return Forecast(basis=basis, budget=budget, peak=allocated + missing, refused=why)


def _state_bytes(facts: OptimizerFacts) -> int:
    return facts.parameter_bytes * _STATES.get(facts.type_name, 0) if facts.home.startswith("torch.optim") else 0


def _price(session: Session, source: str, *, budget: int | None, timeout_s: float) -> Forecast:
    return price(session, [Attempt(source=source)], budget=budget, prepare=do_nothing, timeout_s=timeout_s)[0]


def _on_cards(
    session: Session, forecast: Forecast, estimate: Forecast | None, host: Accelerator, *, time_s: float
) -> tuple[Fit, ...]:
    """Return whether the cell fits each of the well-known cards, where nobody else uses it."""
    if forecast.refused is not None:
        on_card, margin = forecast, forecast.error_ratio
        if estimate is None:
            return ()
    else:
        as_on_card = replace(session, accelerator=VirtualAccelerator(CARDS[-1].total_bytes))
        source = session.cells.failing.source
        is_cached = forecast.reserved is not None
        on_card = forecast if is_cached else _price(as_on_card, source, budget=None, timeout_s=time_s)
        # A simulated device has no room for the scratch of kernels to take; a card has.
        is_simulated = is_cached and session.accelerator.read().simulated and not is_of_card(forecast)
        as_here = replace(session, accelerator=host)
        plain = _price(as_here, source, budget=None, timeout_s=time_s) if is_simulated else forecast
        margin = max(on_card.error_ratio, plain.error_ratio)
    fits = []
    for card in CARDS:
        place = _place(card)
        found = replace(on_card, budget=place.budget, error_ratio=margin)
        if found.peak is not None and found.peak <= (place.budget or 0) < (found.reserved or 0):
            # Short of room the allocator gives cached segments back: this run is the one that would be.
            squeezed = _price(as_on_card, source, budget=place.budget, timeout_s=time_s)
            found = found if squeezed.refused is not None else replace(squeezed, error_ratio=margin)
        fits.append(Fit(place=place, forecast=found, least=estimate))
    return tuple(fits)


def _place(card: Card) -> Place:
    budget = card.total_bytes - CONTEXT_BYTES
    return Place(name=card.name, total=card.total_bytes, budget=budget, source=card.source)


def _plan(
    session: Session, fit: Fit, ahead: Callable[[], Evidence], fixes: Sequence[Fix], *, time_s: float
) -> Plan | None:
    """Price the fixes where the cell is forecast not to fit, or may not."""
    forecast = fit.forecast
    if forecast.peak is None or fit.verdict not in (Verdict.TOO_LARGE, Verdict.BORDERLINE):
        return None
    incident, expected = _expected(session, forecast, ahead())
    return make_plan(
        session, incident, expected, fixes, budget=forecast.budget, prepare=do_nothing, time_budget_s=time_s
    )


def _expected(session: Session, forecast: Forecast, evidence: Evidence) -> tuple[Incident, Evidence]:
    """Return the failure as it would be, and the evidence with what the cell will have made by then."""
    device, census = evidence.device, evidence.census
    at_peak = dict(forecast.course.at_peak) if forecast.course is not None else {}
    added: dict[Role, int] = {}
    for role in _GROWING:
        room = (forecast.peak or 0) - census.found - sum(added.values())
        added[role] = max(min(at_peak.get(role, 0) - census.bytes_of(role), room), 0)
    roles = dict(census.roles) | {role: census.bytes_of(role) + size for role, size in added.items() if size}
    allocated = census.found + sum(added.values())
    cell, line = session.cells.failing, forecast.peak_line
    lines = cell.source.splitlines()
    text = lines[line - 1].strip() if line is not None and line <= len(lines) else ""
    incident = Incident(
        is_oom=True,
        family=Family.HOST if device.name == "cpu" else Family.CUDA,
        device=device.name,
        requested=max((forecast.peak or 0) - allocated, 0) or None,
        allocated=allocated,
        message="forecast: the cell was not run",
        cell=CellLine(number=cell.number, line=line, source_line=text),
    )
    return incident, replace(
        evidence,
        devices=(replace(device, allocated=allocated), *evidence.devices[1:]),
        censuses=(
            replace(census, allocated=allocated, found=census.found + sum(added.values()), roles=tuple(roles.items())),
            *evidence.censuses[1:],
        ),
    )


# What the cell makes itself -------------------------------------------------------------------------------------------

# Changes are made to what is there, and a cell that makes all of it itself has nothing yet. So the cell is run on fake
# tensors in a forked process and fails there where its peak is. Then the fakes become tensors with memory of their own,
# which nobody touches and which so takes none. Whoever collects evidence finds what a failure would have left. Limits:
# autograd's record is lost. A cell that is cut before it reaches its peak again is looked at where it ended.

Collect = Callable[[Session, BaseException | None, Mapping[str, int]], Evidence]
"""Collects the evidence of a session and its failure, with the numbers of cells by the file names of their code."""


class _Full(MemoryError):
    """The cell is at its peak."""


def evidence_ahead(
    session: Session, collect: Collect, *, level: int, card: Device | None, timeout_s: float
) -> Evidence | None:
    """Return what is found when the last cell of ``session`` is at its peak, None where that cannot be seen.

    Args:
        collect: called in a forked process.
        level: bytes of tensors at the peak.
        card: the device that the cell asks for and that this machine lacks.
    """
    if timeout_s <= 0 or unsupported() is not None:
        return None

    def work(dry_runs: DryRuns) -> Iterator[Evidence]:
        yield _followed(session, collect, level, dry_runs.card, timeout_s)

    runs = DryRuns(session, do_nothing, budget=None, timeout_s=timeout_s, workers=1, card=card)
    return next((answer for answer in runs.in_copy(work).wait() if isinstance(answer, Evidence)), None)


def _followed(session: Session, collect: Collect, level: int, card: Device | None, timeout_s: float) -> Evidence:
    from torch.utils._python_dispatch import _disable_current_modes

    from oomdoctor.allocator.device import VirtualAccelerator
    from oomdoctor.errors import ForecastError
    from oomdoctor.forecast import dry_run
    from oomdoctor.forecast.live_storages import CELL

    dry_run.warm_up()
    failure = _Full("the cell is at its peak")
    _fail_at(level, failure)
    cached = session.accelerator.read().simulated
    start = dry_run.bring_back(do_nothing, session.namespace, card)
    attempt = Attempt(source=session.cells.failing.source)
    reading = dry_run.run(session, attempt, start, budget=None, cached=cached, card=card, time_s=timeout_s)
    exc = failure if failure.__traceback__ is not None else None
    if reading.forecast.refused is not None and exc is None:
        raise ForecastError(reading.forecast.refused)
    with _disable_current_modes():
        made = _made_real()
        if cached or card is not None:
            device = VirtualAccelerator(_ENDLESS)
            if card is None:
                device.adopt()
            else:
                device.count([tensor for tensor, kind in made if kind == "cuda"])
            session = replace(session, accelerator=device)
        return collect(session, exc, {CELL: session.cells.failing.number})


def _fail_at(level: int, failure: _Full) -> None:
    """Raise ``failure`` from now on, and for the rest of this process, in a cell that comes to hold so many bytes."""
    from oomdoctor.forecast.live_storages import Ledger

    hold = Ledger.hold

    def hold_or_fail(self: Ledger, storage: Any) -> None:
        hold(self, storage)
        if self.begun is not None and self.live >= level and failure.__traceback__ is None:
            raise failure

    Ledger.hold = hold_or_fail  # type: ignore[method-assign]


def _made_real() -> list[tuple[Any, str]]:
    """Give every fake tensor memory of its size and the class that it stands for; return each with its type of device.

    What refers to one sees the change, and so do those that share its memory.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    fakes: list[Any] = alive(FakeTensor)
    fakes = [one for one in fakes if one.layout is torch.strided]
    kinds = [fake.fake_device.type for fake in fakes]
    storages: dict[int, Any] = {}
    real = {id(fake): _standing_for(fake, storages) for fake in fakes}
    for fake in fakes:
        gradient = fake.grad if fake.is_leaf else None
        if id(gradient) in real:
            real[id(fake)].grad = real[id(gradient)]
    for fake in fakes:
        tensor = real[id(fake)]
        torch._C._swap_tensor_impl(fake, tensor)
        fake.__class__, tensor.__class__ = type(tensor), type(fake)
    return list(zip(fakes, kinds, strict=True))


def _standing_for(fake: Any, storages: dict[int, Any]) -> Any:
    """Return a tensor of the host that is what a fake one only says to be."""
    import torch

    told = torch._C.TensorBase.untyped_storage(fake)
    if told._cdata not in storages:
        storages[told._cdata] = _untouched(told.nbytes())
    shape = (fake.storage_offset(), fake.size(), fake.stride())
    tensor = torch.empty(0, dtype=fake.dtype).set_(storages[told._cdata], *shape)
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=fake.requires_grad)
    return tensor


def _untouched(nbytes: int) -> Any:
    """Return a storage that may be larger than the machine's memory: what is only read needs no room of its own."""
    import torch

    if nbytes < MIB:
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
