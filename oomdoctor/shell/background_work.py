"""What of the user's code goes on beside a cell that has failed: tasks, timers and calls to come, threads, processes.

A retry goes back in time, and whatever goes on meanwhile would write into the state that it goes back to. Tasks, timers
and calls to come that the cell made are cancelled, as they would not be there had the changed cell run first. A thread
cannot be ended from outside, and a process or a pool has done what it has done: they are named, and the retry refused.

Limits: calls are those of the loop that is running, as far as it shows them; asyncio's own loops do.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getattr_static
from traceback import walk_stack
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final
from weakref import WeakSet

from oomdoctor.objects.alive import alive_exactly
from oomdoctor.objects.named import is_users_file

_LONGEST_S: Final = 5.0
"""Time that tasks get to end after they were cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What goes on beside a cell: tasks and calls to come of the loop that is running, timers, numbers of processes.

    ``work`` has what tells the work of pools.
    """

    tasks: WeakSet[asyncio.Task[Any]] = field(default_factory=WeakSet)
    timers: WeakSet[threading.Timer] = field(default_factory=WeakSet)
    calls: WeakSet[asyncio.Handle] = field(default_factory=WeakSet)
    processes: frozenset[int | None] = frozenset()
    work: frozenset[Hashable] = frozenset()


def beside() -> Beside:
    """Return what goes on now."""
    tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
    calls: WeakSet[asyncio.Handle] = WeakSet()
    with suppress(RuntimeError):  # no loop is running
        loop: Any = asyncio.get_running_loop()
        tasks.update(asyncio.all_tasks(loop))
        for waiting in (getattr(loop, "_ready", ()), getattr(loop, "_scheduled", ())):
            calls.update(tuple(waiting))
    return Beside(
        tasks=tasks,
        timers=WeakSet(one for one in threading.enumerate() if isinstance(one, threading.Timer)),
        calls=calls,
        processes=frozenset(one.pid for one in _children()),
        work=frozenset(unfinished()),
    )


def _children() -> list[Any]:
    started = sys.modules.get("multiprocessing")
    return [] if started is None else list(started.active_children())


async def end_since(before: Beside, *, waits: bool) -> str | None:
    """Cancel the timers and the user's tasks and calls since ``before``; return why the cell cannot be undone, if so.

    ``waits``: the caller is awaited by the loop, so that the tasks can be awaited; else they end when it runs again.
    """
    now = beside()
    for timer in now.timers:
        if timer not in before.timers:
            timer.cancel()
    for call in now.calls:
        if call not in before.calls and _calls_users(call):
            call.cancel()
    tasks = [task for task in now.tasks if task not in before.tasks and _is_users(_code_of(task))]
    for task in tasks:
        task.cancel()
    if not tasks or not waits:
        return None
    _, pending = await asyncio.wait(tasks, timeout=_LONGEST_S)
    for task in pending:
        return f"`{getattr(_code_of(task), 'co_qualname', task.get_name())}`, a task that the cell made, does not end"
    return None


async def clear_away(before: Beside, *, waits: bool, anyway: bool = False) -> None:
    """End what an attempt that failed has left behind. For the arguments see ``end_since``.

    ``anyway``: whether another attempt may follow what cannot be undone.

    Raises:
        RuntimeError: something goes on, beside which no other attempt may be made.
    """
    why = await end_since(before, waits=waits) or ("" if anyway else "; ".join(left_since(before)))
    if why:
        raise RuntimeError(why)


def left_since(before: Beside) -> Iterator[str]:
    """Yield a sentence for each process that was started since ``before``, and each pool that is at work.

    Not for workers of loaders: those end with the iterators that a retry lets go of.
    """
    started = [child for child in _children() if child.pid not in before.processes]
    loaders = sys.modules.get("torch.utils.data.dataloader") if started else None
    if loaders is not None:
        iterators = alive_exactly(loaders._MultiProcessingDataLoaderIter)
        workers = {worker.pid for one in iterators for worker in vars(one).get("_workers", ())}
        started = [child for child in started if child.pid not in workers]
    for child in started:
        yield f"the cell started the process `{child.name}`, which goes on and cannot be undone"

    since = {words for work, words in unfinished().items() if work not in before.work}
    for words in sorted(since):
        yield f"{words} goes on with what the cell gave it, and that cannot be undone"


def threads_at_work() -> Iterator[str]:
    """Yield a sentence for each other thread that runs code of the user's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in sys._current_frames().items():
        users = (frame.f_code for frame, _ in walk_stack(innermost) if _is_users(frame.f_code))
        if ident != threading.get_ident() and (code := next(users, None)) is not None:
            yield f"the thread {names.get(ident, ident)} is running `{code.co_qualname}` meanwhile"


def _code_of(task: Any) -> CodeType | None:
    coroutine = task.get_coro()
    return getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)


def _calls_users(call: Any) -> bool:
    """Whether the loop is to call something of the user's, itself or by way of a library's function."""
    function = _under(call._callback)
    if isinstance(function, BuiltinFunctionType):
        # Of a future it is how asyncio itself goes on with a task, unless it cancels it.
        return not isinstance(function.__self__, asyncio.Future) or function.__name__ == "cancel"
    functions = [function, *map(_under, call._args or ())]
    return any(_is_users(one.__code__) for one in functions if isinstance(one, FunctionType))


def _under(function: Any) -> Any:
    """Return what is called in the end: the function of a method, of a partial, of an object that can be called."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    called = getattr_static(type(function), "__call__", None)
    return called if isinstance(called, FunctionType) else function


def _is_users(code: CodeType | None) -> bool:
    """Whether code is neither of Python, nor of an installed package, nor ours."""
    name = code.co_filename if code is not None else "<"
    if name.startswith("<"):
        return name.startswith("<ipython-input-")
    return is_users_file(name)


_LOKY: Final = ("loky.process_executor", "joblib.externals.loky.process_executor")
_WITH_MANAGERS: Final = ("concurrent.futures.process", *_LOKY)
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
        innermost = running.get(thread.ident)
        if innermost is not None and any(frame.f_code is runs for frame, _ in walk_stack(innermost)):
            yield (id(futures), thread.ident), f"the thread `{thread.name}` of a pool"
        if queue.qsize() and thread.is_alive():  # the last thing in the queue of one that has ended is its end
            yield (id(futures), id(queue)), "a pool of threads"


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
