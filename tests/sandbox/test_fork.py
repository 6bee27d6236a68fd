"""A forked copy shares no thread pool, no read position and no shared memory with the process that it is a copy of."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oomdoctor.sandbox.fork import forked, is_severed

LIMIT_S = 200


def in_copy(do: Callable[[], Any]) -> str:
    """Return what ``do`` returns in a forked copy, or the name of what it raises there; a signal's where it ends it."""
    reader, writer = os.pipe()
    pid = forked(keep={writer})
    if pid == 0:
        signal.alarm(LIMIT_S)  # what hangs ends by it
        try:
            said = repr(do())
        except BaseException as error:  # noqa: BLE001  nothing may leave the copy
            said = "severed" if is_severed(error) else repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        said = answers.read()
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said


@pytest.fixture
def pool() -> Any:
    """More threads than one, and a pool of OpenMP that has worked."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(64, 3072).clone()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("set_again", [False, True], ids=["as it is born", "after the program set threads"])
@pytest.mark.usefixtures("pool")
def test_what_is_parallel_runs_in_one_thread(set_again: bool) -> None:
    def do() -> Any:
        if set_again:
            torch.set_num_threads(2)
        before = len(list(Path("/proc/self/task").iterdir()))
        batch = torch.randn(64, 3072).clone() @ torch.randn(3072, 64)
        torch.nn.functional.batch_norm(torch.randn(8, 16, 64, 64), None, None, training=True)
        return tuple(batch.shape), len(list(Path("/proc/self/task").iterdir())) - before + torch.get_num_threads()

    assert in_copy(do) == f"((64, 64), {1 + set_again})"


def openmp() -> Any:
    """Return the runtime that torch brings along."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in maps if "libgomp" in line))


@pytest.mark.usefixtures("pool")
def test_nor_does_anybody_get_more_who_asks_for_more() -> None:
    def do() -> int:
        threads: list[int] = []
        region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: threads.append(threading.get_native_id()))
        openmp().GOMP_parallel(region, None, 2, 0)
        return len(threads)

    assert do() == 2
    assert in_copy(do) == "1"


@pytest.mark.parametrize("mode", ["rb", "rb+"])
def test_reading_a_file_moves_nobody_elses_position(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "frames"
    path.write_bytes(b"0123456789")
    with path.open(mode, buffering=0) as frames:
        frames.read(2)
        assert in_copy(lambda: frames.read(3)) == "b'234'"
        assert frames.read(1) == b"2"
        path.unlink()
        assert in_copy(lambda: frames.read(3)) == "b'345'"
        assert frames.read(1) == b"3"


def test_nor_does_listing_a_folder(tmp_path: Path) -> None:
    names = {f"{number:03}" for number in range(2000)}  # more than one call gives
    for name in names:
        (tmp_path / name).touch()
    with os.scandir(tmp_path) as entries:
        found = {next(entries).name}
        in_copy(lambda: len(list(entries)))
        assert found | {entry.name for entry in entries} == names


def test_a_pipe_cannot_be_read() -> None:
    with subprocess.Popen(["seq", "100"], stdout=subprocess.PIPE, bufsize=0) as counting:
        assert counting.stdout is not None
        assert counting.stdout.readline() == b"1\n"
        assert in_copy(counting.stdout.readline) == "severed"
        assert counting.stdout.readline() == b"2\n"
        counting.stdout.read()


def test_a_terminal_cannot_be_read() -> None:
    ours, theirs = os.openpty()
    os.write(ours, b"answer\n")
    assert in_copy(lambda: os.read(theirs, 1)) == "severed"
    assert os.read(theirs, 100) == b"answer\n"
    os.close(ours)
    os.close(theirs)


def test_a_queue_of_processes_cannot_be_read() -> None:
    queue: Any = multiprocessing.Queue()
    queue.put("kept")
    while queue.empty():
        time.sleep(0.01)
    assert in_copy(queue.get) == "severed"
    assert queue.get() == "kept"
    queue.close()
    queue.join_thread()


def test_what_has_no_position_stays_readable() -> None:
    with Path(os.devnull).open("rb+", buffering=0) as nothing, Path("/dev/zero").open("rb", buffering=0) as zeros:
        assert in_copy(lambda: (nothing.read(1), zeros.read(2))) == r"(b'', b'\x00\x00')"


def test_written_to_a_file_is_nothing(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert in_copy(lambda: log.write("x") and log.flush()) == "None"
    assert (tmp_path / "log").read_text() == ""


def shared_array(folder: Path) -> Any:
    np.zeros(10, dtype=np.uint8).tofile(folder / "mapped")
    return np.memmap(folder / "mapped", mode="r+")


SHARED: dict[str, Callable[[Path], Any]] = {
    "anonymous": lambda _: mmap.mmap(-1, 4096),
    "file": shared_array,
    "deleted file": lambda folder: (shared_array(folder), (folder / "mapped").unlink())[0],
    "shared tensor": lambda _: torch.zeros(10, dtype=torch.uint8).share_memory_().numpy(),
    "large shared tensor": lambda _: torch.zeros(100 << 20, dtype=torch.uint8).share_memory_().numpy(),
    "shared array": lambda _: np.frombuffer(multiprocessing.RawArray(ctypes.c_uint8, 10), dtype=np.uint8),
}


@pytest.mark.parametrize("kind", SHARED)
def test_shared_memory_can_be_written_to_and_nobody_sees_it(kind: str, tmp_path: Path) -> None:
    memory = SHARED[kind](tmp_path)
    memory[1] = 5

    def do() -> Any:
        memory[0] = 7
        return int(memory[0]), int(memory[1])

    assert in_copy(do) == "(7, 5)"
    assert (memory[0], memory[1]) == (0, 5)


def test_a_lock_of_processes_works_and_is_not_taken_from_others() -> None:
    lock = multiprocessing.Lock()
    assert in_copy(lock.acquire) == "True"
    assert lock.acquire(timeout=0)


def test_an_interrupt_within_a_hook_of_the_fork_is_not_lost() -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from oomdoctor.sandbox.fork import forked
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    forked() or os._exit(0)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("interrupted True\n", "")


def test_an_interrupt_at_the_fork_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, pids = os.fork, []

    def interrupted() -> int:
        pids.append(fork())
        if pids[0]:
            signal.raise_signal(signal.SIGINT)
        return pids[0]

    monkeypatch.setattr(os, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_copy(lambda: None)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], 0)


def test_the_thread_that_writes_the_history_lives_through_the_fork(tmp_path: Path) -> None:
    pytest.importorskip("IPython", minversion="9.2")
    from IPython.core.history import HistoryManager
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    place = Config({"HistoryManager": {"hist_file": str(tmp_path / "history.sqlite")}})
    manager = HistoryManager(shell=InteractiveShell.__new__(InteractiveShell), config=place)
    try:
        before = manager.save_thread
        assert in_copy(lambda: 1) == "1"
        assert manager.save_thread is before
        assert before is not None
        assert before.is_alive()
    finally:
        manager.close()
