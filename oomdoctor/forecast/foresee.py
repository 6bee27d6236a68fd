"""Looks at a cell before it is run: what it needs, where that fits, and what would make it fit.

All of it comes from shadow runs; the user's process runs nothing of the cell. Each part has the whole time to itself:
the forecast, the cards, the fixes, the batch.

The largest batch that fits is found by forecasts alone. From the batch that the cells set it goes up, or down to a
single sample, until the answer lies between two sizes, and then closes in. The peak grows all but evenly with the
batch, so the next guess is where the line through two forecasts meets the budget; every other guess leaves a third, for
peaks that do not. Two sizes are forecast together. A guess has the next one beside it that forecasts can tell from it:
where the one fits and the other does not, the search is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, TypeAlias

from oomdoctor.allocator.device import VirtualAccelerator
from oomdoctor.forecast.ahead import evidence_ahead
from oomdoctor.forecast.attempts import patched
from oomdoctor.forecast.planning import make_plan
from oomdoctor.forecast.pricing import is_of_card, lacked_card, price
from oomdoctor.forecast.reading import BASIS, late
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.cards import CARDS, CONTEXT_BYTES, Card
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Fix, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Fit, Forecast, LargestBatch, MemPlan, Place, Plan, Verdict
from oomdoctor.model.session import Accelerator, Attempt, Cells, Session

_GROWING: Final = (Role.GRADIENT, Role.OPTIMIZER_STATE, Role.ACTIVATION)
"""What a step adds: what it leaves there, and what is there while it runs."""
_ENDLESS: Final = 1 << 60
"""Bytes that no program fills; how much there is, the plan says."""
_LEAST_S: Final = 1.0
"""Less time than this is not enough for another round of forecasts."""
_MOST: Final = 1 << 24
"""Larger batches are not asked for."""
_NEAR: Final = 100
"""Sizes that differ by less than one part in so many are not told apart: a forecast is no better than that."""
_ON_LINE: Final = 0.5
"""A batch that was to need the whole budget and needs less than this share of it has not the samples it was to have."""
_Price: TypeAlias = Callable[[Sequence[int]], Sequence[Forecast]]
_LATE: Final = "the time for forecasts was over"

_STATES: Final = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}
"""Values that an optimizer keeps for each weight with its default settings. Source: ``torch.optim``, ``state[...]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How the batch size of the cells is read and changed; it comes as a value, as fixes do.

    Attributes:
        now: samples in a batch, or why that cannot be told.
        at: the cells with batches of so many samples.
    """

    now: Callable[[Cells, Evidence], int | Refused]
    at: Callable[[Cells, Evidence, int], Patch | Refused]


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
        time_s: for each part of the work; 0 makes no shadow run.
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
        batch=_largest(session, forecast, evidence, ahead, batches, time_s=time_s),
        elapsed_s=time.monotonic() - begun,
    )


def _least(evidence: Evidence, budget: int | None, why: str) -> Forecast | None:
    """Return the least that the last cell needs without a shadow run, None where it trains nothing that was found.

    What is there already and what training adds to it: this tells what cannot fit, and never what does.

    Args:
        why: why there is no forecast.
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
    return price(session, [Attempt(source=source)], budget=budget, prepare=_nothing, timeout_s=timeout_s)[0]


def _nothing() -> None:
    """Bring back the start of the cell, which has not begun."""


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
    """Price the fixes where the cell is forecast not to fit, or not for certain."""
    forecast = fit.forecast
    if forecast.peak is None or fit.verdict not in (Verdict.TOO_LARGE, Verdict.BORDERLINE):
        return None
    incident, expected = _expected(session, forecast, ahead())
    return make_plan(session, incident, expected, fixes, budget=forecast.budget, prepare=_nothing, time_budget_s=time_s)


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


