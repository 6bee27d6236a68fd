"""This process and those that it started: workers of real loaders, forks, subprocesses, and ones that have ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from trees import GIB, MIB

from oomdoctor.evidence import _processes
from oomdoctor.model.memory import HostProcess
from oomdoctor.model.unavailable import Unavailable

LOADERS = """\
import json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from oomdoctor.evidence import host

train_set, held_out = TensorDataset(torch.zeros(64, 4)), TensorDataset(torch.zeros(64, 4))

def main(context):
    global train_loader, other_loader
    other_loader = DataLoader(train_set, num_workers=1)
    train_loader = DataLoader(train_set, num_workers=2, multiprocessing_context=context)
    unnamed = [DataLoader(held_out, num_workers=2, multiprocessing_context=context)]
    first = iter(train_loader); next(first)
    second = iter(unnamed[0]); next(second)
    children = host.read().children
    workers = {index: worker.pid for index, worker in enumerate(first._workers)}
    print(json.dumps({
        "labels": {child.pid: child.label for child in children},
        "sizes": {child.pid: [child.rss, child.uss, child.pss] for child in children},
        "first": workers, "second": second._workers[0].pid,
    }), flush=True)

if __name__ == "__main__":
    main(sys.argv[1])
"""


def loaders(tmp_path: Path, context: str) -> dict[str, Any]:
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    done = subprocess.run([sys.executable, str(script), context], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.thorough)])
def test_the_workers_of_a_real_loader_are_known_by_their_place_and_loader(tmp_path: Path, context: str) -> None:
    found = loaders(tmp_path, context)
    labels = found["labels"]
    assert labels[str(found["first"]["0"])] == "DataLoader worker 0 of train_loader"
    assert labels[str(found["first"]["1"])] == "DataLoader worker 1 of train_loader"
    assert labels[str(found["second"])] == "DataLoader worker 0"
    helpers = {label for label in labels.values() if not label.startswith("DataLoader")}
    assert helpers <= {"multiprocessing resource tracker", "multiprocessing fork server"}
    assert ("multiprocessing fork server" in helpers) == (context == "forkserver")
    for rss, uss, pss in found["sizes"].values():
        assert 0 < uss <= pss <= rss


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def child(pid: int, **options: Any) -> HostProcess:
    children = _processes.read(**options).children
    assert isinstance(children, tuple)
    return next(one for one in children if one.pid == pid)


def spawn(started: list[subprocess.Popen[bytes]], *command: str) -> int:
    """Start a process that says so and then waits."""
    started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stdout = started[-1].stdout
    assert stdout is not None
    with stdout:
        stdout.readline()
    return started[-1].pid


SCRIPT = """\
import time
kept = bytearray({size})
kept[::4096] = b"x" * len(kept[::4096])
print(flush=True)
time.sleep(600)
"""


def test_a_process_is_called_by_its_command_line_and_has_its_size(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(size=64 * MIB))
    found = child(spawn(started, sys.executable, str(tmp_path / "train.py")))
    assert found.label.startswith(f"{Path(sys.executable).name} {tmp_path}"[:40])
    assert isinstance(found.uss, int)
    assert 64 * MIB < found.uss < 100 * MIB


def test_a_command_line_is_cut_and_shows_neither_control_characters_nor_secrets(
    started: list[subprocess.Popen[bytes]],
) -> None:
    arguments = ["--token", "hf_abc", "--api-key=sk-123", "\x1b[31m", "x" * 200]
    pid = spawn(started, "sh", "-c", "echo; read x", *arguments)
    label = child(pid).label
    assert label == "sh -c echo; read x --token … --api-key=…  [31m xxxxxxxxxxxx…"
    assert len(label) == 60


def test_the_largest_comes_first(started: list[subprocess.Popen[bytes]]) -> None:
    sizes = [8 * MIB, 64 * MIB, 32 * MIB]
    pids = [spawn(started, sys.executable, "-c", SCRIPT.format(size=size)) for size in sizes]
    children = _processes.read().children
    assert isinstance(children, tuple)
    assert [one.pid for one in children if one.pid in pids] == [pids[1], pids[2], pids[0]]


def test_a_process_of_multiprocessing_has_its_name_there() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="Fetcher")
    process.start()
    try:
        assert child(process.pid or 0).label == "Fetcher (multiprocessing)"
    finally:
        process.kill()
        process.join()


def test_a_fork_shares_its_pages_and_is_called_a_fork() -> None:
    shared = bytearray(64 * MIB)
    shared[::4096] = b"x" * len(shared[::4096])
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    try:
        found = child(pid)
        assert found.label == "fork of this process"
        assert isinstance(found.rss, int)
        assert isinstance(found.uss, int)
        assert isinstance(found.pss, int)
        assert found.uss + 64 * MIB < found.rss
        assert found.uss < found.pss < found.rss - 32 * MIB
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(pid, 0)


def test_one_that_was_killed_and_not_reaped_is_told_as_ended(started: list[subprocess.Popen[bytes]]) -> None:
    pid = spawn(started, sys.executable, "-c", SCRIPT.format(size=MIB))
    process = psutil.Process(pid)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    found = child(pid)
    assert found.label.endswith("(ended)")
    assert found.rss == found.uss == found.pss == Unavailable("it has ended and holds no memory")


def test_one_that_ends_while_it_is_looked_at_is_left_out(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    staying = spawn(started, sys.executable, "-c", SCRIPT.format(size=MIB))
    leaving = spawn(started, sys.executable, "-c", SCRIPT.format(size=MIB))
    name = psutil.Process.name

    def ends(process: psutil.Process) -> str:
        if process.pid == leaving and started[1].returncode is None:
            started[1].kill()
            started[1].wait()
        return name(process)

    monkeypatch.setattr(psutil.Process, "name", ends)
    children = _processes.read().children
    assert isinstance(children, tuple)
    assert staying in {one.pid for one in children}
    assert leaving not in {one.pid for one in children}


def test_looking_reaps_nothing() -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    process.start()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert child(process.pid or 0).label == f"{process.name} (multiprocessing) (ended)"
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    process.join()
    assert process.exitcode == 7


def test_what_would_take_too_long_is_not_walked(started: list[subprocess.Popen[bytes]]) -> None:
    pid = spawn(started, sys.executable, "-c", SCRIPT.format(size=64 * MIB))
    rss = psutil.Process().memory_info().rss
    found = _processes.read(most_walked=rss + 32 * MIB)
    assert isinstance(found.uss, int)
    assert isinstance(found.children, tuple)
    large = next(one for one in found.children if one.pid == pid)
    assert isinstance(large.rss, int)
    assert large.uss == large.pss == Unavailable("walking that much resident memory would take too long")
    assert isinstance(_processes.read(most_walked=MIB).uss, Unavailable)


def test_what_may_be_walked_is_for_all_processes_together(started: list[subprocess.Popen[bytes]]) -> None:
    pids = [spawn(started, sys.executable, "-c", SCRIPT.format(size=size)) for size in (96 * MIB, 64 * MIB)]
    room = psutil.Process().memory_info().rss + 140 * MIB
    assert isinstance(child(pids[0], most_walked=room).uss, int)
    assert isinstance(child(pids[1], most_walked=room).uss, Unavailable)
    assert isinstance(child(pids[1], most_walked=16 * GIB).uss, int)


def test_a_system_that_forbids_and_tells_less_is_survived(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = spawn(started, sys.executable, "-c", SCRIPT.format(size=MIB))

    def denied(self: psutil.Process) -> Any:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    monkeypatch.setattr(psutil.Process, "cmdline", denied)
    found = _processes.read()
    assert isinstance(found.rss, int)
    assert isinstance(found.uss, Unavailable)
    assert child(pid).label == psutil.Process(pid).name()
