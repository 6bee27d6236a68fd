"""The way into the main thread: where an error may be raised, and that it is raised there."""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.guard import interrupt as module
from oomdoctor.guard.gauge import GROUP, Reading
from oomdoctor.guard.interrupt import Interrupt, may_raise
from oomdoctor.incident import find_oom, from_exception
from oomdoctor.model.incident import Family

MIB = 1 << 20
FULL = Reading(limit=512 * MIB, used=500 * MIB, usage=510 * MIB, swap=0, name=GROUP)
SHELL = "/site-packages/IPython/core/interactiveshell.py"
OURS = may_raise.__code__.co_filename
CELLS: dict[str, Any] = {}
"""The namespace of the cells."""
FIX = OURS.replace("/guard/interrupt.py", "/fixes/_forward.py")


def named(filename: str, name: str) -> Callable[[Callable[[], Any]], Any]:
    """A function of this name in a file of this name, which calls what it is given."""
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(do):\n    return do()", filename, "exec"), made)
    return made[name]  # type: ignore[no-any-return]


def asked_within(*frames: tuple[str, str]) -> bool:
    """Whether an error may be raised below frames of these files and names, outermost first."""
    answer: Callable[[], Any] = lambda: may_raise(sys._getframe(1), CELLS)  # noqa: E731
    for filename, name in reversed(frames):
        answer = lambda filename=filename, name=name, inner=answer: named(filename, name)(inner)  # noqa: E731
    return bool(answer())


EVENTS = "/site-packages/IPython/core/events.py"
CELL = ("/mine/cell.py", "cell")


