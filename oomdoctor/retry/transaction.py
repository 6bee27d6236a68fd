"""One cell as a transaction: a snapshot at its start, copies made just in time while it runs, one way back."""

from __future__ import annotations

import builtins
import gc
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from oomdoctor.errors import StateError
from oomdoctor.model.fix import Edit
from oomdoctor.model.session import Attempt
from oomdoctor.objects.frames import is_of_signal
from oomdoctor.program.modules import put_in_place
from oomdoctor.program.names import FirstUse, bound_names, first_uses
from oomdoctor.retry.snapshot import Snapshot

_CACHES: Final = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME")
"""Variables that name folders in which libraries keep what they would fetch or make again."""
_COARSE_NS: Final = 10_000_000
"""How far the clock of a file system may be behind."""


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT back while the body runs; it arrives at its end, once: half of a state put back would be none.

    Python delivers signals to the main thread alone, so that there is nothing to hold back on another one.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if before is None:  # or a handler that was set by C, which Python cannot put back
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


class Transaction:
    """A cell that can be taken back.

    Args:
        namespace: the globals that the cell runs in.
        source: the cell's text.
        room: how many bytes of host memory copies of tensors may take; asked when the first copy is made.

    Attributes:
        fault: why state could not be saved, empty if all went well.
        stopped: why the attempt that ran last was stopped before it changed what was not saved, empty if it was not.
    """

    def __init__(self, namespace: dict[str, Any], source: str, room: Callable[[], int]) -> None:
        self.source = source
        self._begun_ns = time.time_ns()
        self.fault = self.stopped = ""
        self._strict = False
        self._handles: list[Any] = []
        self._stepped: set[int] = set()
        self._held: dict[str, Any] = {}
        self._holds: Callable[[Any], bool] | None = None
        self._modules: list[Callable[[], None]] = []
        self._snapshot: Snapshot | None = None
        try:
            self._snapshot = Snapshot(namespace, source, room)
        except Exception as exc:
            if is_of_signal(exc):
                raise
            self.fault = f"the state at the start of the cell could not be saved ({type(exc).__name__}: {exc})"

    @property
    def kept_bytes(self) -> int:
        """Host memory that copies take."""
        return self._snapshot.kept_bytes if self._snapshot is not None else 0

    @property
    def is_kept(self) -> bool:
        """Whether every tensor was copied when the cell began, so that no write to one need be seen."""
        return self._snapshot is not None and self._snapshot.is_kept

    def keep_all(self) -> None:
        """Copy every tensor now: the cell is about to write to some past autograd, which no counter shows."""
        self._keep(lambda snapshot: snapshot.keep_all())

    @contextmanager
    def armed(self, *, strict: bool = False) -> Iterator[None]:
        """Make copies just in time while the body runs.

        Args:
            strict: where a copy cannot be made, stop the body with a ``StateError`` before anything changes.
        """
        self.stopped, self._strict = "", strict
        self.arm()
        try:
            yield
        finally:
            self.disarm()
            self._strict = False

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Stop the body where it opens a file to read that a run of the cell has written before.

        The cell itself has not found that file as it is now. Existence alone is not looked at, nor what opens files
        past Python, nor the caches of libraries.
        """
        opened, now_ns = io.open, time.time_ns()
        written = range(self._begun_ns - _COARSE_NS, now_ns - _COARSE_NS)
        caches = (
            Path("/proc"),
            Path("/sys"),
            Path.home() / ".cache",
            *(Path(os.environ[name]) for name in _CACHES if os.environ.get(name)),
        )

        def guarded(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if ("r" in mode or "+" in mode) and "w" not in mode and not isinstance(file, int):
                try:
                    path = Path(os.fsdecode(file)).resolve()
                    told = path.stat()
                except (OSError, TypeError, ValueError):
                    return opened(file, mode, *args, **kwargs)
                is_new = told.st_mtime_ns in written and stat.S_ISREG(told.st_mode) and told.st_size
                if is_new and not any(path.is_relative_to(one) for one in caches):
                    self.stopped = f"`{file}` was written by the run that failed, and the cell reads it again"
                    raise StateError(self.stopped)
            return opened(file, mode, *args, **kwargs)

        builtins.open = io.open = guarded
        try:
            yield
        finally:
            builtins.open = io.open = opened

    @contextmanager
    def made_again(self) -> Iterator[None]:
        """Let the body make a folder again that the run which failed has made: the cell found none."""
        make, first_ns = os.mkdir, self._begun_ns - _COARSE_NS

        def made(path: Any, *args: Any, **kwargs: Any) -> None:
            try:
                make(path, *args, **kwargs)
            except FileExistsError:
                there = Path(os.fsdecode(path))
                if kwargs or not there.is_dir() or there.stat().st_ctime_ns < first_ns:
                    raise

        os.mkdir = made
        try:
            yield
        finally:
            os.mkdir = make

    def arm(self) -> None:
        """Set the hooks that copy what is about to change: one before the first forward, one before the first step."""
        snapshot = self._snapshot
        if snapshot is None or "torch" not in sys.modules:
            return
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._stepped = set()
        self._handles = [register_optimizer_step_pre_hook(self._before_step)]
        if snapshot.waits_for_forward:
            self._handles.append(register_module_forward_pre_hook(self._before_forward))

    def disarm(self) -> None:
        """Take the hooks away: the cell has ended."""
        if self._snapshot is not None:
            self._snapshot.end()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, module: Any, args: Any) -> None:
        del args
        self._keep(lambda snapshot: snapshot.before_forward(module))
        self._handles.pop().remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if id(optimizer) not in self._stepped:
            self._keep(lambda snapshot: snapshot.before_step(optimizer))
            self._stepped.add(id(optimizer))

    def _keep(self, copy: Callable[[Snapshot], None]) -> None:
        if self._strict and self.stopped:  # the program caught the first one, and went on
            raise StateError(self.stopped)
        try:
            if self._snapshot is not None:
                copy(self._snapshot)
        except Exception as exc:
            if is_of_signal(exc):
                raise
            self.fault = f"state could not be copied before it changed ({type(exc).__name__}: {exc})"
        if self._strict and self._snapshot is not None:
            self.stopped = self.fault or self._snapshot.give_up_copies()
            if self.stopped:
                self.fault = ""
                raise StateError(self.stopped)

    def hold(self, attempt: Attempt, holds: Callable[[Any], bool] | None = None) -> None:
        """Keep what names stand for that the attempt binds anew and the cell does not: it has to come back.

        Args:
            holds: tells of a tensor whether it takes memory that the attempt needs; see ``set_aside``.

        Raises:
            StateError: the attempt needs what a name stood for before a later cell bound it.
        """
        self._holds = holds
        if self._snapshot is None:
            return
        self._snapshot.widen((*attempt.replays, attempt.source))
        bound = frozenset[str]()
        for text in (*attempt.replays, attempt.source):
            uses = first_uses(text).items()
            self._snapshot.check_left(frozenset(name for name, use in uses if use is not FirstUse.BINDS) - bound)
            bound |= bound_names(text)
        self._held |= self._snapshot.kept_by_name(bound - bound_names(self.source))

    def recompile(self, edits: Iterable[Edit]) -> None:
        """Have modules of the user's own run as an attempt has them, until the state is restored."""
        self._modules += map(put_in_place, edits)

    def _take_modules_back(self) -> None:
        while self._modules:
            self._modules.pop()()

    def set_aside(self) -> None:
        """Have what ``hold`` keeps take host memory alone, as far as no name leads to it any more.

        To be called when the attempt has bound its names anew, and runs on.
        """
        if self._snapshot is not None and self._held and self._holds is not None:
            self._snapshot.set_aside(self._held, self._holds)

    def losses(self) -> tuple[str, ...]:
        """Return what cannot be brought back, a sentence each; nothing is touched."""
        if self.fault or self._snapshot is None:
            return (self.fault,)
        return self._snapshot.losses()

    def doubts(self) -> tuple[str, ...]:
        """Return what differs that is not put back, and that no result depends on, a sentence each."""
        return self._snapshot.doubts() if self._snapshot is not None else ()

    def restore_on_host(self) -> None:
        """Bring it back in a copy of the process in which every tensor lies in host memory."""
        if self._snapshot is not None:
            self._snapshot.follow_devices()
        self.restore()

    def restore(self) -> None:
        """Bring back the state at the start of the cell. May be called again after a further attempt.

        An interrupt arrives when all of it is back.

        Raises:
            StateError: there is no snapshot to bring back.
        """
        if self._snapshot is None:
            raise StateError(self.fault)
        with held_back():
            self._take_modules_back()
            self._snapshot.restore()

    def made(self) -> list[str]:
        """Return the names that the cell itself has made, which a way back takes away: models and data first."""
        return self._snapshot.made() if self._snapshot is not None else []

    def unrestored(self) -> list[str]:
        """Return what ``restore`` failed to bring back, a sentence each."""
        return self._snapshot.unrestored() if self._snapshot is not None else []

    def settle(self) -> tuple[str, ...]:
        """Bring the state back for good; return what could not be, a sentence each."""
        if self._snapshot is None:
            return (self.fault,)
        with held_back():
            self._take_modules_back()
            missing = self._snapshot.settle()
        gc.collect()  # what the cell has made and is held in a cycle by itself, as every class is
        return missing

    @property
    def bytes_to_copy(self) -> int:
        """Host memory that copies not made yet would take, if the cell takes an optimizer step."""
        return self._snapshot.bytes_to_copy if self._snapshot is not None else 0

    def moved_on_by(self, later: Transaction, *, is_healed: bool = False) -> str | None:
        """Return what a later cell has done that this one cannot be run again after, or taken back; None for nothing.

        Names that it has bound, and that this cell has no use for, stay as they are from then on, and so do the streams
        and the settings that it has changed.

        Args:
            is_healed: whether this cell may be taken back, and not be run again.
        """
        if self._snapshot is None or later._snapshot is None:
            return "run, and what it has changed is not known"
        if (change := next(later._snapshot.changes(), None)) is not None:
            return change
        names, uses = later._snapshot.rebound(), self._snapshot.uses() | self._held.keys()
        if (needed := [name for name in names if name in uses]) != []:
            return f"bound `{needed[0]}`, which the failed cell uses"
        if (lost := next((told for told in later._snapshot.losses(hidden=False)), None)) is not None:
            return f"run, and {lost}"
        if not is_healed and (setting := self._snapshot.set_by(later._snapshot)) is not None:
            return f"changed a setting of torch's ({setting}), and the failed cell ran under the other"
        self._snapshot.leave(names)
        self._snapshot.leave_settings(later._snapshot)
        return None
