"""Prices attempts: each is run in a forked copy of this process, on fake tensors, and only numbers come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from oomdoctor.forecast.nursery import Nursery, unsupported
from oomdoctor.forecast.reading import ON_CARD, Reading, late, no_reading

if TYPE_CHECKING:
    from oomdoctor.forecast.nursery import Shadows
    from oomdoctor.model.plan import Forecast
    from oomdoctor.model.session import Attempt, Session
    from oomdoctor.sandbox.card import Card


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
    if not attempts:
        return ()
    why, found = unsupported(), dict[int, Reading]()
    if why is None:

        def work(shadows: Shadows) -> Iterator[object]:
            waiting = list(enumerate(attempts))
            while waiting or shadows.busy:
                while waiting and shadows.has_room:
                    shadows.begin(*waiting.pop(0))
                if (answer := shadows.next()) is None:
                    return
                yield answer

        nursery = Nursery(session, prepare, work, budget=budget, timeout_s=timeout_s, workers=workers, card=card)
        found = dict(nursery.wait())
        why = nursery.failed or late(timeout_s)
    readings = [found.get(index, no_reading(why)) for index in range(len(attempts))]
    readings = [no_reading(late(timeout_s)) if reading.is_late else reading for reading in readings]
    return tuple(reading.priced(budget, readings[0].cost) for reading in readings)


def is_of_card(forecast: Forecast) -> bool:
    """Return whether the forecast is that of a device which this machine has not."""
    return f", {ON_CARD}" in forecast.basis


def lacked_card(forecast: Forecast) -> Card | None:
    """Return the device which this machine has not and that the forecast was made on, None where there is none."""
    from oomdoctor.sandbox.card import Card

    _, _, named = forecast.basis.partition(f", {ON_CARD}")
    return Card(type=named.partition(",")[0]) if named else None
