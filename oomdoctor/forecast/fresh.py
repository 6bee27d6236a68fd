"""A process started anew for shadow runs, where this one cannot be forked, or not without danger.

It is sent the program through a pipe (see ``fresh_parcel``), makes it again (``fresh_child``), and answers as a forked
copy does. It is a plain subprocess of this interpreter, which imports nothing of the user's script by itself. One
thread of this process feeds it and hands its answers on, so that nobody is kept waiting and the answers come by a
socket, which any system can wait for.

When: there is no ``fork`` (Windows); a forked copy has crashed before in this process; on macOS, where PyTorch has
Metal, whose threads and connections do not survive a fork, if the start of the cell need not be brought back.
Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods, on macOS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.layout import is_retry

if TYPE_CHECKING:
    from oomdoctor.model.session import Session
    from oomdoctor.sandbox.card import Card

__all__ = ["Begun", "begin", "distrust_fork", "is_needed", "started", "unsupported"]

_CHUNK: Final = 1 << 16
_JOIN_S: Final = 2.0
"""Time in which the thread is to see that the process is gone."""
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from oomdoctor.forecast.fresh_child import main; main()"
)

_is_distrusted = False


def is_needed(prepare: Callable[[], None] | None = None) -> bool:
    """Return whether shadow runs of this process take a fresh one.

    Args:
        prepare: what brings the start of the cell back, as far as that is known.
    """
    if not hasattr(os, "fork") or _is_distrusted:
        return True
    return _has_metal() and prepare is not None and not is_retry(prepare) and unsupported() is None


def distrust_fork() -> None:
    """Have all later shadow runs of this process take a fresh one: a forked copy has crashed."""
    global _is_distrusted
    _is_distrusted = True


def _has_metal() -> bool:
    torch: Any = sys.modules.get("torch")
    return sys.platform == "darwin" and torch is not None and bool(torch.backends.mps.is_available())


def unsupported() -> str | None:
    """Return why no fresh process can be started, None if one can."""
    if not sys.executable:
        return "a shadow run needs fork() or the path of the Python interpreter, and this process has neither"
    if importlib.util.find_spec("cloudpickle") is None:
        return "a shadow run without fork() needs cloudpickle, which is not installed"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A fresh process, as the user's process has it.

    Attributes:
        reader: can be waited for; ``receive`` returns what has come, nothing at the end; it does not block.
        end: ends the process; may be called once.
    """

    reader: socket.socket
    receive: Callable[[], bytes]
    end: Callable[[], None]


def begin(
    session: Session,
    prepare: Callable[[], None],
    work: Any,
    *,
    texts: Sequence[str],
    budget: int | None,
    cached: bool,
    timeout_s: float,
    workers: int,
    card: Card | None,
) -> Begun:
    """Start a fresh process and send it the program.

    Raises:
        ForecastError: something that the cell reaches cannot be sent.
    """
    from oomdoctor.forecast.fresh_parcel import packed

    parcel = packed(
        *(session, prepare, work),
        texts=texts,
        budget=budget,
        cached=cached,
        timeout_s=timeout_s,
        workers=workers,
        card=card,
    )
    return started(pickle.dumps(parcel))


def started(parcel: bytes) -> Begun:
    """Start a fresh process that is sent ``parcel``.

    Raises:
        ForecastError: it cannot be started.
    """
    command = [sys.executable, "-B", "-c", _START, json.dumps(sys.path)]
    kinds: dict[str, Any] = {"process_group": 0}
    if sys.platform == "win32":
        kinds = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **kinds
        )
    except OSError as error:
        raise ForecastError(f"a fresh process could not be started: {error}") from error
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    feeder = threading.Thread(target=_feed, args=(process, parcel, writer), name="oomdoctor-fresh", daemon=True)
    feeder.start()
    owner = os.getpid()

    def end() -> None:
        if os.getpid() != owner:
            return  # a copy of the process that started it
        reader.close()
        _kill(process)
        feeder.join(_JOIN_S)

    return Begun(reader=reader, receive=lambda: reader.recv(_CHUNK), end=end)


def _feed(process: subprocess.Popen[bytes], parcel: bytes, writer: socket.socket) -> None:
    """Send the parcel and hand on what is answered, until either side is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    sink, answers = process.stdin, process.stdout
    with writer, answers, contextlib.suppress(OSError), sink:  # which stays open: the process ends when that is closed
        sink.write(parcel)
        sink.flush()
        while chunk := os.read(answers.fileno(), _CHUNK):
            writer.sendall(chunk)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, 9)
        process.kill()
    process.wait()
