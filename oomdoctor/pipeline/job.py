"""This rank's part in a job: its circle, its groups, and how its runs end on all ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final

from oomdoctor.incident import find_oom
from oomdoctor.model.case import Case
from oomdoctor.model.incident import Family
from oomdoctor.objects.frames import chained
from oomdoctor.ranks.circle import Circle, Word, WordKind
from oomdoctor.ranks.groups import C10D, Groups
from oomdoctor.ranks.presence import SilentRank
from oomdoctor.ranks.restart import restarts
from oomdoctor.sandbox import process_groups

_NEWS_S: Final = 1.0
"""Time in which another rank's word arrives, after a collective with it has failed."""
_NAME: Final = "oomdoctor/name"
"""Key of the name of a job in the store of its group of all ranks."""
_PLACE: Final = "oomdoctor/place"
"""Key of where the ranks talk, in a store that they do not talk over."""
_PLACE_S: Final = 10.0
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
    others = {WordKind.FAILED: "failed", WordKind.UNFIT: "could not make the change"}
    told = others.get(word.kind, "ran out of memory")
    return kind(f"rank {word.rank} {told}: {word.why}")


def has_group() -> bool:
    """Return whether this process has a group of all ranks."""
    c10d: Any = sys.modules.get(C10D)
    return c10d is not None and bool(c10d.is_initialized())


def of_environment() -> Job | None:
    """Return this rank's part in the job that a launcher has started this process for; None where it has started none.

    Source: torchrun gives each of its processes ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, and
    ``TORCHELASTIC_USE_AGENT_STORE`` where the store is its own.
    """
    told = os.environ
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in told for name in names) or int(told["WORLD_SIZE"]) < 2:
        return None
    if told.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    groups = Groups(int(told["MASTER_PORT"]))
    groups.circle = Circle(
        rank=int(told["RANK"]),
        world=int(told["WORLD_SIZE"]),
        host=told["MASTER_ADDR"],
        port=groups.port,
        restart=restarts(),
        release=groups.release,
    )
    return Job(circle=groups.circle, groups=groups)


def of_group(groups: Groups, *, begun_s: float) -> Job | None:
    """Return this rank's part in the job whose group of all ranks was made last; None where it is alone in it.

    To be called on all ranks. They talk over the store that they met over, or, where that is no ``TCPStore``, over one
    in the process of rank 0.
    """
    c10d: Any = sys.modules.get(C10D)
    dist: Any = sys.modules.get("torch.distributed")
    if not has_group() or dist.get_world_size() < 2:
        return None
    store = own = c10d._get_default_store()
    name = own.compare_set(_NAME, "", uuid.uuid4().hex).decode()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    rank, world, kept = dist.get_rank(), dist.get_world_size(), store
    if isinstance(store, dist.TCPStore):
        host, port = store.host, store.port
    else:
        host, port, kept = _opened_by_first(store, rank)
    groups.port = port
    circle = Circle(
        rank=rank,
        world=world,
        host=host,
        port=port,
        restart=restarts(),
        name=f"oomdoctor/{name}/",
        release=groups.release,
    )
    circle.closed = partial(own.delete_key, _NAME)
    groups.circle = circle
    if not groups.is_known:
        groups.adopt(circle)
    circle.asks_who_is_in, circle.kept, circle.keeper = True, kept, 0
    return Job(circle=circle, groups=groups, in_parts=True, begun_s=begun_s)


def _own_address() -> str:
    """Return an address of this machine: the one that a launcher has told, where it is one."""
    for host in filter(None, (os.environ.get("MASTER_ADDR"), socket.gethostname())):
        with suppress(OSError), socket.create_server((host, 0)):
            return host
    return "127.0.0.1"


def _opened_by_first(store: Any, rank: int) -> tuple[str, int, Any]:
    """Have rank 0 open a store for the ranks to talk over; return its host, its port, and what has to be kept of it."""
    dist: Any = sys.modules["torch.distributed"]
    if rank == 0:
        host = _own_address()
        own = dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
        store.set(_PLACE, json.dumps([host, own.port]))
        return host, int(own.port), own
    store.wait([_PLACE], timedelta(seconds=_PLACE_S))
    host, port = json.loads(store.get(_PLACE))
    return str(host), int(port), None


