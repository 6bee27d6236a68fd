"""Runs of a trial, each in a copy of the process that it is called in: so many at once as there are processors for.

A trial is waited for, so that what will be asked for is begun ahead where a processor is free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, TypeAlias, cast

from oomdoctor.model.session import Attempt
from oomdoctor.sandbox.copies import Copy, wait_for
from oomdoctor.sandbox.fork import processors
from oomdoctor.sandbox.restrictions import bound_memory
from oomdoctor.trial.run import End, Terms

RUN_S: Final = 40.0
"""Time after which a single run is given up."""
_MOST_AT_ONCE: Final = 3
"""The unchanged program, the changed one, and a control."""

_Key: TypeAlias = tuple[Attempt, Terms]


def at_once() -> int:
    """Return how many runs are made at the same time."""
    return min(processors(), _MOST_AT_ONCE)


class Ways:
    """The ways to write the changed program, the likeliest first; each is written when it is asked for.

    Attributes:
        at: the place of the one that is tried.
    """

    def __init__(self, changed: Iterable[Attempt]) -> None:
        self.at, self._rest, self._written = 0, iter(changed), list[Attempt]()

    @property
    def current(self) -> Attempt | None:
        """The one that is tried, None where all are."""
        return self._get(self.at)

    @property
    def following(self) -> Attempt | None:
        """The one that is tried next, None where there is none."""
        return self._get(self.at + 1)

    def go_on(self) -> None:
        """Try the next one."""
        self.at += 1

    def _get(self, place: int) -> Attempt | None:
        self._written += islice(self._rest, max(place + 1 - len(self._written), 0))
        return self._written[place] if place < len(self._written) else None


class Runs:
    """The runs of one trial, each made once for all who ask for it.

    Args:
        run: runs a program in the process that it is called in, which is of no use afterwards; it is told how many
            such processes share the machine.
        most: how many are made at once.

    Attributes:
        until: when runs that begin from now on are given up at the latest.
    """

    def __init__(self, run: Callable[[Attempt, Terms, int], End], most: int) -> None:
        self._run, self._most, self.until = run, most, math.inf
        self._ends: dict[_Key, End] = {}
        self._ahead: list[_Key] = []
        self._running: dict[_Key, Copy] = {}
        self._lacked: set[_Key] = set()

    @property
    def goes_ahead(self) -> bool:
        """Whether there are processors for more than one run."""
        return self._most > 1

    def ahead(self, attempt: Attempt, terms: Terms) -> None:
        """Begin a run that is likely to be asked for, as soon as a processor is free."""
        key = attempt, terms
        if self.goes_ahead and key not in self._ends and key not in self._running and key not in self._ahead:
            self._ahead.append(key)
            self._begin_ahead()

    def end_of(self, attempt: Attempt, terms: Terms) -> End:
        """Return the end of a run, which is waited for.

        One that lacked memory, as others ran beside it, or time, is made once more alone where there is time.
        """
        key = attempt, terms
        end = self._waited_for(key)
        if end.is_ours and key in self._lacked and self.until == math.inf:
            self._lacked.discard(key)
            self.forget()
            del self._ends[key]
            self._begin(key, share=1)
            end = self._waited_for(key)
        return end

    def forget(self) -> None:
        """End the runs that were begun ahead and have not ended."""
        for copy in self._running.values():
            copy.end()
        self._running.clear()
        self._ahead.clear()

    def _waited_for(self, key: _Key) -> End:
        if key in self._ahead:
            self._ahead.remove(key)
        if key not in self._ends and key not in self._running:
            if len(self._running) == self._most:
                self._running.popitem()[1].end()
            self._begin(key, share=self._most)
        while True:
            for one, copy in list(self._running.items()):
                self._take(one, copy)
            self._begin_ahead()
            if key in self._ends:
                return self._ends[key]
            wait_for((copy for copy in self._running.values() if not copy.over), self._running[key].left_s)

    def _begin_ahead(self) -> None:
        while self._ahead and len(self._running) < self._most:
            self._begin(self._ahead.pop(0), share=self._most)

    def _begin(self, key: _Key, *, share: int) -> None:
        def ran() -> list[End]:
            bound_memory(share)
            return [self._run(*key, share)]

        limit_s = max(min(RUN_S, self.until - time.monotonic()), 0.0)
        self._running[key] = Copy(ran, limit_s=limit_s)
        if share > 1 or limit_s < RUN_S:
            self._lacked.add(key)

    def _take(self, key: _Key, copy: Copy) -> None:
        told = copy.poll()
        if not told and not copy.over:
            return
        late = "it did not end in time"
        end = cast("End", told[0]) if told else End(error=late if copy.is_late else copy.failed, is_ours=True)
        copy.end()
        del self._running[key]
        self._ends[key] = end
