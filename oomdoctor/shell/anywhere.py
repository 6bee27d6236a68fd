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
from typing import Any

__all__ = ["run_cell_anywhere"]


def run_cell_anywhere(shell: Any, source: str) -> None:
    """Run ``source``, which must not await, as a cell on the main thread; return when it is done."""
    if threading.current_thread() is threading.main_thread():
        shell.run_cell(source, store_history=False)
        return
    kernel, done = shell.kernel, threading.Event()

    async def run() -> None:
        try:
            lock = getattr(kernel, "_main_asyncio_lock", None)
            if lock is None:
                _run_interruptibly(shell, source)
            else:
                async with lock:
                    _run_interruptibly(shell, source)
        finally:
            done.set()

    context = contextvars.copy_context()
    tasks: list[asyncio.Task[None]] = []
    loop = kernel.io_loop.asyncio_loop
    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())), context=context)
    done.wait()


def _run_interruptibly(shell: Any, source: str) -> None:
    """Run a cell with SIGINT raising ``KeyboardInterrupt``, as the kernel arranges for its own requests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shell.run_cell(source, store_history=False)
    finally:
        signal.signal(signal.SIGINT, before)
