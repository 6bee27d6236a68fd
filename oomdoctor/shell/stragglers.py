"""What of the user's code goes on beside a cell that has failed: tasks that it made, and threads.

A retry goes back in time, and whatever goes on meanwhile would write into the state that it goes back to. Tasks that
the cell made are cancelled, as they would not be there had the changed cell run first. A thread cannot be ended from
outside: it is named, and the retry refused.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import Any, Final
from weakref import WeakSet

__all__ = ["end_tasks", "running_tasks", "threads_at_work"]

_LIBRARIES: Final = tuple(
    {f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")}
)
_OWN: Final = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"  # noqa: PTH120 - compared as text, like co_filename
_LONGEST_S: Final = 5.0
"""Time that tasks get to end after they were cancelled."""


def running_tasks() -> WeakSet[asyncio.Task[Any]]:
    """Return the tasks of the loop that is running, none where there is no loop."""
    try:
        return WeakSet(asyncio.all_tasks())
    except RuntimeError:
        return WeakSet()


async def end_tasks(before: Collection[Any], *, waits: bool) -> str | None:
    """Cancel the user's tasks that were made since ``before`` was taken.

    Args:
        before: what ``running_tasks`` returned then.
        waits: whether the caller is awaited by the loop, so that the tasks can be awaited in their turn. Otherwise they
            end when the loop runs again.

    Returns:
        Why the cell cannot be taken back, None where all of them end.
    """
    tasks = [task for task in running_tasks() if task not in before and _is_users(_code_of(task))]
    for task in tasks:
        task.cancel()
    if not tasks or not waits:
        return None
    _, pending = await asyncio.wait(tasks, timeout=_LONGEST_S)
    for task in pending:
        return f"`{getattr(_code_of(task), 'co_qualname', task.get_name())}`, a task that the cell made, does not end"
    return None


def threads_at_work() -> Iterator[str]:
    """Yield a sentence for each other thread that runs code of the user's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost if ident != threading.get_ident() else None
        while frame is not None and not _is_users(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            yield f"the thread {names.get(ident, ident)} is running `{frame.f_code.co_qualname}` meanwhile"


def _code_of(task: Any) -> CodeType | None:
    coroutine = task.get_coro()
    return getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)


def _is_users(code: CodeType | None) -> bool:
    """Whether code is neither of Python, nor of an installed package, nor ours."""
    name = code.co_filename if code is not None else "<"
    if name.startswith("<"):
        return name.startswith("<ipython-input-")
    return not name.startswith((*_LIBRARIES, _OWN))
