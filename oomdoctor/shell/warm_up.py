"""Gets ready for a failure while there is memory, and while nobody waits.

At a failure nothing can be had: no memory, no new module, no new thread. So, before there is one,

* what diagnoses a failure and shows it is loaded step by step, on the kernel's loop between cells or at the end of
  each cell: where somebody looks at the notebook, or a limit on host memory is set. Not on a thread: a process that the
  user forks meanwhile would inherit the locks of half-loaded modules. What works on tensors waits for the user's torch;
* large blocks are kept out of the heap and memory is kept back (``sandbox.reserve``), and OpenMP's
  threads are begun (``sandbox.openmp``), where a limit is set or near;
* pyzmq's thread for large messages is begun: ``Thread.start`` never returns where there is no memory for a thread.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from oomdoctor import pipeline
from oomdoctor.language import load
from oomdoctor.model import baseline
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.retry.release import release
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.openmp import begin_teams
from oomdoctor.sandbox.reserve import keep_large_blocks_apart, let_large_blocks_join
from oomdoctor.shell.config import OomDoctor
from oomdoctor.shell.error_boundary import quietly

_MODULES: Final = (
    *("oomdoctor.incident", "yaml", "pydantic", "rule_engine", "oomdoctor.rulebook", "oomdoctor.evidence.collect"),
    *("oomdoctor.views", "oomdoctor.views.panel", "libcst.native", "oomdoctor.forecast.ranking"),
)
"""What takes longest to load, a step each; what else there is comes with the rehearsal."""
_ON_TENSORS: Final = (
    *("oomdoctor.evidence.census", "oomdoctor.evidence.devices"),
    *("oomdoctor.allocator.virtual", "oomdoctor.retry.tensor_copies"),
)
_PAUSE_S: Final = 0.05
"""Time that the loop gets for other things between two steps."""
_AT_END_S: Final = 0.1
"""Time for steps at the end of a cell. The longest step, the reading of the rules, takes about 0.3 s by itself."""
_LOOK_EVERY_S: Final = 10.0
"""Time between two looks at the limits that files tell of."""
_LEAST_LEFT: Final = 160 * MIB
"""Room below which nothing is loaded: what a diagnosis takes, what is kept back, and something for the user."""
_DIAGNOSIS: Final = 45 * MIB
"""What all of ``_MODULES`` take, and what comes with them."""
_FORECASTS: Final = 80 * MIB
"""What forecasts, and recomputing, load of torch: ``torch._dynamo`` and what it imports."""
_SHARE_TO_LOAD: Final = 4
_LIMITS_MACHINE: Final = 0.95
"""Share of the machine's memory below which a cgroup's limit is what binds."""
_SHORT_RATIO: Final = 0.1
_SHORT: Final = 2 * GIB


_SERVERS: Final = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "VSCODE_PID")
"""Environment variables that tell of a notebook that somebody looks at. Source: `jupyter_server` sets the first for
each kernel from 2.0 on; nbclient and papermill, which run a notebook to its end, set none of them."""


def is_watched(shell: Any) -> bool:
    """Return whether somebody looks at the notebook of this shell, for all that the environment tells."""
    return hasattr(shell, "kernel") and any(name in os.environ for name in _SERVERS)


class Warming:
    """Readiness for a failure in one shell.

    Attributes:
        done: whether all is loaded that can be so far.
        kept: bytes that are kept back, and will be again before an attempt.
    """

    def __init__(
        self,
        shell: Any,
        config: OomDoctor,
        is_guarded: Callable[[], bool] = lambda: False,
        at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._shell, self._config, self._is_guarded, self._at_work = shell, config, is_guarded, at_work
        self._steps = self._all_steps()
        self._task: asyncio.Task[None] | None = None
        self._looked_s = -_LOOK_EVERY_S
        self._pages: tuple[int, int] | None = None
        self._has_teams = False
        self._failed = ""
        self._has_ended = False
        self.kept, self.done = 0, False

    def begin(self) -> None:
        """Do at load what takes no time."""
        if hasattr(self._shell, "kernel"):
            quietly(_begin_collector)
        self.keep_back()

    def end(self) -> None:
        """Load nothing more, and give the memory back."""
        if self._task is not None:
            self._task.cancel()
        self._steps, self._has_ended = iter(()), True
        reserve.let_go()
        let_large_blocks_join()

    def note_end(self, source: str, *, failed: bool) -> None:
        """Note how a cell has ended.

        After a failure nothing is loaded until a cell has ended well: what is free now is what its fixes are priced by.
        """
        if failed:
            self._failed = source
            if self._task is not None:
                self._task.cancel()
        elif source == self._failed:
            self._failed = ""

    def keep_back(self, source: str = "") -> None:
        """Keep memory back where a limit leaves some, and none is kept yet.

        The cell that has failed gets all of it when it runs again: what was kept back may be what it lacked.
        """
        if source and source == self._failed:
            reserve.give_up()
            return
        if reserve.address_space() > reserve.FOR_MESSAGES:
            return
        if self._pages is not None:  # that was then, and a page too many ends the process
            self._pages = _limit_on_pages()
        if limits := self._limits():
            if limits != [self._pages]:
                keep_large_blocks_apart()
            with self._at_work():
                self.kept = reserve.take(*min(limits), populated=self._pages is not None)

    def begin_history(self) -> None:
        """Begin IPython's thread that writes the history again, which IPython ends at each fork.

        The next cell would begin it, with memory as full as its failure left it. Source: ``_restart_thread_if_stopped``
        of ``HistoryManager``, IPython/core/history.py from 9.2 on.
        """
        restart = getattr(self._shell.history_manager, "_restart_thread_if_stopped", None)
        if restart is not None and reserve.has_room(reserve.FOR_THREAD):
            restart()

    def after_cell(self) -> None:
        """Go on a little, now that a cell has ended, which may have been the one that unloads."""
        if self._has_ended:
            return
        if self._looked_s + _LOOK_EVERY_S < time.monotonic():
            self._looked_s, self._pages = time.monotonic(), quietly(_limit_on_pages)
        self.keep_back()
        if (process := reserve.of_process()) is not None:
            baseline.note(process[1] - process[0] - reserve.address_space())
        is_limited = self._pages is not None or process is not None or self._is_guarded()
        if is_limited:
            if "torch" in sys.modules and not self._has_teams:
                self._has_teams = begin_teams()
            self._go_on(_AT_END_S)
        is_used = is_limited or ("torch" in sys.modules and is_watched(self._shell))
        if is_used and (self._task is None or self._task.done()):
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._task = loop.create_task(self._in_pauses())

    async def _in_pauses(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S)
            if not self._go_on(0.0):
                return

    def _go_on(self, time_s: float) -> bool:
        """Do steps until the time is over, one at least; return whether there may be more."""
        end = time.monotonic() + time_s
        while self._has_room() and (step := next(self._steps, None)) is not None:
            self.done = step is _LATER
            if self.done:
                return False
            with self._at_work():
                quietly(step)
            if time.monotonic() >= end:
                return True
        self.done = self._has_room()
        return False

    def _has_room(self, least: int = _LEAST_LEFT) -> bool:
        """Whether what is loaded leaves the user most of what a limit leaves: so many bytes of it are free."""
        return all(free >= least for free, _ in self._limits())

    def lacks_room(self) -> str:
        """Return why a diagnosis cannot be loaded now; nothing where it can, or is loaded."""
        missing = sum(name not in sys.modules for name in _MODULES)
        if not missing:
            return ""
        if self._pages is not None:
            self._pages = _limit_on_pages()
        needed = _DIAGNOSIS * missing // len(_MODULES)
        free = min((free for free, _ in self._limits()), default=needed)
        if free >= needed:
            return ""
        return f"{free / MIB:.0f} MiB are left below a limit on host memory, and it would load {needed / MIB:.0f} MiB"

    def _limits(self) -> list[tuple[int, int]]:
        return [one for one in (reserve.of_process(), self._pages) if one is not None]

    def _all_steps(self) -> Iterator[Callable[[], Any]]:
        if hasattr(self._shell, "kernel"):
            yield partial(importlib.import_module, "ipywidgets")
        yield partial(_rehearse_traceback, self._shell)
        yield from steps(self._config)
        # The objects of so many modules have the collector go through all that there are, 0.2 s for a large program: it
        # would do so at the next burst of new objects, which is the first traceback.
        yield lambda: gc.isenabled() and gc.collect()
        while "torch" not in sys.modules:
            yield _LATER
        for name in _ON_TENSORS:
            yield partial(importlib.import_module, name)
        yield partial(_rehearse, self._config)
        # Else each copy loads it for itself. Where pages are counted, what is too much ends the process.
        if self._pages is None and self._has_room(_SHARE_TO_LOAD * _FORECASTS):
            yield lambda: importlib.import_module("oomdoctor.forecast.dry_run").warm_up()

    @property
    def to_load(self) -> int:
        """Bytes that an attempt may load besides what the program takes: the parts of torch that recompute."""
        return _FORECASTS if "torch" in sys.modules and "torch._dynamo" not in sys.modules else 0


def steps(config: OomDoctor) -> Iterator[Callable[[], Any]]:
    """Yield what loads all that a failure needs, beside what works on tensors, step by step."""
    for name in _MODULES:
        yield partial(importlib.import_module, name)
    from oomdoctor import fixes, pipeline

    for fix in fixes.ids():
        yield partial(fixes.get, fix)
    yield partial(pipeline.rulebook, tuple(map(Path, config.rule_paths)))
    yield partial(_rehearse, config)


def _LATER() -> None:  # noqa: N802 - a constant that is told by its identity
    """Stand for a step that has to wait."""


def _rehearse_traceback(shell: Any) -> None:
    """Have the shell render a traceback, and show it to nobody."""
    renderer = shell.InteractiveTB
    before = dict(vars(renderer))
    try:
        raise MemoryError
    except MemoryError as exc:
        renderer.structured_traceback(type(exc), exc, exc.__traceback__)
    finally:
        vars(renderer).clear()
        vars(renderer).update(before)


def _rehearse(config: OomDoctor) -> None:
    """Diagnose a failure that there was not, and show it to nobody: what that loads by the way is there then."""
    from oomdoctor.model.session import Cell, Cells
    from oomdoctor.views import bundle

    failure = MemoryError()
    cells = Cells(history=(Cell(number=0, source="raise MemoryError"),))
    load()
    case, session = pipeline.observe(failure, lambda device: pipeline.open_session({}, cells, device), {})
    case = pipeline.diagnose(case, pipeline.rulebook(tuple(map(Path, config.rule_paths))))
    case = pipeline.plan(case, session, None, time_budget_s=0)
    bundle(case)
    release(failure)


def _begin_collector() -> None:
    """Begin the thread of pyzmq in which it lets go of large messages, which ``store`` starts for the first of them."""
    from zmq.utils.garbage import gc as collector

    with collector._lock:
        if not collector.is_alive():
            collector.start()


def _limit_on_pages() -> tuple[int, int] | None:
    """Return ``(free, limit)`` where memory is counted by pages and a limit on them is set or near, in bytes."""
    from oomdoctor.evidence import host

    found = host.read(in_full=False)
    total, available = found.total, found.available
    limits = []
    if isinstance(found.cgroup_limit, int) and isinstance(found.cgroup_used, int):
        dropped = found.cgroup_reclaimable if isinstance(found.cgroup_reclaimable, int) else 0
        limits.append((found.cgroup_limit - found.cgroup_used + dropped, found.cgroup_limit))
    if isinstance(total, int):
        limits = [one for one in limits if one[1] < _LIMITS_MACHINE * total]
        if isinstance(available, int) and available < max(_SHORT, _SHORT_RATIO * total):
            limits.append((available, total))
    return min(limits, default=None)
