"""Shadows where nothing can be forked at all: each is a process of its own that was started anew.

They are what ``Shadows`` are to the nursery. Each takes seconds to load what it needs, which its time does not count;
so few of them run at once, and the time of all is over only when no more of them can be begun.
"""

from __future__ import annotations

import pickle
import select
import struct
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import fresh
from oomdoctor.forecast.reading import Reading
from oomdoctor.forecast.ways import higher
from oomdoctor.sandbox.card import Card

if TYPE_CHECKING:
    from oomdoctor.forecast.fresh_told import Parcel
    from oomdoctor.model.session import Attempt, Session

__all__ = ["FreshShadows"]

_MOST_WORKERS: Final = 2
_LEAST_S: Final = 0.3
_LOADING_S: Final = 20.0
"""Time that a process may take to load what it needs."""
_LENGTH: Final = struct.Struct("!I")


class _Running:
    """One shadow: what it runs, what was read of it, and of the other way if that was gone before."""

    def __init__(self, begun: fresh.Begun, key: Hashable, attempt: Attempt, first: Reading | None) -> None:
        self.begun, self.key, self.attempt, self.first = begun, key, attempt, first
        self.received = bytearray()


class FreshShadows:
    """The shadows of a nursery that cannot fork."""

    def __init__(self, parcel: Parcel, session: Session, prepare: Callable[[], None]) -> None:
        self._parcel, self._session, self._prepare = parcel, session, prepare
        self._workers = min(parcel.workers, _MOST_WORKERS)
        self._end: float | None = None
        self._running: list[_Running] = []
        self._answered: list[tuple[Hashable, Reading]] = []

    @property
    def card(self) -> Card | None:
        """The device that shadows run on, None for the memory of this machine."""
        return self._parcel.card

    @property
    def has_room(self) -> bool:
        """Whether another shadow may begin."""
        return len(self._running) + len(self._answered) < self._workers and self.left_s > _LEAST_S

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._running or self._answered)

    @property
    def left_s(self) -> float:
        """Time in which shadows may begin; the first of them loads what it needs in time of its own."""
        if self._end is None:
            return self._parcel.timeout_s
        return self._end - time.monotonic()

    def begin(self, key: Hashable, attempt: Attempt) -> None:
        """Begin a shadow that runs ``attempt``; its answer comes under ``key``."""
        if self._end is None:
            self._end = time.monotonic() + self._parcel.timeout_s + _LOADING_S
        self._begin(key, attempt, None)

    def _begin(self, key: Hashable, attempt: Attempt, first: Reading | None) -> None:
        from oomdoctor.forecast.fresh_parcel import attempted

        try:
            job = attempted(self._session, self._prepare, attempt)
            parcel = replace(
                self._parcel, job=job, way=first is None, timeout_s=min(self.left_s, self._parcel.timeout_s)
            )
            self._running.append(_Running(fresh.started(pickle.dumps(parcel)), key, attempt, first))
        except ForecastError as error:
            self._answered.append((key, Reading(why=str(error), is_fresh=True)))

    def next(self) -> tuple[Hashable, Reading] | None:
        """Return the next answer; None when the time is over, and then no shadow is left."""
        while not self._answered:
            left = self.left_s
            if left <= 0 or not self._running:
                self._end_all()
                return None
            ready, _, _ = select.select([one.begun.reader for one in self._running], [], [], left)
            for one in [one for one in self._running if one.begun.reader in ready]:
                self._read(one)
        return self._answered.pop(0)

    def _read(self, one: _Running) -> None:
        chunk = one.begun.receive()
        if chunk:
            one.received += chunk
            return
        self._running.remove(one)
        one.begun.end()
        reading = _reading_of(bytes(one.received))
        if reading.lacks is not None:
            # It asks for a device that this machine has not: what it would need there can be seen all the same.
            if self._parcel.card is None:
                self._parcel = replace(self._parcel, card=Card(type=reading.lacks))
            self._begin(one.key, one.attempt, None)
        elif reading.is_half and one.first is None and self.left_s > _LEAST_S:
            self._begin(one.key, one.attempt, reading)
        else:
            whole = reading if one.first is None else higher(one.first, reading)
            self._answered.append((one.key, replace(whole, is_fresh=True, is_half=False)))

    def _end_all(self) -> None:
        for one in self._running:
            one.begun.end()
        self._running.clear()


def _reading_of(received: bytes) -> Reading:
    """Return the first message that came, None of which says what became of the process."""
    if len(received) < _LENGTH.size:
        return Reading(why="the shadow process ended without an answer")
    (length,) = _LENGTH.unpack_from(received)
    said = pickle.loads(received[_LENGTH.size : _LENGTH.size + length])
    return said if isinstance(said, Reading) else Reading(why=str(said.why))
