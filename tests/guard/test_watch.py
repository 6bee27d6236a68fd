"""The guard of a shell: its limit while a cell runs, its thread, its copies, and that nothing of it is left behind."""

from __future__ import annotations

import mmap
import os
import resource
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import spawnv_passfds  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.guard import watch as module
from oomdoctor.guard.black_box import Now, opened, place
from oomdoctor.guard.gauge import GROUP, Reading
from oomdoctor.guard.watch import Terms, Watch
from oomdoctor.sandbox import data_limit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
MIB = 1 << 20
SHELL = "/site-packages/IPython/core/interactiveshell.py"


def reading(free: int, limit: int = 1024 * MIB) -> Reading:
    return Reading(limit=limit, used=limit - free, usage=limit - free, swap=0, name=GROUP)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch(lambda: Terms(mode="on"), globals())
    monkeypatch.setattr(found.gauge, "read", lambda: reading(256 * MIB))
    found.begin()
    yield found
    found.end()


def soft() -> int:
    """The limit that is in force: a program is told its own."""
    return data_limit.getrlimit(resource.RLIMIT_DATA)[0]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Hold the body to leaving limit, handlers of signals and threads as they were."""

    def state() -> tuple[Any, ...]:
        numbers = sorted(signal.valid_signals())
        threads = {one.name for one in threading.enumerate() if one.name.startswith("oomdoctor")}
        return data_limit.getrlimit(resource.RLIMIT_DATA), [signal.getsignal(one) for one in numbers], threads

    before = state()
    yield
    assert state() == before


def run(watch: Watch, do: Any = lambda: None) -> None:
    """Run something as the cell of a shell, to its end."""
    made: dict[str, Any] = {}
    exec(compile("def run_code(do):\n    return do()", SHELL, "exec"), made)
    watch.arm(1, "do()")
    try:
        made["run_code"](do)
    except BaseException:
        watch.raised()
        raise
    finally:
        watch.end_cell()
        watch.settle()


def test_the_limit_is_there_in_a_cell_and_after_it_until_the_guard_is_off(watch: Watch) -> None:
    before, seen = soft(), []
    run(watch, lambda: seen.append(soft()))
    assert seen[0] != before
    assert seen[0] + 32 * MIB <= soft() <= seen[0] + 64 * MIB, "the margin is the kernel's own"
    watch.terms = lambda: Terms(mode="off")
    run(watch, lambda: seen.append(soft()))
    assert seen[1] == soft() == before


def test_a_nearer_limit_of_the_users_leaves_the_margin_to_what_is_beyond_it(watch: Watch) -> None:
    reading = watch.gauge.read()
    assert reading is not None
    whole = watch.margin()
    assert whole > 0
    assert watch.margin(reading.free + MIB) == whole
    assert 0 < watch.margin(reading.free - whole // 2) < whole
    assert watch.margin(reading.free - 2 * whole) == 0


def fails_and_is_answered(watch: Watch) -> None:
    """A cell that raises: what answers it has more room than the cell had, and the next one has not."""
    before = soft()
    watch.arm(1, "x")
    in_cell = soft()
    watch.raised()
    assert soft() >= in_cell + 32 * MIB, "the margin is the answer's"
    watch.end_cell()
    assert soft() >= in_cell + 32 * MIB, "the answer goes on after the cell"
    watch.settle()
    watch.arm(2, "y")
    assert soft() <= in_cell + MIB, "the margin is kept again"
    watch.lift()
    assert soft() == before, "the limit was not lifted"


def test_the_limit_is_lifted_when_the_cell_has_raised(watch: Watch) -> None:
    fails_and_is_answered(watch)


@pytest.mark.parametrize("sabotaged", ["lift", "raised"])
def test_a_guard_that_does_not_lift_its_limit_is_caught(
    watch: Watch, sabotaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(watch, sabotaged, lambda: None)
        with pytest.raises(AssertionError):
            fails_and_is_answered(watch)


def test_an_attempt_after_the_failure_is_guarded_again(watch: Watch) -> None:
    watch.arm(1, "x")
    in_cell = soft()
    watch.raised()
    assert watch.arm(1, "changed")
    assert soft() <= in_cell + MIB


def test_work_of_ours_within_a_cell_has_room_of_its_own(watch: Watch) -> None:
    watch.arm(1, "x")
    in_cell = soft()
    with watch.at_work():
        assert soft() >= in_cell + 32 * MIB
        with watch.at_work():  # of another thread
            pass
        time.sleep(0.1)
        assert soft() >= in_cell + 32 * MIB, "the thread keeps it so"
    assert soft() <= in_cell + MIB


def test_work_of_ours_takes_no_share_of_what_is_left_each_time(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(64 * MIB))
    watch.arm(1, "x")
    watch.raised()
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(10 * MIB))  # threads have filled the rest
    with watch.at_work():
        pass
    process = watch.gauge.process()
    assert process is not None
    assert soft() <= process[0] + 4 * MIB


def test_what_a_program_asks_for_and_sets_is_its_own(watch: Watch) -> None:
    own = data_limit.getrlimit(resource.RLIMIT_DATA)
    watch.arm(1, "x")
    ours = data_limit.getrlimit(resource.RLIMIT_DATA)
    assert ours != own
    assert resource.getrlimit(resource.RLIMIT_DATA) == resource.prlimit(0, resource.RLIMIT_DATA) == own
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, own[1]))
    assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, own[1])
    assert soft() == pytest.approx(ours[0], abs=MIB), "ours holds on"
    data_limit.setrlimit(resource.RLIMIT_DATA, ours)  # as one does who has it from before, by another way
    watch.settle()
    watch.lift()
    assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, own[1])
    resource.setrlimit(resource.RLIMIT_DATA, own)


def test_threads_that_wait_take_no_room(watch: Watch) -> None:
    end = threading.Event()
    watch.arm(1, "x")
    before = soft()
    threads = [threading.Thread(target=end.wait) for _ in range(60)]
    try:
        for thread in threads:
            thread.start()  # 480 MiB are mapped for their stacks
        assert soft() >= before + 300 * MIB
        with pytest.raises(OSError, match="Cannot allocate"):
            mmap.mmap(-1, 300 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    finally:
        end.set()
        for thread in threads[: sum(one.ident is not None for one in threads)]:
            thread.join()


def test_a_cell_beside_another_is_not_guarded_by_itself(watch: Watch) -> None:
    assert watch.arm(1, "x")
    assert not watch.arm(2, "y")
    watch.settle()


def test_the_thread_follows_what_is_free(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.arm(1, "x")
    first = soft()
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(640 * MIB))
    end = time.monotonic() + 20
    while soft() < first + 300 * MIB and time.monotonic() < end:
        time.sleep(0.01)
    assert soft() >= first + 300 * MIB
    watch.settle()


def test_memory_that_fills_by_itself_interrupts_the_cell(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills() -> None:
        monkeypatch.setattr(watch.gauge, "read", lambda: reading(8 * MIB))
        time.sleep(20)

    began = time.monotonic()
    with pytest.raises(HostMemoryPressure):
        run(watch, fills)
    assert time.monotonic() - began < 15


def test_a_memory_that_is_full_already_lets_a_cell_free_it(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(8 * MIB))
    run(watch, lambda: time.sleep(0.2))
    assert watch.interrupt.raised == 0


def test_a_cell_that_goes_on_is_interrupted_again_only_when_it_takes_more(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def catches() -> None:
        monkeypatch.setattr(watch.gauge, "read", lambda: reading(8 * MIB))
        with pytest.raises(HostMemoryPressure):
            time.sleep(20)
        time.sleep(0.2)

    run(watch, catches)
    assert watch.interrupt.raised == 1


def test_between_cells_the_thread_looks_by_the_time_that_the_process_works(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(8 * MIB))
    run(watch)
    time.sleep(0.3)
    looks = watch.looks
    time.sleep(1)
    assert watch.looks - looks <= 5, "nothing runs"
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    assert watch.looks - looks >= 10, "each 10 ms near the limit"
    looks = watch.looks
    watch.arm(2, "waits")
    time.sleep(1)
    assert watch.looks - looks >= 10, "within a cell others may fill the memory"


def test_while_the_main_thread_waits_for_a_command_others_are_refused(watch: Watch) -> None:
    watch.arm(1, "x")
    limits: list[int] = []
    thread = threading.Timer(0.2, lambda: limits.append(soft()))
    in_cell = soft()
    thread.start()
    os.system("sleep 1")
    assert limits == [pytest.approx(in_cell, abs=16 * MIB)]


def test_a_copy_has_no_limit_and_goes_first(watch: Watch) -> None:
    reads, writes = os.pipe()
    watch.arm(1, "x")
    score = int(Path("/proc/self/oom_score_adj").read_text())
    pid = os.fork()
    if pid == 0:
        told = f"{soft()} {Path('/proc/self/oom_score_adj').read_text().strip()}"
        os.write(writes, told.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    inherited, now = os.read(reads, 100).split()
    os.close(reads)
    os.close(writes)
    assert soft() != int(inherited)
    watch.lift()
    assert soft() == int(inherited)
    assert int(now) == min(score + 500, 1000)


TELLS_LIMIT = """
import resource, sys
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrlimit(resource.RLIMIT_DATA)[0]))
"""


def command(path: Path) -> list[str]:
    return [sys.executable, "-S", "-c", TELLS_LIMIT, str(path)]


STARTS: dict[str, Callable[[Path], Any]] = {
    "subprocess": lambda path: subprocess.run(command(path), check=True),
    "posix_spawn": lambda path: subprocess.run(command(path), check=True, close_fds=False),
    "system": lambda path: os.system(shlex.join(command(path))),
    "multiprocessing": lambda path: os.waitpid(
        spawnv_passfds(sys.executable.encode(), list(map(os.fsencode, command(path))), []), 0
    ),
}


@pytest.mark.parametrize("way", STARTS)
def test_a_program_that_is_started_has_the_users_own_limit(watch: Watch, tmp_path: Path, way: str) -> None:
    before = soft()
    watch.arm(1, "x")
    STARTS[way](tmp_path / "told")
    in_cell = soft()
    watch.lift()
    assert int((tmp_path / "told").read_text()) == before != in_cell


def test_a_full_memory_is_looked_at_often_for_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Watch(lambda: Terms(mode="off"), globals())
    monkeypatch.setattr(found.gauge, "read", lambda: reading(8 * MIB))
    found.begin()
    found.record = opened(tmp_path, place())
    found.arm(1, "x")
    end = time.monotonic() + 20
    while found.looks < 5 and time.monotonic() < end:
        time.sleep(0.01)
    assert time.monotonic() < end - 16, "a second apart they would take longer"
    found.end()


def test_copies_that_were_killed_are_no_proof(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.record = opened(tmp_path, place())
    counter = iter([3, 3])
    monkeypatch.setattr(watch.gauge, "kills", lambda: next(counter, 5))
    watch.arm(1, "x")
    watch.raised()  # copies of the answer to it are killed
    end, looks = time.monotonic() + 20, watch.looks
    while watch.looks < looks + 3 and time.monotonic() < end:
        time.sleep(0.01)
    (path,) = tmp_path.iterdir()
    assert Now(*struct.unpack_from("<qqqqqqq240s", path.read_bytes())).kills == 5
    watch.settle()


def test_nothing_is_left_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        found = Watch(lambda: Terms(mode="on"), globals())
        monkeypatch.setattr(found.gauge, "read", lambda: reading(256 * MIB))
        found.begin()
        found.arm(1, "x")
        found.settle()
        found.end()


@pytest.mark.parametrize("mode", ["on", "off", "auto"])
def test_auto_is_on_where_a_limit_is_set_or_little_is_left(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Watch(lambda: Terms(mode=mode), globals())
    gauge = type(found.gauge)
    monkeypatch.setattr(gauge, "has_group_limit", property(lambda _: False))
    monkeypatch.setattr(module.reserve, "of_process", lambda: None)
    monkeypatch.setattr(found.gauge, "machine", lambda: reading(900 * MIB))
    assert found.is_on() is (mode == "on")
    monkeypatch.setattr(found.gauge, "machine", lambda: reading(100 * MIB))
    assert bool(found.why_on()) is (mode != "off")
    monkeypatch.setattr(gauge, "has_group_limit", property(lambda _: True))
    assert bool(found.why_on()) is (mode != "off")
    found.gauge.close()


def test_where_nothing_can_be_refused_a_cell_with_a_limit_is_interrupted(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "refuses", property(lambda _: False))
    grown = iter([100 * MIB])
    monkeypatch.setattr(module, "resident", lambda: next(grown, 400 * MIB))
    before = soft()
    watch.arm(1, "x", 128 * MIB)
    assert soft() == before
    made: dict[str, Any] = {}
    exec(compile("def run_code(do):\n    return do()", SHELL, "exec"), made)
    with pytest.raises(HostMemoryPressure, match="%%memlimit"):
        made["run_code"](lambda: time.sleep(20))
    watch.settle()


def test_a_cell_costs_less_than_a_tenth_of_a_millisecond_more_or_less(watch: Watch) -> None:
    took = []
    for at in range(300):
        began = time.perf_counter()
        watch.arm(at, "x")
        watch.end_cell()
        took.append(time.perf_counter() - began)
    assert sorted(took)[10] < 1e-3, "the benchmark measures it; this is ten times as much"


def test_beside_jittor_a_cell_is_interrupted_and_never_refused(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to memory that it was refused, which ends the process: also where a cell has just imported it."""
    before = soft()
    watch.arm(1, "import jittor")
    assert soft() != before
    monkeypatch.setitem(sys.modules, "jittor", type(sys)("jittor"))
    end = time.monotonic() + 20
    while soft() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert soft() == before
    watch.settle()
    watch.arm(2, "x")
    assert soft() == before
    monkeypatch.setattr(watch.gauge, "read", lambda: reading(0))
    watch.settle()
    watch.arm(3, "x")
    cell = watch._cell
    assert cell is not None
    cell.most = 0
    made: dict[str, Any] = {}
    exec(compile("def run_code(do):\n    return do()", SHELL, "exec"), made)
    with pytest.raises(HostMemoryPressure):
        made["run_code"](lambda: time.sleep(20))
    assert soft() == before
    watch.settle()
