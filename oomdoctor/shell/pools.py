"""What pools of threads and of processes have not finished yet, read from where Python's own pools keep it.

A pool runs functions of libraries as well as the user's: no frame of the user's tells that it is at work for a cell.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from types import CodeType, FrameType
from typing import Any, Final

_WITH_MANAGERS: Final = (
    "concurrent.futures.process",
    "joblib.externals.loky.process_executor",
    "loky.process_executor",
)
"""Modules of executors of processes, whose managing threads know what is pending. joblib has its own copy of loky."""


def unfinished() -> dict[Hashable, str]:
    """Return what is being worked on, by what tells one piece of work from another: what works on it, in words."""
    return dict((*_in_executors_of_threads(), *_in_executors_of_processes(), *_in_pools()))


def _in_executors_of_threads() -> Iterator[tuple[Hashable, str]]:
    """Yield the threads that are at work, and the queues in which more is waiting."""
    futures = sys.modules.get("concurrent.futures.thread")
    threads = dict(futures._threads_queues) if futures is not None else {}
    if not threads or futures is None:
        return
    running, runs = sys._current_frames(), futures._WorkItem.run.__code__
    for thread, queue in threads.items():
        if _runs(running.get(thread.ident), runs):
            yield (id(futures), thread.ident), f"the thread `{thread.name}` of a pool"
        if queue.qsize() and thread.is_alive():  # the last thing in the queue of one that has ended is its end
            yield (id(futures), id(queue)), "a pool of threads"


def _runs(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _in_executors_of_processes() -> Iterator[tuple[Hashable, str]]:
    for name in _WITH_MANAGERS:
        for manager in list(getattr(sys.modules.get(name), "_threads_wakeups", ())):
            for number in list(manager.pending_work_items):
                yield (id(manager), number), "a pool of processes"


def _in_pools() -> Iterator[tuple[Hashable, str]]:
    """Yield the jobs of ``multiprocessing.pool``, of threads or of processes: they have one numbering."""
    pools: Any = sys.modules.get("multiprocessing.pool")
    if pools is None:
        return
    ends = pools.Pool._terminate_pool.__func__
    for finalizer in list(sys.modules["multiprocessing.util"]._finalizer_registry.values()):
        if getattr(finalizer._callback, "__func__", None) is ends:
            for number in list(finalizer._args[-1]):
                yield (id(pools), number), "a pool"
