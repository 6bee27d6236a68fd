"""What a cell's main thread does not do itself: its threads, and what runs when no cell does. Real memory cgroups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import memory_groups
import pytest
from kernels import Kernel
from test_in_a_group import start

SIZE = 640 << 20
BEGIN = """\
import asyncio, os, threading, time, traceback
import numpy as np
kept, mapped, ended, running = [], [], [], []
def pieces():
    while True:
        kept.append(np.ones(16 << 17))
def small_objects():
    while True:
        kept.append([len(kept), str(len(kept))])
def touches(parts=1, part=0):
    for a in mapped[part::parts]:
        a[:] = 1
def noted(fills, *given):
    try:
        fills(*given)
    except MemoryError as exc:
        ended.append(traceback.extract_tb(exc.__traceback__)[-1].filename)
        raise
def left(fills, *given):
    time.sleep(1)
    noted(fills, *given)
async def task(fills):
    await asyncio.sleep(1)
    noted(fills)
def threads(target, *fills, parts=3):
    started = [threading.Thread(target=target, args=(*fills, *given)) for given in shares(fills, parts)]
    for thread in started:
        thread.start()
    running.extend(thread.is_alive for thread in started)
    return started
def shares(fills, parts):
    return [(parts, part) if fills[0] is touches else () for part in range(parts)]
def leaves(do):
    running.append(lambda made=asyncio.create_task(task(do)): not made.done())
"""
MAPS = "mapped += [np.empty(2 << 17) for _ in range(100)]"
"""200 MiB that are touched later: three such cells map what no group here has."""
FIGURE = """\
%matplotlib inline
import matplotlib.pyplot as plt
plt.figure(figsize=(200, 200), dpi=100)
plt.plot([1, 2])
"""
AFTER = """\
def after():
    global fill
    if fill:
        do, fill = fill, None
        noted(do)
fill = None
get_ipython().events.register('post_execute', after)
"""


class Program(NamedTuple):
    """A cell beside which, or after which, something fills memory; ``maps``: cells before it that map."""

    cell: str
    maps: int = 0


PROGRAMS = {
    "threads of pieces": Program("for t in threads(noted, pieces): t.join()"),
    "threads of small objects": Program("for t in threads(noted, small_objects): t.join()"),
    "threads that touch": Program("for t in threads(noted, touches): t.join()", maps=3),
    "threads while the cell raises": Program("threads(noted, touches)\nraise MemoryError('mine')", maps=3),
    "pieces while the cell raises": Program("threads(noted, pieces)\nraise MemoryError('mine')"),
    "pieces beside os.system": Program("threads(noted, pieces)\nos.system('sleep 4')"),
    "threads that touch beside os.system": Program("threads(noted, touches)\nos.system('sleep 4')", maps=3),
    "a thread that was left": Program("threads(left, pieces, parts=1)"),
    "a thread that was left touches": Program("threads(left, touches, parts=1)", maps=3),
    "a task that was left": Program("leaves(pieces)"),
    "a task that was left makes small objects": Program("leaves(small_objects)"),
    "a task that was left touches": Program("leaves(touches)", maps=3),
    "a callback after the cell": Program("fill = pieces"),
    "a callback after the cell touches": Program("fill = touches", maps=3),
}

pytestmark = pytest.mark.skipif(not memory_groups.can_make_groups(), reason="it needs root and cgroup v1")


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_groups.group(SIZE) as folder:
        yield folder


@pytest.fixture
def kernel(group: Path, tmp_path: Path) -> Iterator[Kernel]:
    found = Kernel(start=partial(start, group, tmp_path))
    for cell in ("%load_ext oomdoctor", "%config OomDoctor.forecast_time_s = 0", BEGIN, AFTER):
        found.run(cell, ok=True)
    yield found
    found.stop()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_fills_memory_beside_a_cell_gets_an_error_and_the_kernel_lives(
    kernel: Kernel, group: Path, name: str
) -> None:
    program = PROGRAMS[name]
    for _ in range(program.maps):
        kernel.run(MAPS, ok=True)
    kernel.run(program.cell, timeout=60)
    end, is_over = time.monotonic() + 60, False
    while not is_over and time.monotonic() < end:
        time.sleep(0.2)
        with suppress(AssertionError):  # there may be no room to tell
            is_over = not kernel.value("any(is_running() for is_running in running)")
    assert memory_groups.kills(group) == 0
    kernel.run("kept.clear(); mapped.clear()", ok=True)
    ended = kernel.value("ended")
    assert ended, "somebody got the error"
    assert not any("oomdoctor" in file for file in ended), "their tracebacks end in code of theirs"
    assert kernel.run("6 * 7", ok=True).data("text/plain") == ["42"]


def test_a_figure_that_does_not_fit_is_an_error_of_its_callback(kernel: Kernel, group: Path) -> None:
    told = kernel.run(FIGURE, timeout=60)
    assert {error["ename"] for error in told.errors} <= {"MemoryError", "HostMemoryPressure"}
    assert told.errors
    assert "(for post_execute)" in told.text
    kernel.run("plt.close('all')", ok=True)
    assert memory_groups.kills(group) == 0


def test_a_hundred_threads_that_wait_are_not_refused(kernel: Kernel, group: Path) -> None:
    kernel.run("release = threading.Event()\nwaiting = [threading.Thread(target=release.wait) for _ in range(100)]")
    kernel.run("for t in waiting: t.start()", ok=True)
    assert kernel.run("big = np.ones(1024 << 17)", ok=False).errors[-1]["ename"] == "MemoryError"
    kernel.run("release.set()\nfor t in waiting: t.join()", ok=True)
    assert memory_groups.kills(group) == 0
