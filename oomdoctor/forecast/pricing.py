"""Prices attempts: each is run in a forked copy of this process, on fake tensors, and only numbers come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from oomdoctor.forecast.nursery import Nursery, unsupported
from oomdoctor.forecast.reading import OUT_OF_TIME, Reading
from oomdoctor.model.plan import Forecast
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.forecast.nursery import Shadows
    from oomdoctor.model.session import Attempt, Session
    from oomdoctor.sandbox.card import Card

BASIS: Final = "shadow run"
_ON_CARD: Final = "as on "


def price(
    session: Session,
    attempts: Sequence[Attempt],
    *,
    budget: int | None,
    prepare: Callable[[], None],
    timeout_s: float = 10.0,
    workers: int | None = None,
    card: Card | None = None,
) -> tuple[Forecast, ...]:
    """Forecast what each of ``attempts`` would need, in their order.

    Args:
        session: the user's program.
        attempts: the first is by convention the unchanged cell; the slowdown of the others is relative to it.
        budget: bytes that there are.
        prepare: restores the start of the cell; called in a forked process, with real tensors, outside of any mode.
        timeout_s: time for all of them together; what was not priced by then is refused with that reason.
        workers: how many run at once; None for one per processor, at most four.
        card: the device to run on as if it were here. Without it a cell that asks for a device which this machine has
            not is run as on one, and the basis says so.

    Returns:
        A forecast each, with ``refused`` where there is none. An error of the user's code is such a reason.
    """
    return Pricer(session, budget=budget, prepare=prepare, workers=workers, card=card).price(
        attempts, timeout_s=timeout_s
    )


class Pricer:
    """Prices attempts of one cell in several calls, all relative to the first attempt of the first call."""

    def __init__(
        self,
        session: Session,
        *,
        budget: int | None,
        prepare: Callable[[], None],
        workers: int | None = None,
        card: Card | None = None,
    ) -> None:
        self._card = card
        self._session, self._budget, self._prepare, self._workers = session, budget, prepare, workers
        self._unchanged: float | None = None

    def price(self, attempts: Sequence[Attempt], *, timeout_s: float = 10.0) -> tuple[Forecast, ...]:
        """Forecast what each of ``attempts`` would need, in their order. See ``price``."""
        if not attempts:
            return ()
        why = unsupported()
        if why is not None:
            return tuple(Forecast(basis=BASIS, budget=self._budget, refused=why) for _ in attempts)
        readings = self._readings(attempts, timeout_s)
        if self._unchanged is None:
            self._unchanged = readings[0].cost if readings[0].why is None else 0.0
        return tuple(forecast_of(one, self._budget, self._unchanged) for one in readings)

    def _readings(self, attempts: Sequence[Attempt], timeout_s: float) -> list[Reading]:
        def work(shadows: Shadows) -> Iterator[tuple[int, Reading]]:
            waiting = list(enumerate(attempts))
            while waiting or shadows.busy:
                while waiting and shadows.has_room:
                    shadows.begin(*waiting.pop(0))
                answer = shadows.next()
                if answer is None:
                    return
                yield answer  # type: ignore[misc]

        nursery = Nursery(
            *(self._session, self._prepare, work),
            budget=self._budget,
            timeout_s=timeout_s,
            workers=self._workers,
            card=self._card,
        )
        found: dict[int, Reading] = dict(nursery.wait())
        otherwise = Reading(why=nursery.failed or late(timeout_s))
        readings = [found.get(index, otherwise) for index in range(len(attempts))]
        return [Reading(why=late(timeout_s)) if is_late(one) else one for one in readings]


def late(timeout_s: float) -> str:
    """Return why there is no forecast where the time was over."""
    return f"not priced within {timeout_s:g} s"


def is_late(reading: Reading) -> bool:
    """Return whether a shadow was cut before it saw enough."""
    return reading.why == OUT_OF_TIME


def forecast_of(reading: Reading, budget: int | None, unchanged_cost: float | None) -> Forecast:
    """Return what a reading says.

    Args:
        unchanged_cost: cost of the unchanged cell's shadow run, which slowdowns are relative to; falsy if not known.
    """
    if reading.why is not None:
        return Forecast(basis=BASIS, budget=budget, refused=reading.why)
    error = reading.error_ratio
    if reading.reserved:
        error = max(error, round(reading.reserved_slack / max(reading.peak, reading.reserved), 4))
    bases = [BASIS]
    if reading.card is not None:
        bases.append(f"{_ON_CARD}{reading.card}")
    if reading.over:
        bases.append(f"extrapolated over {reading.over} steps")
    if reading.endless:
        bases.append(f"grows by {format_size(reading.endless)} per step")
    if reading.missed is not None:
        bases.append(reading.missed)
    if reading.is_estimate:
        bases.append("what kernels need inside is an estimate")
    bases += [f"{what} is not known" for what in reading.unknown]
    if reading.is_uncompiled:
        bases.append("what is compiled counts as if it were not")
    if reading.is_guessed:
        bases.append("on the likelier way where values decide")
    if reading.is_bound:
        bases.append("at the most that values may decide")
    if reading.is_counted_on:
        bases.append("at the most, as if no deque and no cycle were ever full")
    if reading.is_partial:
        bases.append("may be larger in steps that were not seen")
    if reading.left_early:
        bases.append("what comes after the training of a library is not seen")
    return Forecast(
        basis=", ".join(bases),
        budget=budget,
        peak=reading.peak,
        reserved=reading.reserved,
        slowdown=round(reading.cost / unchanged_cost, 4) if unchanged_cost else None,
        error_ratio=error,
        peak_line=reading.peak_line,
        course=reading.course,
        at_least=bool(reading.endless) or reading.missed is not None or reading.left_early,
        at_most=reading.is_bound or reading.is_counted_on,
    )


def is_of_card(forecast: Forecast) -> bool:
    """Return whether the forecast is that of a device which this machine has not."""
    return f", {_ON_CARD}" in forecast.basis


def lacked_card(forecast: Forecast) -> Card | None:
    """Return the device which this machine has not and that the forecast was made on, None where there is none."""
    from oomdoctor.sandbox.card import Card

    _, _, named = forecast.basis.partition(f", {_ON_CARD}")
    return Card(type=named.partition(",")[0]) if named else None
