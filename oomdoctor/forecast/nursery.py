"""The forked copy of this process in which shadows are raised, and what the user's process has to do with it.

The user's process does three things alone: it forks, it reads a pipe, and it buries. All else happens in the nursery,
which brings back the start of the cell (see ``child``), forks a shadow for each attempt, watches the time, decides
what to try next and says what came of it. The nursery and its shadows are one process group, which is killed whole if
anything goes wrong here, and when nobody listens any more.

Limits: where there is no ``fork`` (Windows), or none that is safe (macOS where PyTorch has Metal, whose threads and
connections do not survive one), there are no shadow runs. Tensors lie in host memory, which is also where those of the
virtual accelerator live, or on a device that is emulated (see ``devices``).
Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods, on macOS.
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
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor.forecast.reading import one_sentence
from oomdoctor.forecast.shadow import Shadows, written
from oomdoctor.sandbox import reserve, walls
from oomdoctor.sandbox.fork import forked

if TYPE_CHECKING:
    from oomdoctor.model.session import Session
    from oomdoctor.sandbox.card import Card

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
    if not hasattr(os, "fork"):
        return "forecasts need fork(), which this system has not"
    torch: Any = sys.modules.get("torch")
    if sys.platform == "darwin" and torch is not None and torch.backends.mps.is_available():
        return "forecasts need fork(), which is not safe on macOS beside Metal"
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
    ) -> None:
        self.over, self.finished, self._received = False, False, b""
        self.failed: str | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._bury: Callable[[], int | None] = _nobody
        loads = "oomdoctor.forecast.child" not in sys.modules
        if loads and waits and not reserve.is_limited():  # what is loaded here stays
            from oomdoctor.forecast import child

            child.warm_up()
            loads = False
        shadows = Shadows(
            *(session, prepare),
            budget=budget,
            cached=session.accelerator.read().simulated,
            timeout_s=timeout_s,
            workers=workers or min(processors(), _MOST_WORKERS),
            card=card or _card_in_use(),
        )
        self._end = time.monotonic() + timeout_s + _GRACE_S + (_LOADING_S if loads else 0.0)
        self._reader, writer = os.pipe()
        try:
            pid = forked(keep={writer}, prepare=walls.raise_limits)
        except OSError as error:  # the system promises no copy of a process of this size
            os.close(self._reader)
            os.close(writer)
            self.over, self.failed = True, f"this process cannot be forked: {error.strerror}"
            return
        if pid == 0:
            _live(work, shadows, writer)
        os.close(writer)
        os.set_blocking(self._reader, False)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
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
                chunk = os.read(self._reader, _CHUNK)
            except BlockingIOError:
                break
            ended = not chunk
            self._received += chunk
        messages = []
        for message in self._whole():
            if isinstance(message, _End):
                self.finished, self.failed = message.why is None, message.why
            else:
                messages.append(message)
        if ended or not self.left_s:
            self._close()
        return messages

    def _close(self) -> None:
        """End this nursery, and say so where it has crashed."""
        status = self.cancel()
        if status is not None and self.failed is None and _is_crash(status):
            self.failed = f"the shadow process was ended by {signal.Signals(os.WTERMSIG(status)).name}"

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
            The status that it ended with, where it was this call that took it.
        """
        self.over = True
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
    """Said last: that the work is done, or why it is not."""

    def __init__(self, why: str | None) -> None:
        self.why = why


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


def _live(work: Work, shadows: Shadows, writer: int) -> None:
    """Do the work and say what comes of it; never returns."""
    try:
        os.setpgid(0, 0)
        walls.wall_off()
        for message in work(shadows):
            _say(writer, message)
        _say(writer, _End(None))
    except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
        _say(writer, _End(f"the shadow process failed with {one_sentence(error)}"))
    finally:
        os._exit(0)


def _say(writer: int, message: Any) -> None:
    """Send a message to whoever polls."""
    body = pickle.dumps(message)
    written(writer, _LENGTH.pack(len(body)) + body)
