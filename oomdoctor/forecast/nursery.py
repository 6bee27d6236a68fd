"""The forked copy of this process in which shadows are raised, and what the user's process has to do with it.

The user's process does three things alone: it forks, it reads a pipe, and it buries. All else happens in the nursery,
which brings back the start of the cell (see ``child``), forks a shadow for each attempt, watches the time, decides
what to try next and says what came of it. The nursery and its shadows are one process group, which is killed whole if
anything goes wrong here, and when nobody listens any more.

Where there is no fork, or none that is safe, the nursery is a process that is started anew (see ``fresh``). So it is
where a forked copy crashes before it has said anything.

Limits: tensors lie in host memory, which is also where those of the virtual accelerator live, or on a device
that is emulated (see ``devices``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import struct
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import fresh
from oomdoctor.forecast.reading import one_sentence
from oomdoctor.forecast.shadow import Crashed, Shadows, written
from oomdoctor.sandbox import reserve, walls
from oomdoctor.sandbox.fork import forked

if TYPE_CHECKING:
    from oomdoctor.model.session import Session
    from oomdoctor.sandbox.card import Card

__all__ = ["Nursery", "fail", "live", "processors", "say", "unsupported"]

_GRACE_S: Final = 1.0
"""Time beyond the limit in which the nursery may still report before it is killed."""
_LOADING_S: Final = 20.0
"""Time beyond the limit where the nursery has to load modules first."""
_MOST_WORKERS: Final = 4
_CHUNK: Final = 1 << 16

_LENGTH: Final = struct.Struct("!I")

Work: TypeAlias = "Callable[[Shadows], Iterator[Any]]"
"""What is done in the nursery: begins shadows, takes their readings, and yields what is told to the user's process."""


def processors() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unsupported() -> str | None:
    """Return why there can be no shadow run in this process, None if there can."""
    if fresh.is_needed() and (why := fresh.unsupported()) is not None:
        return why
    try:
        _card_in_use()
    except Exception as error:  # noqa: BLE001  whatever the device answers with, it is not forecast then
        return f"CUDA is in use in this process and does not answer: {one_sentence(error)}"
    return None


def _card_in_use() -> Card | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    from oomdoctor.sandbox.card import in_use

    return in_use()


