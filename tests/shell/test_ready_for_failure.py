"""What a failure needs is there before it: modules, threads, memory. What fails for want of memory loses no case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel
from memory_groups import can_make_groups

import oomdoctor
from oomdoctor.sandbox import reserve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

FAILS = "raise MemoryError('no room')"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell()
    made.history_manager.enabled = False
    oomdoctor.load_ipython_extension(made)
    yield made
    oomdoctor.unload_ipython_extension(made)


WARMED = """
import json, resource, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))
shell.run_cell("%load_ext oomdoctor")
begins = {begins!r}
shell.run_cell(begins)
warming = shell._oomdoctor_extension.warming
cells = 0
while not warming.done:
    shell.run_cell("pass")
    cells += 1
    assert cells < 1000
before = set(sys.modules)
shell.run_cell("x = [0.0]\\nnp.empty(1 << 50)")
case = __import__("oomdoctor").last_case()
loaded = sorted(set(sys.modules) - before)
print(json.dumps([loaded, len(case.findings), "torch" in sys.modules, cells]), file=sys.stderr)
"""


@pytest.mark.parametrize("begins", ["import numpy as np", "import numpy as np, torch\nmodel = torch.nn.Linear(4, 4)"])
def test_a_failure_loads_no_module_and_never_torch(begins: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WARMED.format(begins=begins)], capture_output=True, text=True, timeout=240
    )
    loaded, causes, has_torch, cells = json.loads(run.stderr.splitlines()[-1])
    # A table of character widths of rich is all that depends on what is shown.
    assert [name for name in loaded if not name.startswith("rich._unicode_data")] == []
    assert causes > 0
    assert has_torch is ("torch" in begins)
    assert cells > 1, "it is loaded in steps"


def test_loading_is_light_where_there_is_no_limit(shell: InteractiveShell) -> None:
    assert reserve.of_process() is None
    assert reserve.address_space() == 0


def test_in_a_kernel_no_thread_is_begun_by_a_failure(kernel: Kernel) -> None:
    kernel.run("import threading\n%config HistoryManager.db_cache_size = 0", ok=True)
    kernel.run("%load_ext oomdoctor", ok=True)
    assert kernel.value("__import__('zmq.utils.garbage', fromlist=['gc']).gc.is_alive()")
    kernel.run("import torch\n%oomdoctor simulate 64MiB\nmodel = torch.nn.Linear(64, 64)", ok=True)
    writer = "get_ipython().history_manager.save_thread"
    assert kernel.value(f"{writer}.is_alive()")
    failed = kernel.run("kept = [model(torch.ones(4096, 64)) for _ in range(100)]", ok=False)
    assert "Out of memory, case 1" in failed.text
    assert "dry run, " in failed.text, "this process was forked"
    assert kernel.value(f"{writer} is not None and {writer}.is_alive()")


def test_a_traceback_that_finds_no_memory_loses_no_case(shell: InteractiveShell, capsys: Any) -> None:
    with (
        mock.patch.object(shell.InteractiveTB, "structured_traceback", side_effect=MemoryError),
        mock.patch.object(traceback, "print_exc", side_effect=MemoryError),
    ):
        result = shell.run_cell(FAILS)
    assert isinstance(result.error_in_exec, MemoryError)
    case = oomdoctor.last_case()
    assert case is not None
    assert case.incident.message == "no room"
    assert "MemoryError: no room" in "".join(capsys.readouterr())


def failing(*_: Any, **__: Any) -> Any:
    raise MemoryError


def broken(*_: Any, **__: Any) -> Any:
    raise SystemError("error return without exception set")


@pytest.mark.parametrize(
    ("where", "fails"),
    [
        ("oomdoctor.evidence.census.take", failing),
        ("oomdoctor.evidence.collect.facts", failing),
        ("oomdoctor.evidence.collect.largest", failing),
        ("oomdoctor.evidence.host.read", failing),
        ("oomdoctor.evidence.collect.collect", failing),
        ("oomdoctor.forecast.ranking.Planning.__init__", failing),
        ("oomdoctor.pipeline.failure.diagnose", None),
        ("oomdoctor.views.bundle", failing),
    ],
)
def test_what_fails_for_want_of_memory_loses_no_diagnosis(
    shell: InteractiveShell, capsys: Any, where: str, fails: Callable[..., Any] | None
) -> None:
    import oomdoctor.evidence.census
    import oomdoctor.evidence.collect
    import oomdoctor.forecast.ranking
    import oomdoctor.views

    if fails is None:
        from oomdoctor.rulebook import RuleBook

        match = RuleBook.match

        def by_message_alone(self: Any, incident: Any, evidence: Any) -> Any:
            return match(self, incident, None) if evidence is None else broken()

        patched: Any = mock.patch.object(RuleBook, "match", by_message_alone)
    else:
        patched = mock.patch(where, fails)
    with patched:
        result = shell.run_cell(FAILS)
    case, shown = oomdoctor.last_case(), "".join(capsys.readouterr())
    assert isinstance(result.error_in_exec, MemoryError)
    assert case is not None
    assert case.incident.family == "host_oom"
    assert case.findings, shown
    assert "Out of memory" in shown
    assert "Host memory ran out" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
@pytest.mark.parametrize(("program", "way"), [("numpy", "with"), ("torch", "in a hurry")])
def test_at_the_limit_the_kernel_lives_answers_and_has_a_diagnosis(program: str, way: str) -> None:
    from starved import Run, observed

    seen = observed(Run(limit="data", program=program, piece=8, room=0, way=way))
    assert (seen.lived, seen.answered, seen.diagnosed) == (True, True, True), seen.why
    assert not seen.loaded_torch


HELD_FREE = """
import resource
from oomdoctor.evidence.host import HostAccelerator
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, resource.RLIM_INFINITY))
before = HostAccelerator().read().free
kept = [bytes(100_000) for _ in range(4_000)]
low = HostAccelerator().read().free
pin = bytes(100_000)
del kept
after = HostAccelerator().read().free
print(before - low, before - after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_what_malloc_holds_free_can_be_had() -> None:
    run = subprocess.run([sys.executable, "-c", HELD_FREE], capture_output=True, text=True, timeout=60, env=os.environ)
    taken, left = map(int, run.stdout.split())
    assert taken > 350 << 20, run.stderr
    assert left < 0.1 * taken


@pytest.mark.skipif(not can_make_groups(), reason="groups need root and cgroup v1")
def test_in_a_memory_cgroup_what_is_kept_back_leaves_room_for_the_next_cell() -> None:
    from starved import Run, observed

    seen = observed(Run(limit="group", program="numpy", piece=8, room=16, way="with"))
    assert (seen.lived, seen.answered, seen.diagnosed) == (True, True, True), seen.why


COLD = """
import numpy as np, resource
resource.setrlimit(resource.RLIMIT_DATA, ({used} + (24 << 20), resource.RLIM_INFINITY))
"""
USED = "int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize()"
FULL = "l = []\nwhile True:\n    l.append(np.ones(1 << 15))"


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_where_there_is_no_room_to_load_a_diagnosis_the_failure_is_the_users_and_one_line_says_so(
    kernel: Kernel,
) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(COLD.format(used=USED), ok=True)
    told = ""
    for _ in range(3):
        failed = kernel.run(FULL, ok=False)
        assert failed.content["ename"] in ("MemoryError", "_ArrayMemoryError")
        told += failed.stderr
    lines = [line for line in told.splitlines() if line.startswith("oomdoctor")]
    assert len(set(lines)) <= 4, "nothing is told anew at each cell, but that there is no diagnosis"
    assert not any("Traceback" in line for line in lines)
    kernel.run("l = None; resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)", ok=True)
    assert kernel.run("%oomdoctor retry").stderr.startswith("oomdoctor: no cell that ran out of memory was diagnosed")
    failed = kernel.run("np.ones(1 << 50)", ok=False)
    assert kernel.value("len(__import__('oomdoctor.pipeline', fromlist=['x']).cases())") == 1, "with room there is one"


UNTELLABLE = """
from oomdoctor.sandbox import reserve
kept = []
class Full(dict):
    def __setitem__(self, *_):
        kept.append(reserve.address_space())
        get_ipython().events.register("post_run_cell", ended)
        raise MemoryError("no room to keep it")
def ended(*_):
    kept.append(reserve.address_space())
    get_ipython().events.unregister("post_run_cell", ended)
get_ipython().history_manager.exceptions = Full()
"""
"""IPython has no room to keep an exception in its history."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_where_ipython_itself_has_no_room_what_is_kept_is_its(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor\nimport resource", ok=True)
    kernel.run("resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))", ok=True)
    kernel.run(UNTELLABLE, ok=True)
    assert "no room to keep it" in kernel.run("1 / 0", ok=False).text
    assert kernel.value("kept")[1:] == [0]
    assert kernel.value("kept")[0] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_what_large_blocks_leave_is_room_below_a_limit(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor\nimport numpy as np, resource", ok=True)
    kernel.run("resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))", ok=True)
    kernel.run(f"before = {USED}\nrows = [(np.ones(1 << 20), np.ones(1 << 16)) for _ in range(20)]", ok=True)
    kernel.run("kept = [small for _, small in rows]; del rows", ok=True)
    assert kernel.value(f"({USED} - before) >> 20") < 40, "of 160 MiB, between what stays"
    kernel.run("%unload_ext oomdoctor", ok=True)
    assert kernel.value("__import__('oomdoctor.sandbox.reserve', fromlist=['x']).address_space()") == 0
    kernel.run(f"before = {USED}\nrows = [(np.ones(1 << 20), np.ones(1 << 16)) for _ in range(20)]", ok=True)
    kernel.run("kept = [small for _, small in rows]; del rows", ok=True)
    assert kernel.value(f"({USED} - before) >> 20") > 100, "as it was without"
