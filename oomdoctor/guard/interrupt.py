"""Raises ``HostMemoryPressure`` in the cell that runs: what was mapped before and is touched now asks for nothing.

A thread sends the main thread a real-time signal that nobody uses; its handler raises at the line that is running. A
signal also ends what waits in the system, such as ``sleep`` and the wait for a worker. Where there are no such signals,
the interpreter is asked to raise in the main thread, at its next bytecode.

It is never raised where it would break what is not the cell's: in oomdoctor's own code, in the import of a module, in a
finalizer, where Python would only print it, and in a message that is being sent. The thread asks again then.

Limits: an operation in C that runs on is interrupted when it returns. Cells that run in other threads are not.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.guard.gauge import Reading
from oomdoctor.model.sizes import format_size

_PACKAGE: Final = str(Path(__file__).parents[1])
_IN_THE_PROGRAM: Final = tuple(str(Path(_PACKAGE, room)) for room in ("allocator", "fixes"))
"""Rooms whose code stands between the lines of a healed cell: it is a part of the program."""
_SENDS: Final = ("/zmq/", "/ipykernel/", "/jupyter_client/", "\\zmq\\", "\\ipykernel\\", "\\jupyter_client\\")
_IMPORTS: Final = "<frozen importlib"
_RUNS_CODE: Final = "run_code"
_SHELL: Final = ("interactiveshell.py",)


class Interrupt:
    """The way into the main thread.

    Attributes:
        signal: the number of the signal that was free, None where there is none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._pending: HostMemoryPressure | None = None
        self.raised = 0

    def install(self) -> None:
        """Take a signal; it is the main thread that may."""
        if threading.current_thread() is not threading.main_thread():
            return
        number = _free_signal()
        if number is not None:
            signal.signal(number, self._handle)
            self.signal = number

    def remove(self) -> None:
        """Give the signal back."""
        self._pending = None
        if self.signal is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self.signal) == self._handle:
                signal.signal(self.signal, signal.SIG_DFL)
            self.signal = None

    def cancel(self) -> None:
        """Raise nothing of what was asked for so far."""
        self._pending = None

    def send(self, reading: Reading) -> None:
        """Have the main thread raise, from another thread."""
        if self._pending is None:
            self._pending = _pressure(reading)
        main = threading.main_thread().ident
        if main is None:
            return
        if self.signal is not None:
            signal.pthread_kill(main, self.signal)
            return
        frame = sys._current_frames().get(main)
        if frame is not None and may_raise(frame):
            self._raise_at_next_bytecode(main)

    def _raise_at_next_bytecode(self, main: int) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            figures = {name: getattr(pending, name) for name in ("used", "limit", "limit_name")}
            kind = type(
                "HostMemoryPressure", (HostMemoryPressure,), {**figures, "__module__": HostMemoryPressure.__module__}
            )
            self.raised += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))

    def _handle(self, _number: int, frame: FrameType | None) -> Any:
        if self._pending is None or frame is None or not may_raise(frame):
            return
        pending, self._pending = self._pending, None
        self.raised += 1
        raise pending


def _pressure(reading: Reading) -> HostMemoryPressure:
    told = f"{format_size(reading.used)} of {format_size(reading.limit)} are in use"
    error = HostMemoryPressure(f"host memory is about to run out: {told}, by {reading.name}")
    error.used, error.limit, error.limit_name = reading.used, reading.limit, reading.name
    return error


def may_raise(frame: FrameType) -> bool:
    """Return whether an error raised in ``frame`` is the cell's: code of a cell runs it, and nothing of ours."""
    at: FrameType | None = frame
    is_below_shell = False
    while at is not None:
        code = at.f_code
        if code.co_name == _RUNS_CODE and code.co_filename.endswith(_SHELL):
            return is_below_shell
        if _is_apart(code.co_filename, code.co_name):
            return False
        is_below_shell = True
        at = at.f_back
    return False


def _is_apart(filename: str, name: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_IN_THE_PROGRAM)
    return name == "__del__" or filename.startswith(_IMPORTS) or any(part in filename for part in _SENDS)


def _free_signal() -> int | None:
    """Return a real-time signal that has no handler, the last there is: others count from the first."""
    if not hasattr(signal, "SIGRTMIN") or not hasattr(signal, "pthread_kill"):
        return None
    for number in range(int(signal.SIGRTMAX) - 1, int(signal.SIGRTMIN), -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return None
