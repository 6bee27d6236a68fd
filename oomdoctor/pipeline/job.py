"""This rank's part in a job: its circle, its groups, and how its runs end on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from oomdoctor.ranks.circle import Circle, Word, WordKind
from oomdoctor.ranks.groups import Groups
from oomdoctor.ranks.presence import SilentRank
from oomdoctor.sandbox import process_groups

_BEGUN_S: Final = 3.0
"""Time in which a cell that was sent to all ranks has begun on each."""
_NEWS_S: Final = 1.0
"""Time in which another rank's word arrives, after a collective with it has failed."""
_LONGEST: Final = 300


class PeerOutOfMemory(RuntimeError):
    """Memory ran out on another rank of the job, so that this one was taken back with it."""


class PeerFailed(RuntimeError):
    """Another rank of the job has failed, so that this one ended with it."""


def told_of(error: BaseException) -> str:
    """Return what an error says, cut where it is long."""
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def ended_by(word: Word) -> BaseException:
    """Return what a run of this rank ends with that another rank's word has ended."""
    kind = PeerFailed if word.kind is WordKind.FAILED else PeerOutOfMemory
    told = "failed" if word.kind is WordKind.FAILED else "ran out of memory"
    return kind(f"rank {word.rank} {told}: {word.why}")


@dataclass(kw_only=True, eq=False)
class Job:
    """This rank's part in a job: its circle, its groups, and how its runs end.

    Attributes:
        is_oom: tells whether memory ran out with an error.
        ended_s: when the last run of this rank has ended, by the clock; ``seen_s``: when what it raised was seen.
        committed_s: time from there until all had come to the end, None where they have not.
        is_running: whether a run is on, or is about to end.
        in_cells: whether the runs are cells, which some ranks may run without the others, of one long-lived group.
        stuck: why this rank cannot be released; empty where it was.
    """

    circle: Circle
    groups: Groups
    is_oom: Callable[[BaseException], bool]
    ended_s: float = 0.0
    seen_s: float = 0.0
    committed_s: float | None = None
    stuck: str = ""
    is_running: bool = False
    in_cells: bool = False
    _sequence: int = 0

    def note(self, error: BaseException) -> None:
        """Note that what a run ends with was seen; where memory ran out, the others are told at once."""
        self.seen_s = time.time()
        if self.is_oom(error) and not self._is_alone():
            self.circle.announce(WordKind.OUT_OF_MEMORY, told_of(error), self.seen_s)

    def leave(self) -> None:
        """Take no part any more: the circle is closed, and groups are made as they were."""
        self.circle.close()
        self.groups.remove()

    def begin(self) -> Word | None:
        """Begin a run; return the word of another rank that has ended it already."""
        circle = self.circle
        if circle.epoch >= 0 or circle.restart:
            self.groups.prefix = f"oomdoctor/{circle.restart}/{circle.epoch + 1}"
        self.groups.is_released = False
        self.seen_s, self._sequence = 0.0, self.groups.sequence() if self.in_cells else 0
        process_groups.is_from_before = self.in_cells
        word = circle.begin()
        self.is_running = True
        return word

    def _is_alone(self) -> bool:
        """Whether other ranks do not run the cell that this one runs."""
        return self.in_cells and self.circle.word is None and bool(self.circle.missing(_BEGUN_S))

    def is_apart(self, error: BaseException | None) -> bool:
        """Return whether the others have no part in the cell that this rank has run; then its epoch is none."""
        if not self.in_cells or self.circle.word is not None:
            return False
        is_apart = self.groups.sequence() == self._sequence if error is None else self._is_alone()
        if is_apart:
            self.is_running = False
            self.circle.withdraw()
        return is_apart

    def mend(self) -> None:
        """Make the group anew that was released, so that later cells have one. All ranks do so at the same time."""
        if self.in_cells:
            self.groups.prefix = f"oomdoctor/{self.circle.restart}/{self.circle.epoch}/mended"
            self.groups.is_released = False
            self.groups.renew()

    def end(self, error: BaseException | None, *, is_unfit: bool = False) -> Word:
        """Say how this rank's run has ended, and return how the epoch ends on all ranks.

        Args:
            is_unfit: whether it was ended by us, because the change is not right for the program.

        Raises:
            SilentRank: other ranks do not answer, or the store does not.
        """
        circle, self.ended_s, self.committed_s = self.circle, time.time(), None
        self.is_running = False
        if error is None or (isinstance(error, SystemExit) and not error.code):
            word = circle.finish()
            if word.kind is WordKind.DONE:
                self.committed_s = time.time() - self.ended_s
            return word
        why = told_of(error)
        if is_unfit:
            return circle.speak(WordKind.UNFIT, why)
        try:
            if self.is_oom(error):
                return circle.speak(WordKind.OUT_OF_MEMORY, why, self.seen_s)
            # A collective fails as soon as another rank leaves it, and that rank's word may be on its way.
            return circle.heard_within(_NEWS_S) or circle.speak(WordKind.FAILED, why)
        except SilentRank as silent:
            if circle.word is None:
                raise
            self.stuck = str(silent)
            return circle.word
