"""A change that is written down for the restart of a job, where no rank can be taken back.

A rank that was killed, or that does not come out of its collective, ends the job. Where the launcher starts it anew
(``torchrun --max-restarts``), the ranks of the new job find the changed program in the store that has outlived them.

Limits: a change of the script alone, and a store that the launcher's agent keeps, as torchrun's does.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomdoctor.ranks.circle import Circle


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDown:
    """The change that a restarted job begins with.

    Attributes:
        program: digest of the text that it is a change of; ``source``: the changed text.
        label: the fix in its dose.
        rank: that has written it down.
    """

    program: str
    source: str
    label: str
    rank: int


class Terminated(BaseException):
    """The launcher ends this process, while the ranks talk."""


def restarts() -> int:
    """Return how many times the launcher has started the job anew. Source: torchrun tells its processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarts_left() -> int:
    """Return how many times the launcher starts the job anew. Source: torchrun tells its processes."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restarts()


def write_down(circle: Circle, change: WrittenDown) -> None:
    """Write a change down for the next restart."""
    circle.store_of(circle.restart + 1).set("decision", json.dumps(asdict(change)))


def read(circle: Circle, program: str) -> WrittenDown | None:
    """Return what was written down for this restart of a program, None where nothing was; the last rank deletes it."""
    store: Any = circle.store_of(circle.restart)
    if not circle.restart or not store.check(["decision"]):
        return None
    change = WrittenDown(**json.loads(store.get("decision")))
    if store.add("decided", 1) == circle.world:
        store.delete_key("decision")
        store.delete_key("decided")
    return change if change.program == program else None


@contextmanager
def end_as_an_error() -> Iterator[None]:
    """Have the launcher's request to end raise ``Terminated`` in the main thread while the body runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