@pytest.fixture(autouse=True)
def files_of_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tests themselves be a library, whose frames are below everything here."""
    monkeypatch.setattr(module, "is_users_file", lambda path: path.startswith("/mine/"))


@pytest.mark.parametrize(
    ("frames", "may"),
    [
        ([("/x/kernel.py", "loop"), (SHELL, "run_code"), CELL], True),
        ([(SHELL, "run_code"), CELL, ("/lib/numpy/ones.py", "ones")], True),
        ([(OURS, "around"), (SHELL, "run_code"), CELL], True),
        ([(SHELL, "run_code"), CELL, (OURS, "hook"), ("/lib/torch/x.py", "f")], False),
        ([(SHELL, "run_code"), CELL, (FIX, "forward"), ("/lib/torch/x.py", "f")], True),
        ([(SHELL, "run_code"), CELL, ("<frozen importlib._bootstrap>", "load")], False),
        ([(SHELL, "run_code"), CELL, ("/mine/x.py", "__del__")], False),
        ([(SHELL, "run_code"), CELL, ("/lib/zmq/sugar/socket.py", "send")], False),
        ([("/x/kernel.py", "loop"), ("/lib/asyncio/events.py", "callback")], False),
        ([("/lib/ipykernel/kernelbase.py", "dispatch"), ("/lib/tornado/x.py", "f")], False),
        ([("/lib/ipykernel/kernelbase.py", "dispatch"), ("/mine/x.py", "on_click"), ("/lib/numpy/x.py", "f")], True),
        ([("/lib/asyncio/events.py", "_run"), ("/mine/x.py", "task")], True),
        ([("/mine/x.py", "task"), ("/lib/zmq/sugar/socket.py", "send")], False),
        ([(EVENTS, "trigger"), ("/lib/matplotlib_inline/backend_inline.py", "flush_figures")], True),
        ([(EVENTS, "trigger")], False),
        ([("/lib/threading.py", "_bootstrap"), ("/lib/pool.py", "wait")], False),
        ([("/lib/threading.py", "_bootstrap"), (OURS, "answer"), ("/mine/x.py", "forward")], False),
    ],
)
def test_where_an_error_may_be_raised(frames: list[tuple[str, str]], may: bool) -> None:
    assert asked_within(*frames) is may


def test_code_of_a_cell_is_known_by_its_namespace() -> None:
    made: dict[str, Any] = {"may_raise": may_raise, "sys": sys}
    exec(compile("def task():\n    return may_raise(sys._getframe(), globals())", "<of no file>", "exec"), made)
    assert made["task"]() is True
    assert may_raise(sys._getframe(), CELLS) is False


def test_run_code_itself_is_left_alone() -> None:
    seen: list[bool] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "run_code":
            seen.append(may_raise(frame, CELLS))

    sys.setprofile(look)
    named(SHELL, "run_code")(lambda: None)
    sys.setprofile(None)
    assert seen == [False]


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    found = Interrupt(CELLS)
    found.install()
    yield found
    found.remove()


def wait_in_a_cell(seconds: float) -> None:
    named(SHELL, "run_code")(lambda: time.sleep(seconds))


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="there are no real-time signals")
def test_the_handler_raises_at_the_line_that_waits(interrupt: Interrupt) -> None:
    began = time.monotonic()
    threading.Timer(0.05, interrupt.send, [FULL]).start()
    with pytest.raises(
        HostMemoryPressure, match=r"500 MiB of 512 MiB are in use, by the limit of the memory cgroup"
    ) as got:
        wait_in_a_cell(20)
    assert time.monotonic() - began < 10
    assert (got.value.used, got.value.limit, got.value.requested) == (500 * MIB, 512 * MIB, None)
    assert interrupt.raised == 1
    assert [step.name for step in traceback.extract_tb(got.value.__traceback__)][-2:] == ["run_code", "<lambda>"]


def test_a_thread_that_touches_memory_is_interrupted_and_one_that_waits_is_not(interrupt: Interrupt) -> None:
    ended: dict[str, BaseException] = {}
    end, release, is_waiting = time.monotonic() + 20, threading.Event(), threading.Event()

    def fills() -> None:
        while time.monotonic() < end:
            mmap.mmap(-1, 4 * MIB).write(bytes(4 * MIB))

    def noted(do: Callable[[], Any]) -> None:
        try:
            named("/mine/x.py", "work")(do)
        except MemoryError as exc:
            ended[do.__name__] = exc

    def waits() -> None:
        is_waiting.set()
        release.wait(20)

    threads = [threading.Thread(target=noted, args=(do,)) for do in (fills, waits)]
    for thread in threads:
        thread.start()

    def watches() -> None:
        while threads[0].is_alive():
            interrupt.send(FULL)
            time.sleep(0.01)

    is_waiting.wait(20)
    time.sleep(0.2)  # until it has no line of its own any more
    watcher = threading.Thread(target=watches)
    watcher.start()
    wait_in_a_cell(0.05)
    watcher.join()
    release.set()
    threads[1].join()
    assert set(ended) == {"fills"}
    assert "500 MiB of 512 MiB are in use" in str(ended["fills"])
    assert interrupt.raised == 1, "neither what waits nor the main thread, beside which it is filled"
    assert traceback.extract_tb(ended["fills"].__traceback__)[-1].filename == __file__


def test_it_never_raises_outside_of_a_cell(interrupt: Interrupt) -> None:
    threading.Timer(0.01, interrupt.send, [FULL]).start()
    time.sleep(0.1)
    interrupt.begin_anew()
    assert interrupt.raised == 0


def test_without_a_signal_the_interpreter_is_asked() -> None:
    interrupt = Interrupt(CELLS)

    def spin() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass

    threading.Timer(0.05, interrupt.send, [FULL]).start()
    with pytest.raises(HostMemoryPressure) as got:
        named(SHELL, "run_code")(spin)
    assert (got.value.used, got.value.limit) == (500 * MIB, 512 * MIB)


def test_the_signal_is_free_and_given_back(interrupt: Interrupt) -> None:
    number = interrupt.signal
    if number is not None:
        other = Interrupt(CELLS)
        other.install()
        assert other.signal not in (None, number)
        other.remove()
        interrupt.remove()
        assert signal.getsignal(number) is signal.SIG_DFL


def test_its_figures_are_those_of_the_incident() -> None:
    error = HostMemoryPressure("host memory is about to run out")
    error.used, error.limit = 500 * MIB, 512 * MIB
    assert find_oom(error) is error
    found = from_exception(error, {})
    assert (found.family, found.device, found.total, found.free) == (Family.HOST, "cpu", 512 * MIB, 12 * MIB)
    error.used = "all"  # type: ignore[assignment]
    assert from_exception(error, {}).free is None


def test_what_a_thread_was_asked_for_and_has_not_raised_is_taken_back(interrupt: Interrupt) -> None:
    """It waits where no error can reach it, and the memory may be free again when it goes on."""
    release, is_waiting, ended = threading.Event(), threading.Event(), list[str]()

    def waits() -> None:
        try:
            is_waiting.set()
            release.wait(20)
            ended.append("at its end")
        except MemoryError:
            ended.append("by an error")

    for takes_back in (False, True):
        release.clear()
        is_waiting.clear()
        thread = threading.Thread(target=waits)
        thread.start()
        is_waiting.wait(20)
        time.sleep(0.2)  # until it has no line of its own any more
        interrupt._told.add(thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(MemoryError))
        if takes_back:
            interrupt.begin_anew()
        release.set()
        thread.join()
    assert ended == ["by an error", "at its end"]
