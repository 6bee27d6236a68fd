"""The way into the main thread: where an error may be raised, and that it is raised there."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from oomdoctor.errors import HostMemoryPressure
from oomdoctor.guard.gauge import GROUP, Reading
from oomdoctor.guard.interrupt import Interrupt, may_raise
from oomdoctor.incident import find_oom, from_exception
from oomdoctor.model.incident import Family

MIB = 1 << 20
FULL = Reading(limit=512 * MIB, used=500 * MIB, usage=510 * MIB, swap=0, name=GROUP)
SHELL = "/site-packages/IPython/core/interactiveshell.py"
OURS = may_raise.__code__.co_filename
FIX = OURS.replace("/guard/interrupt.py", "/fixes/_forward.py")


def named(filename: str, name: str) -> Callable[[Callable[[], Any]], Any]:
    """A function of this name in a file of this name, which calls what it is given."""
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(do):\n    return do()", filename, "exec"), made)
    return made[name]  # type: ignore[no-any-return]


def asked_within(*frames: tuple[str, str]) -> bool:
    """Whether an error may be raised below frames of these files and names, outermost first."""
    answer: Callable[[], Any] = lambda: may_raise(sys._getframe(1))  # noqa: E731
    for filename, name in reversed(frames):
        answer = lambda filename=filename, name=name, inner=answer: named(filename, name)(inner)  # noqa: E731
    return bool(answer())


@pytest.mark.parametrize(
    ("frames", "may"),
    [
        ([("/x/kernel.py", "loop"), (SHELL, "run_code"), ("<ipython-input-1>", "cell")], True),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), ("/lib/numpy/ones.py", "ones")], True),
        ([(OURS, "around"), (SHELL, "run_code"), ("<ipython-input-1>", "cell")], True),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), (OURS, "hook"), ("/lib/torch/x.py", "f")], False),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), (FIX, "forward"), ("/lib/torch/x.py", "f")], True),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), ("<frozen importlib._bootstrap>", "load")], False),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), ("/mine.py", "__del__")], False),
        ([(SHELL, "run_code"), ("<ipython-input-1>", "cell"), ("/lib/zmq/sugar/socket.py", "send")], False),
        ([("/x/kernel.py", "loop"), ("/lib/asyncio/events.py", "callback")], False),
    ],
)
def test_where_an_error_may_be_raised(frames: list[tuple[str, str]], may: bool) -> None:
    # What is called in the end stands in this file, as code of the user's would.
    assert asked_within(*frames) is may


def test_run_code_itself_is_left_alone() -> None:
    seen: list[bool] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "run_code":
            seen.append(may_raise(frame))

    sys.setprofile(look)
    named(SHELL, "run_code")(lambda: None)
    sys.setprofile(None)
    assert seen == [False]


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    found = Interrupt()
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


def test_it_never_raises_outside_of_a_cell(interrupt: Interrupt) -> None:
    threading.Timer(0.01, interrupt.send, [FULL]).start()
    time.sleep(0.1)
    interrupt.cancel()
    assert interrupt.raised == 0


def test_without_a_signal_the_interpreter_is_asked() -> None:
    interrupt = Interrupt()

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
        other = Interrupt()
        other.install()
        assert other.signal not in (None, number)
        other.remove()
        interrupt.remove()
        assert signal.getsignal(number) is signal.SIG_DFL


def test_its_figures_are_those_of_the_incident() -> None:
    interrupt = Interrupt()
    interrupt._pending = None
    error = HostMemoryPressure("host memory is about to run out")
    error.used, error.limit = 500 * MIB, 512 * MIB
    assert find_oom(error) is error
    found = from_exception(error, {})
    assert (found.family, found.device, found.total, found.free) == (Family.HOST, "cpu", 512 * MIB, 12 * MIB)
    error.used = "all"  # type: ignore[assignment]
    assert from_exception(error, {}).free is None
