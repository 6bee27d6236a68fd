"""Real kernels in real memory cgroups: what the kernel would kill raises at the user's line instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import memory_groups
import pytest
from kernels import Kernel, Reply

SIZE = 384 << 20
PIECES = "import numpy as np\nkept = []\nwhile True:\n    kept.append(np.ones(16 << 17))"
WORKERS = """\
import os, numpy as np
pids = []
for worker in range(3):
    if (pid := os.fork()) == 0:
        kept = []
        while True:
            kept.append(np.ones(4 << 17))
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""


pytestmark = pytest.mark.skipif(not memory_groups.can_make_groups(), reason="it needs root and cgroup v1")


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_groups.group(SIZE) as folder:
        yield folder


def start(folder: Path, home: Path, argv: list[str], env: dict[str, str], _cwd: str) -> Any:
    return memory_groups.started_in(folder, argv, {**env, "JUPYTER_RUNTIME_DIR": str(home)}, str(home))


@pytest.fixture
def begun(group: Path, tmp_path: Path) -> Iterator[Any]:
    kernels: list[Kernel] = []

    def begin(*cells: str) -> Kernel:
        kernels.append(Kernel(start=partial(start, group, tmp_path)))
        for cell in cells:
            kernels[-1].run(cell, ok=True)
        return kernels[-1]

    yield begin
    for kernel in kernels:
        kernel.stop()


def dies(kernel: Kernel, cell: str) -> None:
    """Run a cell that ends the kernel."""
    kernel._client.execute(cell)
    process: Any = kernel._process
    assert process.wait(timeout=120) != 0


def at_line(reply: Reply, text: str) -> bool:
    return any("-> " in line and text in line for line in reply.text.splitlines())


def test_the_cell_raises_and_the_kernel_lives(begun: Any) -> None:
    kernel = begun("%load_ext oomdoctor", "%config OomDoctor.forecast_time_s = 0")
    failed = kernel.run(PIECES, ok=False)
    assert failed.errors[0]["ename"] == "MemoryError"
    assert at_line(failed, "kept.append")
    assert "list: " in failed.text
    assert "In[3] line 4 makes it grow" in failed.text
    assert kernel.value("'torch' in __import__('sys').modules") is False
    kernel.run("kept.clear()\nmore = np.ones(64 << 17)", ok=True)
    one = kernel.run("a = np.ones(2048 << 17)", ok=False)
    assert one.errors[0]["ename"] == "MemoryError"
    assert kernel.run("6 * 7", ok=True).data("text/plain") == ["42"]


def test_workers_that_fill_the_group_interrupt_the_cell(begun: Any) -> None:
    kernel = begun("%load_ext oomdoctor", "%config OomDoctor.forecast_time_s = 0")
    failed = kernel.run(WORKERS, ok=False)
    assert failed.errors[0]["ename"] == "HostMemoryPressure"
    assert at_line(failed, "os.waitpid")
    kernel.run("import signal\nfor pid in pids:\n    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)")
    assert kernel.run("6 * 7", ok=True).data("text/plain") == ["42"]


def test_the_next_kernel_tells_once_what_became_of_one_that_was_killed(begun: Any, group: Path) -> None:
    first = begun("%load_ext oomdoctor", "%oomdoctor guard off")
    dies(first, PIECES)
    assert memory_groups.kills(group) == 1, "without the guard it is killed"
    second = begun()
    told = second.run("%load_ext oomdoctor", ok=True).stdout
    assert told.startswith("oomdoctor: The OOM killer ended the last kernel in In[3], line 4: `kept.append(")
    assert "The kill counter of this group rose by 1 after its last look." in told
    assert second.run("%reload_ext oomdoctor", ok=True).stdout == ""
    dies(second, "import os\nos.abort()")
    assert "Something else than the OOM killer ended" in begun().run("%load_ext oomdoctor", ok=True).stdout


def test_a_kernel_that_ends_as_it_should_leaves_no_record(begun: Any, tmp_path: Path) -> None:
    kernel = begun("%load_ext oomdoctor", "x = 1")
    assert list((tmp_path / "oomdoctor").iterdir())
    with suppress(Empty):
        kernel._client.shutdown()
    process: Any = kernel._process
    process.wait(timeout=60)
    assert list((tmp_path / "oomdoctor").iterdir()) == []
