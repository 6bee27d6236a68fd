"""``%memreport --live``: an output that tells what is in use, again and again while later cells run.

A thread reads the counters of the memories in use and sends the output anew where they have changed. It loads nothing,
draws no random number, and does not go through the display of the shell, which a cell may be capturing.

Limits: it runs beside the program, so while an operation holds the interpreter's lock there is nothing new.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final
from uuid import uuid4

from oomdoctor import pipeline
from oomdoctor.errors import NotAvailable, UsageError
from oomdoctor.model.memory import Usage
from oomdoctor.sandbox import reserve
from oomdoctor.shell.error_boundary import quietly

_LONGEST_S: Final = 2.0
"""Time that the thread gets to send what it is sending."""


class LiveReport:
    """One output that is kept up to date until ``end``.

    Args:
        every_s: time between two looks.

    Raises:
        UsageError: this is no notebook, and no output can change.
        NotAvailable: no thread can be had.
    """

    def __init__(self, shell: Any, every_s: float) -> None:
        if not hasattr(shell, "kernel"):
            raise UsageError("%memreport --live needs a notebook: what a terminal has printed cannot be refreshed")
        self._publish, self._every_s = shell.display_pub.publish, every_s
        self._id = {"display_id": uuid4().hex}
        self._ended = threading.Event()
        self._shown: dict[str, str] = {}
        if not reserve.has_room(reserve.FOR_THREAD):
            raise NotAvailable("%memreport --live needs a thread, and no memory is left for one")
        self._show(f"Refreshed every {every_s:g} s; `%memreport --live off` ends it.", update=False)
        # In the context of its cell, by which newer kernels know where an output belongs.
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._go_on,), name="oomdoctor-live", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Leave the output as it is, and say that it has ended."""
        self._ended.set()
        with suppress(RuntimeError):  # of a thread that is no more, in a copy of this process
            self._thread.join(_LONGEST_S)
        quietly(lambda: self._show("Stopped: these numbers are the last."))

    def _go_on(self) -> None:
        while not self._ended.wait(self._every_s):
            quietly(lambda: self._show(f"Refreshed every {self._every_s:g} s; `%memreport --live off` ends it."))

    def _show(self, state: str, *, update: bool = True) -> None:
        from oomdoctor.views.memory_report import live
        from oomdoctor.views.mime import live_bundle

        shown = live_bundle(live(readings(), state))
        if shown != self._shown:
            self._shown = shown
            self._publish(shown, {}, transient=self._id, update=update)


def readings() -> list[Usage]:
    """Return the counters of each memory; of the host also its limit, and what is in use below that."""
    from oomdoctor.evidence import host

    *devices, last = pipeline.memories(beside=True)
    capacity, free, _ = host.binding_limit(host.read(in_full=False))
    return [*(one.usage() for one in devices), last.usage()._replace(reserved=capacity - free, limit=capacity)]
