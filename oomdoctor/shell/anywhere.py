"""Runs a cell from a widget's callback, on whichever thread that comes.

JupyterLab from 4.4 on sends comm messages over subshells, whose callbacks ipykernel 7 may run on a thread of their
own. There the cell is handed to the main thread's loop, and the callback waits: the frontend routes output into the
widget only until the comm request is idle.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from contextlib import nullcontext
from typing import Any

from oomdoctor.errors import NotAvailable


def run_cell_anywhere(shell: Any, source: str) -> None:
    """Run ``source`` as a cell on the main thread; return when it is done.

    Raises:
        NotAvailable: the cell awaits, and the loop that it would be awaited by is waiting for this call.
    """
    transformed = shell.transform_cell(source)
    awaits = shell.should_run_async(source, transformed_cell=transformed)
    if threading.current_thread() is threading.main_thread():
        if awaits:
            raise NotAvailable(f"a cell that awaits is not run again from here: type `{source}` in a cell of its own")
        shell.run_cell(source, store_history=False)
        return
    kernel, done = shell.kernel, threading.Event()

    async def run() -> None:
        try:
            # Before ipykernel 7 there is no lock: one request runs at a time.
            async with getattr(kernel, "_main_asyncio_lock", None) or nullcontext():
                if awaits:
                    await _awaited(shell, source, transformed)
                else:
                    _run_interruptibly(shell, source)
        finally:
            done.set()

    context = contextvars.copy_context()
    tasks: list[asyncio.Task[None]] = []
    loop = kernel.io_loop.asyncio_loop
    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())), context=context)
    done.wait()


async def _awaited(shell: Any, source: str, transformed: str) -> None:
    """Run a cell that awaits as the kernel does: as a task that SIGINT cancels."""
    cell = shell.run_cell_async(source, store_history=False, transformed_cell=transformed)
    task = asyncio.ensure_future(cell)
    interruptible = getattr(shell.kernel, "_cancel_on_sigint", None)
    try:
        with interruptible(task) if interruptible is not None else nullcontext():
            result = await task
    finally:
        shell.events.trigger("post_execute")
    shell.events.trigger("post_run_cell", result)


def _run_interruptibly(shell: Any, source: str) -> None:
    """Run a cell with SIGINT raising ``KeyboardInterrupt``, as the kernel arranges for its own requests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shell.run_cell(source, store_history=False)
    finally:
        signal.signal(signal.SIGINT, before)
