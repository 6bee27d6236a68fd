"""The ranks of one job, and what they say to each other over the job's own store.

Each rank has two connections of its own to the store. On one, a thread waits for its bell (see ``presence``); it wakes
for nothing else, and answers for the rank while the program runs. On the other, the main thread speaks. One *epoch* is
one run of the program on all ranks. It ends with one *word*, the first that is spoken: a rank has run out of memory, or
has failed otherwise, or all have come to their end.

    word/EPOCH              how the epoch ended
    done/EPOCH              how many ranks have come to the end of it
    read/EPOCH              how many have read that all have, so that the last one clears away
    TOPIC/EPOCH/ROUND/RANK  what a rank has to say in the talk after an epoch
    left/EPOCH/RANK         why a rank says nothing more in that talk

All keys stand below ``oomdoctor/`` and the number of the job's restart. A job in which nothing happened leaves none.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from oomdoctor.ranks.presence import ASK_S, JobStore, Presence, RankLeft, SilentRank, named

_FOREVER: Final = timedelta(days=365)
_ANSWER_S: Final = 30.0
"""Time that the store gets to answer."""
_TALK_S: Final = 0.02
"""Time between two looks at the store while the ranks talk after an incident."""
_DISMISSED_S: Final = 1.0
"""Time in which the threads of other ranks hear that the store is about to go."""
_KEPT_S: Final = 0.002
_APART_S: Final = 5.0
"""Time in which a cell that was sent to all ranks has begun on each."""

GATHERING: Final = "report/now"
"""Key of the gathering of reports that is on; see ``gather``."""
_GONE: Final = "gone"
"""Key that is set when the process that keeps the store is about to end."""
_CLOSED: Final = "closed"
"""Counts the others whose threads wait for the bell no more."""


class WordKind(StrEnum):
    """How an epoch ended."""

    OUT_OF_MEMORY = "out_of_memory"
    UNFIT = "unfit"
    """The change could not be made on a rank, or its guard has stopped it there."""
    FAILED = "failed"
    LEFT = "left"
    """A rank has left its run with an error that the program may know how to handle."""
    DONE = "done"

    @property
    def releases(self) -> bool:
        """Whether the others are let out of their collectives."""
        return self not in (WordKind.LEFT, WordKind.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """How an epoch ended: ``rank`` has said so, and ``why``.

    Attributes:
        at_s: when that was, by the clock of the rank.
    """

    kind: WordKind
    rank: int
    why: str = ""
    at_s: float = 0.0


class Circle:
    """This rank among the ranks of its job.

    Args:
        host: of the job's store; ``port`` likewise.
        restart: how many times the launcher has started the job anew; ``name``: what all keys stand below, where
            other jobs may use the store.
        release: frees this rank from its collectives; called by the thread of the circle.

    Attributes:
        epoch: number of the run that is on, -1 before the first.
        presence: tells which ranks answer.
        kept: what has to live as long as the circle, as the server of the store; ``closed``: called at its end.
        keeper: rank in whose process the server is, None where it is the launcher's, which outlives all ranks.
        asks_who_is_in: whether other ranks may not run what this one runs, as cells that are sent to some engines.
        gathering: name of the gathering of reports that this rank had a part in last; see ``gather``.
        store_of: returns the part of the store for the job as it was started for the n-th time.
        released_s: when this rank was released in this epoch, by ``time.monotonic``; None where it was not.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        port: int,
        restart: int = 0,
        name: str = "",
        release: Callable[[], object] = lambda: None,
    ) -> None:
        import torch.distributed as distributed

        dist: Any = distributed
        self.rank, self.world, self.epoch = rank, world, -1
        self.restart, self._release, self._name = restart, release, name
        self._word: Word | None = None
        self._is_open, self._is_listening = False, True
        self.released_s: float | None = None
        self._news = threading.Condition()
        self._lost = ""
        self._own, self._lasting = list[str](), list[str]()
        self.asks_who_is_in = False
        self.gathering = ""
        self.kept: Any = None
        self.closed: Callable[[], object] = lambda: None
        self.keeper: int | None = None

        self._host, self._port = host, port
        terms: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
        terms["timeout"] = timedelta(seconds=_ANSWER_S)
        connections = [dist.TCPStore(host, port, None, **terms) for _ in range(2)]
        self.store_of: Callable[[int], Any] = lambda of: JobStore(
            dist.PrefixStore(f"{name}oomdoctor/{of}/", connections[0])
        )
        self._store = self.store_of(restart)
        self.presence = Presence(self._store, rank, world)
        self._bell: Any = dist.PrefixStore(f"{name}oomdoctor/{restart}/", connections[1])
        self._thread = threading.Thread(target=self._listen, name="oomdoctor-ranks", daemon=True)
        self._thread.start()

    def connection(self, prefix: str) -> Any:
        """Return a further connection to the store, with keys below ``prefix``, as groups wait on."""
        import torch.distributed as distributed

        dist: Any = distributed
        store = dist.TCPStore(self._host, self._port, None, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(f"{self._name}{prefix}", store)

    # The thread of the circle -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait for the bell, and answer: nothing else is done while the program runs."""
        own = f"bell/{self.rank}"
        while True:
            try:
                self._bell.wait([own], _FOREVER)
                self._bell.delete_key(own)
                if not self._is_listening:
                    return
                if self._bell.check([_GONE]):
                    self._lost = "the process that keeps the job's store has ended"
                    self._bell.add(_CLOSED, 1)
                    return
                self._bell.set(f"at/{self.rank}", str(self.epoch))
                self._bell.add(f"alive/{self.rank}", 1)
                self._look(self._bell)
            except Exception as error:  # noqa: BLE001 - border: the store is gone, or Python ends
                with self._news:
                    self._lost = f"this rank hears nothing from the job's store any more ({type(error).__name__})"
                    self._news.notify_all()
                return

    def _look(self, store: Any) -> None:
        """Take the word of this epoch where one was spoken, and let this rank out of its collectives."""
        with self._news:
            if not self._is_open or self._word is not None or not store.check([f"word/{self.epoch}"]):
                return
            told = json.loads(store.get(f"word/{self.epoch}"))
            self._word = Word(**{**told, "kind": WordKind(told["kind"])})
            releases = self._word.kind.releases
        if releases:
            self._release()
            self.released_s = time.monotonic()
        with self._news:
            self._news.notify_all()

    # One run ------------------------------------------------------------------------------------------------------

    def begin(self) -> Word | None:
        """Begin the next epoch; return the word of it where another rank has ended it already."""
        with self._news:
            self.epoch += 1
            self._word, self.released_s, self._is_open = None, None, True
        self._look(self._store)
        return self._word

    @property
    def word(self) -> Word | None:
        """How this epoch has ended, None as long as it has not."""
        return self._word

    def announce(self, kind: WordKind, why: str = "", at_s: float = 0.0) -> None:
        """Say how the epoch ends; another rank may have been the first to say."""
        if self._word is not None:
            return
        own = json.dumps(asdict(Word(kind=kind, rank=self.rank, why=why, at_s=at_s or time.time())))
        self._store.compare_set(f"word/{self.epoch}", "", own)
        self.presence.ring(range(self.world))

    def speak(self, kind: WordKind, why: str = "", at_s: float = 0.0) -> Word:
        """Say how the epoch ends, and return how it did.

        This rank is out of its collectives on return, and the others are on their way.
        """
        self.announce(kind, why, at_s)
        return self._ended(self.wait_for_word(_ANSWER_S))

    def wait_for_word(self, limit_s: float | None) -> Word:
        """Wait until the epoch has ended and this rank is released.

        Raises:
            SilentRank: it has not after ``limit_s``, or other ranks do not answer any more.
        """
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        others, peers = self.presence.pulse(), [rank for rank in range(self.world) if rank != self.rank]
        while True:
            with self._news:
                word = self._word
                if word is not None and (not word.kind.releases or self.released_s is not None):
                    return word
                if self._lost:
                    raise SilentRank(self._lost)
                if word is not None:
                    end = min(end, time.monotonic() + _ANSWER_S)
                # In pieces: a signal is heeded between them.
                self._news.wait(max(min(ASK_S, end - time.monotonic()), 0.0))
            if time.monotonic() >= end:
                is_stuck = self._word is not None
                what = "this rank could not be released" if is_stuck else "there was no answer from the store"
                raise SilentRank(f"{what} within {_ANSWER_S:.0f} s")
            if self._word is None and limit_s is None:
                others.feel(peers)
                missing = self.missing(_APART_S) if self.asks_who_is_in else []
                if missing and self._word is None:
                    raise SilentRank(f"{named(missing)} does not run what this rank runs, which has waited for it")

    def heard_within(self, seconds: float) -> Word | None:
        """Return the word that is spoken within a while, None where none is."""
        end = time.monotonic() + seconds
        with self._news:
            while self._word is None and (left := end - time.monotonic()) > 0 and not self._lost:
                self._news.wait(left)
        return None if self._word is None else self.wait_for_word(_ANSWER_S)

    def finish(self) -> Word:
        """Say that this rank has come to the end, and return how the epoch ends: no rank goes on before all have.

        Raises:
            SilentRank: other ranks do not answer any more, or the store does not.
        """
        if self._store.add(f"done/{self.epoch}", 1) == self.world:
            return self.speak(WordKind.DONE)
        return self._ended(self.wait_for_word(None))

    def _ended(self, word: Word) -> Word:
        """Delete what is read where all have come to the end.

        That is what this rank has said, and by the last one that has read it, the end.
        """
        if word.kind is WordKind.DONE and self._is_open:
            self._is_open = False
            for key in self._own:
                self._store.delete_key(key)
            self._own.clear()
            if self._store.add(f"read/{self.epoch}", 1) == self.world:
                for epoch in range(self.epoch + 1):
                    for key in ("word", "done", "read"):
                        self._store.delete_key(f"{key}/{epoch}")
                for rank in range(self.world):
                    self.presence.forget(rank)
            elif self.keeper == self.rank:
                self._wait_for_readers()
        return word

    def _wait_for_readers(self) -> None:
        """Wait until all have read that all have come to the end: this process may be about to end with the store."""
        end = time.monotonic() + ASK_S
        while self._store.check([f"read/{self.epoch}"]) and time.monotonic() < end:
            time.sleep(_KEPT_S)

    def withdraw(self) -> None:
        """Take it that this epoch was not begun: the others had no part in what this rank has run."""
        with self._news:
            self.epoch -= 1
            self._is_open = False

    def missing(self, limit_s: float) -> list[int]:
        """Return the ranks that do not come into this epoch within a while, or do not answer."""
        return self.presence.missing(self.epoch, limit_s)

    # The talk after a run -------------------------------------------------------------------------------------------

    def owns(self, key: str) -> None:
        """Note a key of this rank's, which is deleted when a later run has come to its end."""
        self._own.append(key)

    def say(self, topic: str, at: int, what: Any) -> None:
        """Say something in the talk that follows this epoch; ``at`` numbers the rounds of a topic."""
        key = f"{topic}/{self.epoch}/{at}/{self.rank}"
        self.owns(key)
        self._store.set(key, json.dumps(what))

    def hear(self, topic: str, at: int, ranks: Sequence[int], limit_s: float) -> list[Any]:
        """Return what each of some ranks has to say, in their order.

        Raises:
            RankLeft: one of them says nothing more.
            SilentRank: one of them has said nothing within ``limit_s``, or does not answer any more.
        """
        end = time.monotonic() + limit_s
        keys = {rank: f"{topic}/{self.epoch}/{at}/{rank}" for rank in ranks}
        others, asked = self.presence.pulse(), time.monotonic()
        while missing := [rank for rank, key in keys.items() if not self._store.check([key])]:
            for rank in missing:
                if self._store.check([left := f"left/{self.epoch}/{rank}"]):
                    raise RankLeft(f"rank {rank} goes on no more: {json.loads(self._store.get(left))}")
            now = time.monotonic()
            if now >= end:
                raise SilentRank(f"{named(missing)} had nothing to say within {limit_s:.0f} s")
            if now >= asked + ASK_S:
                others.feel(missing)
                asked = now
            # The store's own wait would print a warning for each one in vain.
            time.sleep(_TALK_S)
        return [json.loads(self._store.get(key)) for key in keys.values()]

    def publish(self, topic: str, what: Any) -> None:
        """Say something that the others may ask for as long as this rank is in the circle."""
        key = f"{topic}/{self.rank}"
        self._lasting.append(key)
        self._store.set(key, json.dumps(what))

    def published(self, topic: str) -> list[Any]:
        """Return what the other ranks have published; asked over a connection of its own, by any thread."""
        store = self.connection(f"oomdoctor/{self.restart}/")
        keys = [f"{topic}/{rank}" for rank in range(self.world) if rank != self.rank]
        return [json.loads(store.get(key)) for key in keys if store.check([key])]

    def leave_talk(self, why: str) -> None:
        """Tell whoever waits for what this rank has to say that there is nothing more to come."""
        key = f"left/{self.epoch}/{self.rank}"
        self.owns(key)
        self._store.set(key, json.dumps(why))

    def close(self) -> None:
        """Leave the circle: the thread ends, and what this rank has said is deleted."""
        if not self._is_listening:
            return
        self._is_listening = False
        with suppress(RuntimeError):  # the store is gone
            self.closed()
        with suppress(SilentRank):  # likewise
            for key in (*self._own, *self._lasting, *[GATHERING] * bool(self.gathering)):
                self._store.delete_key(key)
            self._store.set(f"bell/{self.rank}", "1")
            self._thread.join(ASK_S)
            self.presence.forget(self.rank)
            if self.keeper == self.rank:
                self._dismiss()
            elif self.keeper is not None:
                self._store.add(_CLOSED, 1)

    def _dismiss(self) -> None:
        """Have the threads of the other ranks wait for the bell no more, before the store is gone."""
        self._store.set(_GONE, "1")
        self.presence.ring([rank for rank in range(self.world) if rank != self.rank])
        end = time.monotonic() + _DISMISSED_S
        while self._store.add(_CLOSED, 0) < self.world - 1 and time.monotonic() < end:
            time.sleep(_KEPT_S)