@dataclass(kw_only=True, eq=False)
class Job:
    """This rank's part in a job: its circle, its groups, and how its runs end.

    Attributes:
        ended_s: when the last run of this rank has ended, by the clock; ``seen_s``: when what it raised was seen.
        committed_s: time from there until all had come to the end, None where they have not.
        running: that of which a run is on in this process, None where none is.
        releases_on_error: whether an error of the program's own lets the other ranks out of their collectives.
        in_parts: whether the runs are parts of a program, cells or calls, which some ranks may run without the others.
        begun_s: time in which such a part has begun on each rank.
        keeps_group: whether the group was there when the run began, so that a further attempt begins with it.
        rewraps: whether models that DDP wraps use it, as those that were there before the run.
        stuck: why this rank cannot be released; empty where it was.
    """

    running: ClassVar[Job | None] = None
    circle: Circle
    groups: Groups
    ended_s: float = 0.0
    seen_s: float = 0.0
    committed_s: float | None = None
    stuck: str = ""
    in_parts: bool = False
    releases_on_error: bool = True
    begun_s: float = 3.0
    keeps_group: bool = False
    rewraps: bool = True
    _before: tuple[int, int] = (0, 0)

    @staticmethod
    def is_oom(error: BaseException) -> bool:
        """Return whether memory ran out with an error."""
        return find_oom(error) is not None

    def note(self, error: BaseException) -> None:
        """Note that what a run ends with was seen; where memory ran out, the others are told at once."""
        self.seen_s = time.time()
        if self.is_oom(error) and not self._is_alone():
            self.circle.announce(WordKind.OUT_OF_MEMORY, told_of(error), self.seen_s)

    def leave(self) -> None:
        """Take no part any more: the circle is closed, and groups are made as they were."""
        self.retire()
        self.groups.remove()

    def retire(self) -> None:
        """Say nothing more; groups go on to meet where they met last."""
        Job.running = None
        self.circle.close()

    def begin(self, *, keeps_group: bool | None = None) -> Word | None:
        """Begin a run; return the word of another rank that has ended it already.

        ``keeps_group`` is as the attribute; None where it is what it was for the run before, as for a further attempt.
        """
        circle = self.circle
        if keeps_group is not None:
            self.keeps_group, self.rewraps = keeps_group, True
        is_first = circle.epoch < 0 and not circle.restart
        self.groups.begin(f"oomdoctor/{circle.restart}/{circle.epoch + 1}", is_first=is_first)
        self.seen_s, self._before = 0.0, self._meetings()
        process_groups.is_from_before = self.keeps_group
        word = circle.begin()
        Job.running = self
        return word

    def _meetings(self) -> tuple[int, int]:
        """Return what tells whether this rank has met with others."""
        return self.groups.meetings, self.groups.sequence() if self.in_parts else 0

    def _is_alone(self) -> bool:
        """Whether other ranks do not run the part of the program that this one runs."""
        return self.in_parts and self.circle.word is None and bool(self.circle.missing(self.begun_s))

    def is_apart(self, error: BaseException | None) -> bool:
        """Return whether the others have no part in what this rank has run; then its epoch is none."""
        if not self.in_parts or self.circle.word is not None:
            return False
        asks = error is not None and (self.releases_on_error or self.is_oom(error))
        is_apart = self._is_alone() if asks else self._meetings() == self._before
        if is_apart:
            Job.running = None
            self.circle.withdraw()
        return is_apart

    def keep_librarys(self) -> None:
        """Have a further attempt begin with the group that a library has made in the run: it may make none again.

        As accelerate, whose state in the process says that there is one.
        """
        if not self.keeps_group and self.groups.is_librarys and has_group():
            self.keeps_group, self.rewraps = True, False
            process_groups.is_from_before = True

    def mend(self) -> None:
        """Make the group anew that was released, so that later cells have one. All ranks do so at the same time."""
        if self.keeps_group and self.in_parts:
            self.groups.begin(f"oomdoctor/{self.circle.restart}/{self.circle.epoch}/mended")
            self.groups.renew(rewraps=self.rewraps)

    def end(self, error: BaseException | None, *, is_unfit: bool = False) -> Word:
        """Say how this rank's run has ended, and return how the epoch ends on all ranks.

        ``is_unfit``: whether it was ended by us, because the change is not right for the program.

        Raises:
            SilentRank: other ranks do not answer, or the store does not.
        """
        circle, self.ended_s, self.committed_s = self.circle, time.time(), None
        Job.running = None
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
            kind = WordKind.FAILED if self.releases_on_error else WordKind.LEFT
            # A collective fails as soon as another rank leaves it, and that rank's word may be on its way.
            may_be_released = self.releases_on_error or any(isinstance(one, RuntimeError) for one in chained(error))
            return (circle.heard_within(_NEWS_S) if may_be_released else None) or circle.speak(kind, why)
        except SilentRank as silent:
            if circle.word is None:
                raise
            self.stuck = str(silent)
            return circle.word


def of_peer(case: Case, word: Word) -> Case:
    """Return the case of a rank that was released, where ``word`` says what has ended the run on another one."""
    told = f"rank {word.rank} ran out of memory, and this rank was released: {word.why}"
    terms: dict[str, Any] = {"is_oom": False, "family": Family.NOT_OOM, "exc_type": "PeerOutOfMemory"}
    return replace(case, incident=replace(case.incident, message=told, **terms))