class Nursery:
    """One forked copy, as the user's process sees it: something that can be read from, waited for and ended.

    Args:
        session: the user's program.
        prepare: restores the start of the cell; called in the forked process, with real tensors, outside of any mode.
        work: what the nursery does; see ``Work``.
        budget: bytes that there are.
        timeout_s: time for all of it.
        workers: how many shadows run at once; None for one per processor, at most four.
        card: the device to run on as if it were here; None for the memory of this machine, and for one that a cell
            asks for in vain.
        texts: what is going to be run, as far as it is known; the failing cell by default.
        waits: whether the caller waits for the end. Then what shadows need is loaded here once, and not in each
            nursery anew; a caller that goes on is not kept waiting for that.

    Attributes:
        over: whether there is nothing more to come.
        finished: whether all of the work was done.
        failed: why it could not be, None where that is not known.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[], None],
        work: Work,
        *,
        budget: int | None,
        timeout_s: float,
        workers: int | None = None,
        waits: bool = True,
        card: Card | None = None,
        texts: Sequence[str] = (),
    ) -> None:
        self.over, self.finished, self._received = False, False, b""
        self.failed: str | None = None
        self._is_crash = False
        self._stop_listening: Callable[[], None] | None = None
        cached, card = session.accelerator.read().simulated, card or _card_in_use()
        terms: dict[str, Any] = {
            "budget": budget,
            "cached": cached,
            "timeout_s": timeout_s,
            "workers": workers or min(processors(), _MOST_WORKERS),
            "card": card,
        }
        sources = tuple(texts) or (session.cells.failing.source,)
        # Not bound to this object: a cycle would keep it, and its process, for the garbage collector.
        self._again: Callable[[Nursery], None] | None = lambda nursery: nursery._begin_fresh(
            session, prepare, work, texts=sources, **terms
        )
        if fresh.is_needed(prepare):
            self._again(self)
        else:
            self._begin_forked(session, prepare, work, waits=waits, **terms)

    def _begin_fresh(self, session: Session, prepare: Callable[[], None], work: Work, **terms: Any) -> None:
        self._again, self._is_crash = None, False
        self._end: float = time.monotonic() + terms["timeout_s"] + _GRACE_S + _LOADING_S
        try:
            begun = fresh.begin(session, prepare, work, **terms)
        except ForecastError as error:
            self.over, self.failed = True, "; ".join(filter(None, [self.failed, str(error)]))
            self._bury: Callable[[], int | None] = _nobody
            return
        self.failed, self._reader, self._receive = None, begun.reader.fileno(), begun.receive
        self._bury = weakref.finalize(self, begun.end)

    def _begin_forked(
        self,
        session: Session,
        prepare: Callable[[], None],
        work: Work,
        *,
        waits: bool,
        **terms: Any,
    ) -> None:
        loads = "oomdoctor.forecast.child" not in sys.modules
        if loads and waits and not reserve.is_limited():  # what is loaded here stays
            from oomdoctor.forecast import child

            child.warm_up()
            loads = False
        self._end = time.monotonic() + terms["timeout_s"] + _GRACE_S + (_LOADING_S if loads else 0.0)
        self._reader, writer = os.pipe()
        try:
            pid = forked(keep={writer}, prepare=walls.raise_limits)
        except OSError as error:  # the system promises no copy of a process of this size
            os.close(self._reader)
            os.close(writer)
            self.failed = f"this process cannot be forked: {error.strerror}"
            assert self._again is not None
            self._again(self)
            return
        if pid == 0:
            live(work, Shadows(session, prepare, is_doubted=True, **terms), writer)
        os.close(writer)
        os.set_blocking(self._reader, False)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        self._receive = partial(os.read, self._reader, _CHUNK)
        self._bury = weakref.finalize(self, _bury, self._reader, pid, os.getpid())

    def fileno(self) -> int:
        """Return the descriptor that can be read from when there is something to ``poll``."""
        return self._reader

    @property
    def left_s(self) -> float:
        """Time after which this will be over, whatever the nursery does."""
        return max(self._end - time.monotonic(), 0.0)

    def poll(self) -> list[Any]:
        """Return what has come since, without waiting."""
        ended = self.over
        while not ended:
            try:
                chunk = self._receive()
            except BlockingIOError:
                break
            ended = not chunk
            self._received += chunk
        messages = []
        for message in self._whole():
            if isinstance(message, _End):
                self.finished, self.failed = message.why is None, message.why
                self._is_crash = message.is_crash
            else:
                messages.append(message)
        if messages:
            self._again = None
        if ended or not self.left_s:
            self._close()
        return messages

    def _close(self) -> None:
        """End this nursery; where it was forked and has crashed, begin a fresh one in its place."""
        again = self._again
        is_over = self.over or self.finished or not self.left_s
        status = self.cancel()
        if status is not None and self.failed is None and _is_crash(status):
            self.failed = f"the shadow process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
            self._is_crash = True
            fresh.distrust_fork()
        if self._is_crash and again is not None and not is_over and fresh.unsupported() is None:
            self.over, self._received = False, b""
            again(self)

    def wait(self) -> Iterator[Any]:
        """Yield what comes as it comes, until it is over; the nursery is ended when nobody listens any more."""
        try:
            while not self.over:
                select.select([self], [], [], self.left_s)
                yield from self.poll()
        finally:
            self.cancel()

    async def listen(self) -> AsyncIterator[Any]:
        """Yield what comes as it comes, while other things run on the loop."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            loop.remove_reader(self._reader)
            arrived.set()

        try:
            while not self.over:
                if self._stop_listening is None:
                    loop.add_reader(self._reader, arrived.set)
                    self._stop_listening = stop
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), self.left_s)
                arrived.clear()
                for message in self.poll():
                    yield message
        finally:
            self.cancel()

    def cancel(self) -> int | None:
        """End the nursery with its shadows; what has not been taken by ``poll`` is lost.

        Returns:
            The status that a forked one ended with, where it was this call that took it.
        """
        self.over, self._again = True, None
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        return self._bury()

    def _whole(self) -> Iterator[Any]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if len(self._received) < _LENGTH.size + length:
                return
            body = self._received[_LENGTH.size : _LENGTH.size + length]
            self._received = self._received[_LENGTH.size + length :]
            yield pickle.loads(body)


class _End:
    """Said last: that the work is done, or why it is not; and whether that is because the first shadow crashed."""

    def __init__(self, why: str | None, *, is_crash: bool = False) -> None:
        self.why, self.is_crash = why, is_crash


def _nobody() -> None:
    """Bury nobody."""


def _is_crash(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL


def _bury(reader: int, pid: int, owner: int) -> int | None:
    """End the nursery with its shadows and take its status, so that no zombie is left."""
    if os.getpid() != owner:
        return None  # a copy of the process that forked it
    os.close(reader)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # someone ignores SIGCHLD: the system has buried it
        return os.waitpid(pid, 0)[1]
    return None


def live(work: Callable[[Any], Iterator[Any]], shadows: Any, writer: int) -> None:
    """Do the work and say what comes of it; never returns."""
    try:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        walls.wall_off()
        for message in work(shadows):
            say(writer, message)
        say(writer, _End(None))
    except Crashed as crash:
        say(writer, _End(str(crash), is_crash=True))
    except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
        fail(writer, f"the shadow process failed with {one_sentence(error)}")
    finally:
        os._exit(0)


def fail(writer: int, why: str) -> None:
    """Say why there is nothing to come."""
    say(writer, _End(why))


def say(writer: int, message: Any) -> None:
    """Send a message to whoever polls."""
    body = pickle.dumps(message)
    written(writer, _LENGTH.pack(len(body)) + body)
