"""Prices attempts: each is run in a forked copy of this process, on fake tensors, and only numbers come back.

The user's process does three things alone: it forks, it reads a pipe, and it buries. All else happens in a nursery
(see ``child``), which forks the shadows, watches the time and passes their readings on; the nursery and its shadows
are one process group, which is killed whole if anything goes wrong here.

Limits: tensors in host memory, which is also where those of the virtual accelerator live; POSIX.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.reading import Reading, one_sentence
from oomdoctor.model.plan import Forecast

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session

__all__ = ["Pricer", "price"]

BASIS: Final = "shadow run"

_GRACE_S: Final = 1.0
"""Time beyond the limit in which the nursery may still report before it is killed."""
_LOADING_S: Final = 20.0
"""Time beyond the limit where the nursery has to load modules first."""
_REPORT_S: Final = 0.3
"""Time that a shadow gets at the end of the limit to report."""


def price(
    session: Session,
    attempts: Sequence[Attempt],
    *,
    budget: int | None,
    prepare: Callable[[], None],
    timeout_s: float = 10.0,
    workers: int | None = None,
) -> tuple[Forecast, ...]:
    """Forecast what each of ``attempts`` would need, in their order.

    Args:
        session: the user's program.
        attempts: the first is by convention the unchanged cell; the slowdown of the others is relative to it.
        budget: bytes that there are.
        prepare: restores the start of the cell; called in a forked process, with real tensors, outside of any mode.
        timeout_s: time for all of them together; what was not priced by then is refused with that reason.
        workers: how many run at once; None for one per processor, at most four.

    Returns:
        A forecast each, with ``refused`` where there is none. An error of the user's code is such a reason.
    """
    return Pricer(session, budget=budget, prepare=prepare, workers=workers).price(attempts, timeout_s=timeout_s)


class Pricer:
    """Prices attempts of one cell in several calls, all relative to the first attempt of the first call."""

    def __init__(
        self, session: Session, *, budget: int | None, prepare: Callable[[], None], workers: int | None = None
    ) -> None:
        self._session, self._budget, self._prepare = session, budget, prepare
        self._workers = workers or min(os.cpu_count() or 1, 4)
        self._unchanged: float | None = None

    def price(self, attempts: Sequence[Attempt], *, timeout_s: float = 10.0) -> tuple[Forecast, ...]:
        """Forecast what each of ``attempts`` would need, in their order. See ``price``."""
        if not attempts:
            return ()
        why = _unsupported()
        if why is not None:
            return tuple(Forecast(basis=BASIS, budget=self._budget, refused=why) for _ in attempts)
        readings = self._readings(attempts, timeout_s)
        if self._unchanged is None:
            self._unchanged = readings[0].cost if readings[0].why is None else 0.0
        return tuple(self._forecast(reading) for reading in readings)

    def _forecast(self, reading: Reading) -> Forecast:
        if reading.why is not None:
            return Forecast(basis=BASIS, budget=self._budget, refused=reading.why)
        return Forecast(
            basis=BASIS,
            budget=self._budget,
            peak=reading.peak,
            reserved=reading.reserved,
            slowdown=round(reading.cost / self._unchanged, 4) if self._unchanged else None,
            error_ratio=reading.error_ratio,
            peak_line=reading.peak_line,
        )

    def _readings(self, attempts: Sequence[Attempt], timeout_s: float) -> list[Reading]:
        too_late = Reading(why=f"not priced within {timeout_s:g} s")
        loads = _limited() and "oomdoctor.forecast.child" not in sys.modules
        if not loads:
            from oomdoctor.forecast import child

            child.warm_up()
        cached = self._session.accelerator.read().simulated
        end = time.monotonic() + timeout_s
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; the nursery touches nothing that another thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(reader)
            _nursery(self, attempts, writer, timeout_s=timeout_s, end=None if loads else end, cached=cached)
        try:
            os.close(writer)
            with contextlib.suppress(OSError):  # it has done so itself, or has ended
                os.setpgid(pid, pid)
            lines = _read_until(reader, end + _GRACE_S + (_LOADING_S if loads else 0.0))
        finally:
            os.close(reader)
            _bury(pid)
        answers = dict(_parsed(line) for line in lines)
        everywhere = answers.get(-1)
        found = [answers.get(index, everywhere or too_late) for index in range(len(attempts))]
        return [too_late if reading.why == "out of time" else reading for reading in found]


def _unsupported() -> str | None:
    """Return why there can be no shadow run in this process, None if there can."""
    if not hasattr(os, "fork"):
        return "a shadow run needs fork(), which this system does not have"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use in this process: a shadow run forecasts tensors in host memory only"
    return None


def _limited() -> bool:
    """Whether this process has so little memory left to itself that it should load no more modules."""
    limits = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return any(soft != resource.RLIM_INFINITY for soft in limits)


def _parsed(line: str) -> tuple[int, Reading]:
    index, _, text = line.partition(" ")
    return int(index), Reading.from_json(text)


def _read_until(reader: int, end: float) -> list[str]:
    """Return the whole lines that came until the end of the file or of the time."""
    received = b""
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        received += chunk
    return received.decode().splitlines() if received.endswith(b"\n") else received.decode().splitlines()[:-1]


def _bury(pid: int) -> None:
    """End the nursery with its shadows and take its status, so that no zombie is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # someone ignores SIGCHLD: the system has buried it
        os.waitpid(pid, 0)


