"""Memory that is kept back is there when it is let go, is in no copy of the process, and in no figure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomdoctor.evidence import host
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.sandbox import reserve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    reserve.let_go()
    yield
    reserve.let_go()


def in_use(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize(("populated", "counted"), [(False, "VmData"), (True, "VmRSS")])
def test_it_takes_what_the_limit_counts_and_gives_it_back(populated: bool, counted: str) -> None:
    before = in_use(counted)
    size = reserve.take(4 * GIB, 4 * GIB, populated=populated)
    assert size >= 64 * MIB
    assert in_use(counted) - before > 0.9 * size
    assert reserve.take(4 * GIB, 4 * GIB, populated=populated) == size, "there is one"
    reserve.let_go()
    assert in_use(counted) - before < 0.1 * size
    assert reserve.address_space() == reserve.resident() == 0


def test_a_little_stays_until_the_failure_was_answered_and_is_kept_anew_after() -> None:
    before = in_use("VmData")
    size = reserve.take(4 * GIB, 4 * GIB, populated=False)
    for _ in range(2):
        reserve.let_go(keep=reserve.FOR_MESSAGES)
        assert reserve.address_space() == reserve.FOR_MESSAGES
        assert reserve.released() == size - reserve.FOR_MESSAGES
    assert reserve.take(4 * GIB, 4 * GIB, populated=False) == reserve.address_space() == size
    reserve.let_go(keep=reserve.FOR_MESSAGES)
    reserve.let_go()
    assert reserve.address_space() == 0
    assert reserve.released() == size
    assert in_use("VmData") - before < 0.1 * size


@pytest.mark.parametrize(("free", "limit"), [(64 * MIB, 64 * GIB), (64 * GIB, 256 * MIB)])
def test_most_of_what_a_limit_leaves_is_the_users(free: int, limit: int) -> None:
    assert 0 < reserve.take(free, limit, populated=False) <= min(free / 2, limit / 8)


def test_of_next_to_nothing_nothing_is_kept() -> None:
    assert reserve.take(4 * MIB, GIB, populated=False) == 0


def test_no_figure_counts_it() -> None:
    before = host.read()
    size = reserve.take(4 * GIB, 4 * GIB, populated=True)
    after = host.read()
    for name in ("process_used", "rss", "uss"):
        one, other = getattr(before, name), getattr(after, name)
        assert abs(one - other) < 0.2 * size, name


def test_a_forked_copy_has_none_and_lets_go_of_nothing() -> None:
    before = in_use("VmData")
    size = reserve.take(4 * GIB, 4 * GIB, populated=False)
    address = reserve._own()[0]
    child = os.fork()
    if not child:
        is_free = in_use("VmData") - before < 0.1 * size and reserve.address_space() == 0
        # What the copy has put there itself stays.
        libc = reserve._libc()
        libc.mmap(address, 1 << 12, 3, 0x32, -1, 0)  # MAP_FIXED
        reserve.let_go()
        stays = f"\n{address:x}-" in Path("/proc/self/maps").read_text()
        os._exit(0 if is_free and stays else 1)
    assert os.waitpid(child, 0)[1] == 0


INTERRUPTED = """
import signal, sys, threading
from oomdoctor.sandbox import reserve
libc, given = reserve._libc(), []
unmap = libc.munmap
def noted(address, size):
    given.append((address, size))
    unmap(address, size)
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
libc.munmap = noted
reserve.take(4 << 30, 4 << 30, populated=True)
def go(barrier=threading.Barrier(16)):
    barrier.wait()
    reserve.let_go(keep=reserve.FOR_MESSAGES)
    reserve.let_go()
if "interrupt" in sys.argv:
    for _ in range(3):
        try:
            reserve.let_go(keep=reserve.FOR_MESSAGES)
            reserve.let_go()
        except KeyboardInterrupt:
            pass
else:
    threads = [threading.Thread(target=go) for _ in range(16)]
    [one.start() for one in threads], [one.join() for one in threads]
print(len(given) == len(set(given)), sum(size for _, size in given) >> 20, reserve.address_space(), reserve.resident())
"""


@pytest.mark.parametrize("how", ["interrupt", "threads"])
def test_nothing_is_given_back_twice(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, how], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "96", "0", "0"]


LIMITED = """
import resource
from oomdoctor.sandbox import reserve
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, resource.RLIM_INFINITY))
free, limit = reserve.of_process()
assert limit == 1 << 30 and 0 < free < limit
reserve.take(free, limit, populated=False)
kept = []
try:
    while True:
        kept.append(bytearray(1 << 20))
except MemoryError:
    reserve.let_go()
    more = [bytearray(1 << 20) for _ in range(72)]
assert reserve.has_room(reserve.FOR_THREAD)
try:
    while True:
        kept.append(bytearray(1 << 20))
except MemoryError:
    assert not reserve.has_room(reserve.FOR_THREAD)
print("done")
"""


def test_what_was_kept_back_can_be_had_when_memory_has_run_out() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert run.stdout == "done\n", run.stderr
