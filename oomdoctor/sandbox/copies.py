"""A forked copy of the process that works on its own and tells what comes of it by a pipe.

The process that it is a copy of does three things alone: it forks, it reads the pipe, and it ends the copy. A copy that
is made in another copy stays in the process group of that one, which is killed whole if anything goes wrong here, and
when nobody listens any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from oomdoctor.sandbox import fork, process_groups, restrictions

_HEED_S: Final = 0.5
"""Time of a single wait: an interrupt that comes just before one begins is heeded at its end."""
_LONGEST_REASON: Final = 300
_HIGH: Final = 200
"""The least file descriptor of a pipe; macOS gives a process 256 by default."""


class Copy:
    """One forked copy, as the process sees it that made it: something to read from, to wait for and to end.

    Args:
        work: called in the copy; what it yields is told. The copy changes no file and reaches nobody.
        limit_s: time for all of it.

    Attributes:
        over: whether there is nothing more to come.
        finished: whether all of the work was done.
        failed: why it was not, None where that is not known: it was ended here, or its time was up.
        is_late: whether its time was up.
    """

    def __init__(self, work: Callable[[], Iterable[Any]], *, limit_s: float) -> None:
        self.over = self.finished = self.is_late = False
        self.failed: str | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._end = time.monotonic() + limit_s
        is_first = not fork.is_copy()
        if is_first and (why := unsafe()) is not None:
            self.over, self.failed = True, why
            return
        self._reader, writer = _pipe()
        try:
            pid = fork.forked(keep={writer.fileno()}, prepare=restrictions.raise_limits if is_first else None)
        except BaseException as error:
            self._reader.close()
            writer.close()
            if not isinstance(error, OSError):
                raise
            # The system promises no copy of a process of this size.
            self.over, self.failed = True, f"this process cannot be forked: {error.strerror}"
            return
        if pid == 0:
            _run(work, writer, limit_s, is_first=is_first)
        writer.close()
        if is_first:
            with contextlib.suppress(OSError):  # it has done so itself, or has ended
                os.setpgid(pid, pid)
        self._bury = weakref.finalize(self, _bury, self._reader, pid, os.getpid(), is_first)

    def fileno(self) -> int:
        """Return the descriptor that can be read from when there is something to ``poll``."""
        return self._reader.fileno()

    @property
    def left_s(self) -> float:
        """Time after which this will be over, whatever the copy does."""
        return max(self._end - time.monotonic(), 0.0)

    def poll(self) -> list[Any]:
        """Return what has come since, without waiting."""
        has_ended, messages = False, []
        while not self.over and not has_ended and self._reader.poll():
            try:
                message = pickle.loads(self._reader.recv_bytes())
            except (EOFError, OSError):  # also in the midst of a message
                has_ended = True
                break
            if isinstance(message, _End):
                self.finished, self.failed, has_ended = message.why is None, message.why, True
            else:
                messages.append(message)
        if not self.over and (has_ended or not self.left_s):
            self.is_late = not has_ended
            status = self.end()
            if has_ended and not self.finished and status is not None:
                self.failed = self.failed or _end_by(status)
        return messages

    def wait(self) -> Iterator[Any]:
        """Yield what comes as it comes, until it is over; the copy is ended when nobody listens any more."""
        try:
            while not self.over:
                wait_for([self], self.left_s)
                yield from self.poll()
        finally:
            self.end()

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
            self.end()

    def end(self) -> int | None:
        """End the copy with those that it has made; return the status that it ended with, where this call took it.

        What has not been taken by ``poll`` is lost.
        """
        if self.over:
            return None
        self.over = True
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        return self._bury()


def unsafe() -> str | None:
    """Return why this process must have no copies that are ended, None where it may.

    Source: ``segfault_sigaction`` in python/jittor/src/utils/log.cc ends the process when a child of it was killed.
    """
    return "Jittor ends a process when a copy of it is ended" if "jittor" in sys.modules else None


class _End:
    """Told last: that the work is done, or why it is not."""

    def __init__(self, why: str | None) -> None:
        self.why = why


def wait_for(copies: Iterable[Copy], limit_s: float) -> None:
    """Wait until there is something to poll from one of some copies, or for a while."""
    waiting = select.poll()
    for copy in copies:
        waiting.register(copy, select.POLLIN)
    waiting.poll(min(limit_s, _HEED_S) * 1000)


def answered(do: Callable[[], str], *, limit_s: float) -> tuple[str | None, str]:
    """Return what ``do`` returns in a copy; None where there is no answer, and why."""

    def work() -> Iterator[str]:
        gc.disable()  # garbage of the origin is not finalised twice
        faulthandler.disable()
        logging.disable()  # handlers hold the streams of before, which in a notebook reach the front end from here
        yield do()

    copy = Copy(work, limit_s=limit_s)
    for text in copy.wait():
        return text, ""
    return None, f"it did not end within {limit_s:.0f} s" if copy.is_late else copy.failed or "it was ended"


def one_sentence(error: BaseException) -> str:
    """Return the type of ``error`` and the first line of its message, without running more of the user's code."""
    try:
        message = str(error).strip()
    except Exception:  # noqa: BLE001  an exception of the user's whose __str__ fails still has a type
        message = ""
    text = type(error).__name__ + (f": {message.splitlines()[0]}" if message else "")
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def _pipe() -> tuple[Connection, Connection]:
    """Return a pipe's ends, with high file descriptors: what a program opens is given the lowest that is free.

    So it is given the same one in copies that live at the same time.
    """
    reader, writer = map(_moved_up, os.pipe())
    return Connection(reader, writable=False), Connection(writer, readable=False)


def _moved_up(descriptor: int) -> int:
    import fcntl  # which Windows has not

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # fewer are allowed: it stays where it is
        return descriptor
    os.close(descriptor)
    return high


def _run(work: Callable[[], Iterable[Any]], writer: Connection, limit_s: float, *, is_first: bool) -> NoReturn:
    """Do the work and tell what comes of it, in the copy, which ends here: no handler of the user's runs twice."""
    try:
        if is_first:
            os.setpgid(0, 0)
            restrictions.wall_off()
            process_groups.imitate()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit_s) + 1)  # also where the origin is gone
        for message in work():
            writer.send_bytes(pickle.dumps(message))
        writer.send_bytes(pickle.dumps(_End(None)))
    except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
        writer.send_bytes(pickle.dumps(_End(f"the dry run failed with {one_sentence(error)}")))
    finally:
        os._exit(0)


def _bury(reader: Connection, pid: int, owner: int, is_first: bool) -> int | None:
    """End a copy with its own, and take its status, so that no zombie is left; it keeps the one it had ended with."""
    if os.getpid() != owner:
        return None  # a copy of the process that forked it
    reader.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if is_first else os.kill)(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # someone ignores SIGCHLD: the system has buried it
        return os.waitpid(pid, 0)[1]
    return None


def _end_by(status: int) -> str:
    """Return what became of a copy that ended by itself without a word."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        ended = f"the cell ends its process, with status {code}"
        return ended if code else "the dry run ended without an answer"
    name = signal.Signals(os.WTERMSIG(status)).name
    hint = ", perhaps on writing to memory that is shared with other processes" if name == "SIGSEGV" else ""
    return f"the dry run was ended by {name}{hint}"