def _largest(
    session: Session,
    forecast: Forecast,
    evidence: Evidence,
    ahead: Callable[[], Evidence],
    batches: Batches,
    *,
    time_s: float,
) -> LargestBatch | Refused:
    if forecast.peak is None:
        return Refused("the cell could not be forecast")
    if forecast.budget is None:
        return Refused("it is not known how much memory there is for it")
    if forecast.at_least:
        return Refused("more may be needed than the forecast saw, so that no batch is known to fit")
    now = batches.now(session.cells, evidence)
    if isinstance(now, Refused) and any(loop.in_failing_run for loop in evidence.code.loops):
        evidence = ahead()  # what the cell makes itself may tell
        now = batches.now(session.cells, evidence)
    if isinstance(now, Refused):
        return now
    changed = batches.at(session.cells, evidence, now * 2)
    if isinstance(changed, Refused):
        return changed
    end = time.monotonic() + time_s

    def price_batches(sizes: Sequence[int]) -> Sequence[Forecast]:
        patches = [batches.at(session.cells, evidence, size) for size in sizes]
        reasons = [patch.reason for patch in patches if isinstance(patch, Refused)]
        if reasons:
            return [Forecast(basis=BASIS, refused=reasons[0]) for _ in sizes]
        attempts = [patched(session.cells.failing, patch) for patch in patches if isinstance(patch, Patch)]
        left_s = round(end - time.monotonic(), 1)
        return price(session, attempts, budget=forecast.budget, prepare=_nothing, timeout_s=left_s)

    return largest(now, forecast, price_batches, has_time=lambda: end - time.monotonic() > _LEAST_S)


def largest(now: int, forecast: Forecast, price_batches: _Price, *, has_time: Callable[[], bool]) -> LargestBatch:
    """Return the largest batch whose forecast fits.

    Args:
        now: samples in a batch as the cell stands; ``forecast``: what it needs so.
        price_batches: forecasts the cell with batches of these sizes; called again and again.
        has_time: whether there is time for more forecasts.
    """
    known, budget = {now: forecast}, forecast.budget or 0
    end, tried, by_line, is_line = None, 1, True, True
    while True:
        high = min((size for size in known if known[size].verdict is not Verdict.FITS), default=None)
        low = max((size for size in known if high is None or size < high), default=0)
        if high is None and low >= _MOST:
            end = f"larger batches than {low} were not asked for"
        if end is not None or high == 1 or (high is not None and low and high - low <= max(1, low // _NEAR)):
            break
        if not has_time():
            end = _LATE
            break
        if high is None:
            sizes = [low * 2, max(_where_the_line_ends(known, low, budget), low * 4) if is_line else low * 4]
        elif not low:
            sizes = [1]
        else:
            guess = _between(known, low, high, budget)
            thirds = [low + (high - low) // 3, high - (high - low) // 3]
            sizes = [guess, guess + max(1, guess // _NEAR)] if by_line else thirds
            by_line = not by_line
        sizes = sorted({size for size in sizes if low < size and (high is None or size < high)})
        for size, found in zip(sizes, price_batches(sizes), strict=True):
            tried += 1
            if found.refused is not None:
                end = f"a batch of {size} could not be forecast: {found.refused}" if has_time() else _LATE
                break
            fits = found.verdict is Verdict.FITS
            if high is None and fits and _is_same(known[low], found):
                end = f"a batch of {size} needs exactly what one of {low} does: there seem to be no more samples"
                break
            if high is None and fits and size > 4 * low and _needs(found) < _ON_LINE * budget:
                is_line = False
                break
            known[size] = replace(found, slowdown=None)
            low, high = (size, high) if fits else (low, size)
    return LargestBatch(now=now, size=low, forecast=known[low or high or now], above=high, end=end, tried=tried)


def _where_the_line_ends(known: dict[int, Forecast], low: int, budget: int) -> int:
    """Return the size that the line through the two largest known ones speaks for; 0 where there is none."""
    below = max((size for size in known if size < low), default=None)
    if below is None or _needs(known[low]) <= _needs(known[below]):
        return 0
    steepness = (_needs(known[low]) - _needs(known[below])) / (low - below)
    return min(low + int((budget - _needs(known[low])) / steepness), _MOST)


def _between(known: dict[int, Forecast], low: int, high: int, budget: int) -> int:
    """Return where the line from a size that fits to one that does not meets the budget."""
    least, most = _needs(known[low]), _needs(known[high])
    share = (budget - least) / (most - least) if most > least else 0.5
    return min(max(low + int((high - low) * share), low + 1), high - 1)


def _needs(forecast: Forecast) -> float:
    """Return what the verdict counts: the larger of peak and reserved, with the error of such forecasts."""
    return max(forecast.peak or 0, forecast.reserved or 0) * (1 + forecast.error_ratio)


def _is_same(one: Forecast, two: Forecast) -> bool:
    """Whether two batches hold the same samples, as far as forecasts tell: not a byte and not an operation more."""
    flops = {forecast.course.flops for forecast in (one, two) if forecast.course is not None}
    return (one.peak, one.reserved) == (two.peak, two.reserved) and len(flops) <= 1
