"""Hand-built plans of cells that were not run: one that fits, one that does not, one without a forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cases import CASES, HOSTILE

from oomdoctor.model.cards import CARDS, CONTEXT_BYTES
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Course, Fit, Forecast, LargestBatch, MemPlan, Place
from oomdoctor.model.session import Cell
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Refused

CELL = Cell(
    number=7,
    source="for x, y in loader:\n    loss = criterion(model(x), y)\n    loss.backward()\n    optimizer.step()\n",
)
POINTS = (
    *(((1 * GIB) + 64 * MIB * step, 2) for step in range(60)),
    (9 * GIB + 64 * MIB, 3),
    *((9 * GIB - 96 * MIB * step, 3) for step in range(60)),
    (5 * GIB, 4),
)
BATCHES = tuple(min(64 * MIB, size - GIB) for size, _ in POINTS)
STATES = tuple(2 * GIB if line > 2 else 0 for _, line in POINTS)
COURSE = Course(
    at_peak=(
        (Role.ACTIVATION, 6 * GIB),
        (Role.PARAMETER, 1 * GIB),
        (Role.OPTIMIZER_STATE, 2 * GIB),
        (Role.BATCH, 64 * MIB),
    ),
    points=POINTS,
    by_role=(
        (
            Role.ACTIVATION,
            tuple(size - GIB - rest - state for (size, _), rest, state in zip(POINTS, BATCHES, STATES, strict=True)),
        ),
        (Role.PARAMETER, (GIB,) * len(POINTS)),
        (Role.OPTIMIZER_STATE, STATES),
        (Role.BATCH, BATCHES),
    ),
    temporaries=(("foreach buffers of AdamW", 512 * MIB), ("cuBLAS workspace", 32 * MIB)),
    flops=3.25e13,
    moved=float(420 * GIB),
)
HERE = Place(name="cuda:0 (simulated)", total=8 * GIB, budget=8 * GIB, source="capacity of the simulated GPU")


def forecast(
    budget: int | None = 8 * GIB, *, peak: int = 9 * GIB + 64 * MIB, course: Course | None = COURSE
) -> Forecast:
    return Forecast(
        basis="dry run",
        budget=budget,
        peak=peak,
        reserved=peak + 128 * MIB,
        slowdown=1.0,
        error_ratio=0.02,
        peak_line=3,
        course=course,
    )


def cards(found: Forecast, least: Forecast | None = None) -> tuple[Fit, ...]:
    places = [
        Place(name=card.name, total=card.total_bytes, budget=card.total_bytes - CONTEXT_BYTES, source=card.source)
        for card in CARDS
    ]
    return tuple(Fit(place=one, forecast=replace(found, budget=one.budget), least=least) for one in places)


def too_large() -> MemPlan:
    """The peak is above the budget, and there are fixes."""
    found = forecast()
    fitting = forecast(peak=3 * GIB, course=None)
    return MemPlan(
        cell=CELL,
        here=Fit(place=HERE, forecast=found),
        elsewhere=cards(found),
        batch=LargestBatch(now=64, size=53, forecast=replace(fitting, slowdown=None), above=54, tried=7),
        plan=replace(CASES["offered"]().plan, unchanged=found),
        elapsed_s=12.34,
    )


def fits() -> MemPlan:
    """It fits, and nothing larger was found not to."""
    found = forecast(peak=3 * GIB)
    end = "a batch of 512 needs exactly what one of 256 does: there seem to be no more samples"
    return MemPlan(
        cell=CELL,
        here=Fit(place=HERE, forecast=found),
        elsewhere=cards(found),
        batch=LargestBatch(now=64, size=256, forecast=found, end=end, tried=4),
        elapsed_s=3.0,
    )


def no_batch_fits() -> MemPlan:
    """Not even one sample fits, and no fix was found."""
    found = forecast(course=None)
    return MemPlan(
        cell=CELL,
        here=Fit(place=HERE, forecast=found),
        elsewhere=cards(found),
        batch=LargestBatch(now=64, size=0, forecast=found, above=1, tried=2),
        plan=CASES["no_candidates"]().plan,
        elapsed_s=3.0,
    )


def refused() -> MemPlan:
    """There is no forecast, but an estimate of the least that it needs."""
    why = f"the dry run of the cell stopped at line 2 with {HOSTILE}"
    found = Forecast(basis="dry run", budget=8 * GIB, refused=why)
    basis = "analytic estimate: what is held now, gradients and optimizer state; activations are not counted"
    least = Forecast(basis=basis, budget=8 * GIB, peak=20 * GIB, refused=why)
    return MemPlan(
        cell=Cell(number=7, source=f"x = {HOSTILE!r}\n{CELL.source}"),
        here=Fit(place=HERE, forecast=found, least=least),
        elsewhere=cards(found, least),
        batch=Refused("the cell could not be forecast"),
        least=least,
        elapsed_s=0.8,
    )


def nowhere() -> MemPlan:
    """It asks for a device that this machine lacks."""
    found = replace(forecast(None), basis="dry run, as on cuda")
    return MemPlan(
        cell=CELL,
        here=Fit(
            place=Place(name="a device that this machine lacks", total=None, budget=None, source=""), forecast=found
        ),
        elsewhere=cards(found),
        batch=Refused("the available memory is unknown"),
        elapsed_s=2.0,
    )


MEMPLANS: dict[str, Callable[[], MemPlan]] = {
    "too_large": too_large,
    "fits": fits,
    "no_batch_fits": no_batch_fits,
    "refused": refused,
    "nowhere": nowhere,
}