def _nursery(
    pricer: Pricer, attempts: Sequence[Attempt], writer: int, *, timeout_s: float, end: float | None, cached: bool
) -> None:
    """Run the shadows and report; never returns."""
    try:
        os.setpgid(0, 0)
        from oomdoctor.forecast import sandbox

        sandbox.raise_limits()
        sandbox.wall_off(frozenset({writer}))
        from oomdoctor.forecast import child

        child.warm_up()
        end = time.monotonic() + timeout_s if end is None else end
        try:
            start = child.bring_back(pricer._prepare)
        except ForecastError as error:
            _report(writer, -1, Reading(why=str(error)))
        else:
            _Shadows(pricer, attempts, start, writer, end=end, cached=cached).run()
    except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
        _report(writer, -1, Reading(why=f"the shadow process failed with {one_sentence(error)}"))
    finally:
        os._exit(0)


def _report(writer: int, index: int, reading: Reading) -> None:
    message = f"{index} {reading.to_json()}\n".encode()
    while message:
        message = message[os.write(writer, message) :]


class _Shadows:
    """The shadows of one nursery: at most so many at once, each with a pipe of its own."""

    def __init__(
        self, pricer: Pricer, attempts: Sequence[Attempt], start: Any, writer: int, *, end: float, cached: bool
    ) -> None:
        self._pricer, self._attempts, self._start, self._writer = pricer, attempts, start, writer
        self._end, self._cached = end, cached
        self._running: dict[int, tuple[int, int, bytearray]] = {}

    def run(self) -> None:
        """Start the shadows in order and pass on what they report, until all have or the time is over."""
        waiting = list(range(len(self._attempts)))
        while waiting or self._running:
            while waiting and len(self._running) < self._pricer._workers:
                self._begin(waiting.pop(0))
            left = self._end - time.monotonic()
            if left <= 0:
                break
            ready, _, _ = select.select(list(self._running), [], [], left)
            for reader in ready:
                self._read(reader)
        for pid, _, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _begin(self, index: int) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._shadow(index, writer)
        os.close(writer)
        self._running[reader] = (pid, index, bytearray())

    def _shadow(self, index: int, writer: int) -> None:
        from oomdoctor.forecast import child

        try:
            reading = child.run(
                self._pricer._session,
                self._attempts[index],
                self._start,
                budget=self._pricer._budget,
                cached=self._cached,
                time_s=self._end - time.monotonic() - _REPORT_S,
            )
            os.write(writer, reading.to_json().encode())
        finally:
            os._exit(0)

    def _read(self, reader: int) -> None:
        pid, index, received = self._running[reader]
        chunk = os.read(reader, 1 << 16)
        if chunk:
            received += chunk
            return
        del self._running[reader]
        os.close(reader)
        status = os.waitpid(pid, 0)[1]
        reading = Reading.from_json(received.decode()) if received else Reading(why=_end_of(status))
        _report(self._writer, index, reading)


def _end_of(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return "the shadow process ended without an answer"
    name = signal.Signals(os.WTERMSIG(status)).name
    hint = ", perhaps on writing to memory that is shared with other processes" if name == "SIGSEGV" else ""
    return f"the shadow process was ended by {name}{hint}"
