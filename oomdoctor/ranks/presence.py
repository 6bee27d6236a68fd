"""Which ranks of a job answer, and the job's store, by which they are asked.

Each rank has a bell, a key that the others set. Its thread waits for that key alone, and answers by counting: a rank
whose count stands still was killed or stopped. A rank that is busy, or hangs in a collective, answers.

    bell/RANK   there is news for this rank
    alive/RANK  counts the answers of a rank's thread; at/RANK: the epoch that it was in then
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from oomdoctor.errors import OomDoctorError

ASK_S: Final = 3.0
"""Time between two questions whether the ranks that are waited for are alive."""
SILENT_S: Final = 20.0
"""Time after which a rank whose thread has not answered is given up: it was killed or stopped."""
_LOOK_S: Final = 0.005
"""Time between two looks for an answer."""
_ROUND_S: Final = 1.0


class SilentRank(OomDoctorError):
    """Ranks that were waited for in vain; the text says which, and for how long."""


class RankLeft(SilentRank):
    """A rank that takes no part in the talk any more, and has said why."""


class JobStore:
    """The job's store; what it does not answer is a ``SilentRank``."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def answered(*args: Any) -> Any:
            try:
                return asked(*args)
            except RuntimeError as error:
                raise SilentRank(f"the job's store does not answer ({type(error).__name__})") from None

        return answered


class Presence:
    """Tells which of the ``world`` ranks of a job answer, as ``rank`` finds them over ``store``."""

    def __init__(self, store: JobStore, rank: int, world: int) -> None:
        self._store = store
        self._rank, self._world = rank, world

    def ring(self, ranks: Sequence[int]) -> None:
        """Have the threads of some ranks look for news, and answer."""
        for rank in ranks:
            self._store.set(f"bell/{rank}", "1")

    def forget(self, rank: int) -> None:
        """Delete what a rank has answered."""
        self._store.delete_key(f"alive/{rank}")
        self._store.delete_key(f"at/{rank}")

    def not_answering(self, limit_s: float) -> list[int]:
        """Return the other ranks whose threads do not answer their bell within a while."""
        others, end = self._others(), time.monotonic() + limit_s
        before = {rank: self._count(rank) for rank in others}
        self.ring(others)
        while others := [rank for rank in others if self._count(rank) == before[rank]]:
            if time.monotonic() >= end:
                break
            time.sleep(_LOOK_S)
        return others

    def missing(self, epoch: int, limit_s: float) -> list[int]:
        """Return the other ranks that do not come into an epoch within a while, or do not answer."""
        others, end = self._others(), time.monotonic() + limit_s
        while others:
            self.not_answering(max(min(_ROUND_S, end - time.monotonic()), 0.0))
            others = [rank for rank in others if not self._is_in(rank, epoch)]
            if time.monotonic() >= end:
                break
        return others

    def pulse(self) -> Pulse:
        """Return what notices when ranks stop to answer from now on."""
        return Pulse(self)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _count(self, rank: int) -> int:
        return int(self._store.add(f"alive/{rank}", 0))

    def _is_in(self, rank: int, epoch: int) -> bool:
        key = f"at/{rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= epoch


class Pulse:
    """Notices when ranks stop to answer; to be felt every ``ASK_S`` while they are waited for."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._seen: dict[int, tuple[int, float]] = {}

    def feel(self, ranks: Sequence[int]) -> None:
        """Ring, and look who has answered since.

        Raises:
            SilentRank: a rank has not for ``SILENT_S``.
        """
        now, silent = time.monotonic(), list[int]()
        for rank in ranks:
            count = self._presence._count(rank)
            before = self._seen.get(rank)
            if before is None or before[0] != count:
                self._seen[rank] = (count, now)
            elif now - before[1] > SILENT_S:
                silent.append(rank)
        self._presence.ring(ranks)
        if silent:
            raise SilentRank(f"{named(silent)} has not answered for {SILENT_S:.0f} s: killed, or stopped")


def named(ranks: Sequence[int]) -> str:
    """Return what some ranks are called in a sentence."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
