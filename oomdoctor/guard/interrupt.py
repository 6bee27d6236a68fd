"""Raises ``HostMemoryPressure`` in what fills memory: what was mapped before and is touched now asks for nothing.

It is raised in the threads of the user's that touch memory while it is nearly full; where none does, because a worker
or another process fills it, in what the main thread runs. A thread sends the main thread a real-time signal that nobody
uses; its handler raises at the line that is running. A signal also ends what waits in the system, such as ``sleep`` and
the wait for a worker. Where there are no such signals, and in other threads, the interpreter is asked to raise at their
next bytecode.

It is never raised where it would break what is not the user's: in threads and callbacks without code of theirs, in
oomdoctor's own code, in the import of a module, in a finalizer, where Python would only print it, and in a message that
is being sent. The thread asks again then.

Limits: an operation in C that runs on is interrupted when it returns. Only Linux tells which threads touch memory.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.guard.gauge import Reading
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.named import is_users_file

_PACKAGE: Final = str(Path(__file__).parents[1])
_IN_THE_PROGRAM: Final = tuple(str(Path(_PACKAGE, room)) for room in ("allocator", "fixes"))
"""Rooms whose code stands between the lines of a healed cell: it is a part of the program."""
_SENDS: Final = ("/zmq/", "/ipykernel/", "/jupyter_client/", "\\zmq\\", "\\ipykernel\\", "\\jupyter_client\\")
_IMPORTS: Final = "<frozen importlib"
_RUNS_USERS: Final = {"run_code": "interactiveshell.py", "trigger": "events.py"}
"""Functions of IPython that run code of a cell, and callbacks around it, and show what these raise."""
_FAIR_SHARE: Final = 8
"""One that touches less than this part of what another does is not what fills memory."""
_TOUCHES_S: Final = 0.005
"""Time in which a thread that fills memory touches some."""
_FAULTS: Final = 7
"""Place of the page faults of a thread behind its name in ``stat``. Source: proc_pid_stat(5), ``minflt``."""
_spent: Final[Generator[None, None, None]] = (None for _ in ())
next(_spent, None)


class Interrupt:
    """The way into the threads that run the user's code.

    Attributes:
        signal: the number of the signal that was free, None where there is none.

    Args:
        globals_: the namespace that cells run in, by which code of theirs is known.
    """

    def __init__(self, globals_: dict[str, Any]) -> None:
        self.signal: int | None = None
        self._globals, self._handler = globals_, self._handle()
        self._pending: HostMemoryPressure | None = None
        self._told: set[int | None] = set()
        self._faults: dict[int | None, int] = {}
        self.raised = 0

    def install(self) -> None:
        """Take a signal; it is the main thread that may."""
        if threading.current_thread() is not threading.main_thread():
            return
        number = _free_signal()
        if number is not None:
            signal.signal(number, self._handler)
            self.signal = number

    def remove(self) -> None:
        """Give the signal back."""
        self._pending = None
        if self.signal is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self.signal) == self._handler:
                signal.signal(self.signal, signal.SIG_DFL)
            self.signal = None

    def own_signal(self) -> int | None:
        """Return the signal, None where there is none or the user has set a handler of their own for it."""
        return self.signal if self.signal is not None and signal.getsignal(self.signal) == self._handler else None

    def begin_anew(self) -> None:
        """Raise nothing of what was asked for so far, and again in what has raised."""
        self._pending = None
        for ident in self._told - {threading.main_thread().ident}:  # one that waits has not raised yet
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), None)
        self._told.clear()
        self._faults.clear()

    def send(self, reading: Reading) -> None:
        """Have the threads raise that fill memory, or else the main thread, each once; from another thread."""
        main = threading.main_thread()
        frames = sys._current_frames()
        found = [one for one in threading.enumerate() if one.ident not in self._told and self._may_raise(one, frames)]
        chosen = [] if found == [main] else self._touching(found)
        if not chosen and main in found and not self._told:
            chosen = [main]
        for thread in chosen:
            if thread is main and (number := self.own_signal()) is not None:
                self._pending = self._pending or _pressure(reading)
                signal.pthread_kill(main.ident or 0, number)
            elif self._may_raise(thread, sys._current_frames()):  # nothing runs between this look and the request
                self.raised += 1
                self._told.add(thread.ident)
                kind = ctypes.py_object(_kind(_pressure(reading)))
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), kind)

    def _touching(self, threads: list[threading.Thread]) -> list[threading.Thread]:
        """Return the threads that touch most of the memory that was not touched before, each a fair share of it."""
        if not self._faults and threads:
            self._faults = {one.native_id: _faults_of(one.native_id) for one in threads}
            time.sleep(_TOUCHES_S)
        before, self._faults = self._faults, {one.native_id: _faults_of(one.native_id) for one in threads}
        touched = {one: self._faults[one.native_id] - before.get(one.native_id, 0) for one in threads}
        least = max(touched.values(), default=0) / _FAIR_SHARE
        return [one for one, faults in touched.items() if faults > 0 and faults >= least]

    def _may_raise(self, thread: threading.Thread, frames: dict[int, FrameType]) -> bool:
        return (frame := frames.get(thread.ident or 0)) is not None and may_raise(frame, self._globals)

    def _handle(self) -> Any:
        """Return the handler: a function of C, so that the user's traceback ends in a frame of theirs.

        It calls ``all`` with what is made of its second argument, the frame: nothing, or what raises as it is read, as
        a generator does that has come to its end.
        """
        handler: Any = ctypes.PyDLL(None).PyObject_CallOneArg if hasattr(signal, "SIGRTMIN") else None
        if handler is not None:
            handler.restype = ctypes.py_object
            handler.argtypes = (
                SimpleNamespace(from_param=lambda _number: ctypes.py_object(all)),
                SimpleNamespace(from_param=lambda frame: ctypes.py_object(map(_spent.throw, self._due_in(frame)))),
            )
        return handler

    def _due_in(self, frame: FrameType | None) -> tuple[HostMemoryPressure, ...]:
        """Return what is to be raised in a frame of the main thread, nothing where nothing is or may be."""
        if self._pending is None or frame is None or not may_raise(frame, self._globals):
            return ()
        pending, self._pending = self._pending, None
        self.raised += 1
        self._told.add(threading.main_thread().ident)
        return (pending,)


def _pressure(reading: Reading) -> HostMemoryPressure:
    told = f"{format_size(reading.used)} of {format_size(reading.limit)} are in use"
    error = HostMemoryPressure(f"host memory is about to run out: {told}, by {reading.name}")
    error.used, error.limit, error.limit_name = reading.used, reading.limit, reading.name
    return error


def _kind(error: HostMemoryPressure) -> type[HostMemoryPressure]:
    """Return a class that makes errors like this one: the interpreter takes no more than a class."""
    told: dict[str, Any] = {**vars(error), "__module__": HostMemoryPressure.__module__}
    told["__init__"] = lambda self, *_: HostMemoryPressure.__init__(self, *error.args)
    return type("HostMemoryPressure", (HostMemoryPressure,), told)


def _faults_of(native_id: int | None) -> int:
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[_FAULTS])


def may_raise(frame: FrameType, globals_: dict[str, Any]) -> bool:
    """Return whether an error raised in ``frame`` is the user's: code of theirs runs it, and nothing of ours."""
    at: FrameType | None = frame
    is_users = False
    while at is not None:
        code = at.f_code
        if code.co_filename.endswith(_RUNS_USERS.get(code.co_name, "\0")):
            return at is not frame
        file = code.co_filename
        if _is_apart(file, code.co_name) or (not is_users and any(part in file for part in _SENDS)):
            return False
        is_users = is_users or at.f_globals is globals_ or (is_users_file(file) and not file.startswith("<"))
        at = at.f_back
    return is_users


def _is_apart(filename: str, name: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_IN_THE_PROGRAM)
    return name == "__del__" or filename.startswith(_IMPORTS)


def _free_signal() -> int | None:
    """Return a real-time signal that has no handler, the last there is: others count from the first."""
    if not hasattr(signal, "SIGRTMIN") or not hasattr(signal, "pthread_kill"):
        return None
    for number in range(int(signal.SIGRTMAX) - 1, int(signal.SIGRTMIN), -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return None
