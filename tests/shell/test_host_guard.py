"""The guard's surface in a real kernel: its verb, its settings, and the limit above a cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from kernels import Kernel

from oomdoctor.shell.host_guard import as_it_runs, ceiling_of

GIB = 1 << 30
LIMIT = "__import__('oomdoctor.sandbox.data_limit').sandbox.data_limit.getrlimit(2)[0]"
"""What is in force: a program is told its own."""
OWN = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Kernel]:
    kernel = Kernel()
    for cell in ("%load_ext oomdoctor", "import numpy as np", "%config OomDoctor.forecast_time_s = 0"):
        kernel.run(cell, ok=True)
    yield kernel
    kernel.stop()


@pytest.mark.parametrize(
    ("source", "ceiling", "runs"),
    [
        ("%%memlimit 4GiB\nx = 1", 4 * GIB, "# %%memlimit\nx = 1"),
        ("\n%%memlimit 1.5 GiB  # mine\n  x = 1", 3 * GIB // 2, "#\n  # %%memlimit\n  x = 1"),
        ("%%memlimit 4GiB\n%%time\nx = 1", 4 * GIB, None),
        ("%%memlimit 4GiB", 4 * GIB, None),
        ("%%memlimit lots\nx = 1", None, None),
        ("%%memlimit\nx = 1", None, None),
        ("%%mempeak\nx = 1", None, "# %%mempeak\nx = 1"),
        ("x = 1\n%%memlimit 4GiB", None, None),
    ],
)
def test_what_stands_above_a_cell(source: str, ceiling: int | None, runs: str | None) -> None:
    assert (ceiling_of(source), as_it_runs(source)) == (ceiling, runs)


def test_the_verb_switches_and_tells(guarded: Kernel) -> None:
    assert "host guard: on, because it was switched on" in guarded.run("%oomdoctor guard on", ok=True).stdout
    assert "can be had below" in guarded.run("%oomdoctor guard status", ok=True).stdout
    assert "host guard: on" in guarded.run("%oomdoctor status", ok=True).stdout
    assert "black box: on" in guarded.run("%oomdoctor guard", ok=True).stdout
    assert "host guard: off" in guarded.run("%oomdoctor guard off", ok=True).stdout
    assert guarded.run("get_ipython()._oomdoctor_extension.config.guard", ok=True).data("text/plain") == ["'off'"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
def test_a_cell_has_the_limit_and_what_runs_after_it_and_is_told_its_own(guarded: Kernel) -> None:
    before = guarded.value(LIMIT)
    guarded.run("%oomdoctor guard on", ok=True)
    assert guarded.value(LIMIT) != before
    assert guarded.value(OWN) == int(guarded.run(f"print({OWN})", ok=True).stdout) == before
    inside = int(guarded.run(f"print({LIMIT})", ok=True).stdout)
    guarded.run("%oomdoctor guard off", ok=True)
    assert inside != before
    assert int(guarded.run(f"print({LIMIT})", ok=True).stdout) == before == guarded.value(LIMIT)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
def test_a_program_that_a_thread_waits_for_holds_no_cell_up(guarded: Kernel) -> None:
    guarded.run("%oomdoctor guard on", ok=True)
    started = time.monotonic()
    starts = "import os, threading\nthreading.Thread(target=os.system, args=('sleep 6',), daemon=True).start()"
    guarded.run(f"{starts}\nimport time; time.sleep(0.5)", ok=True)
    assert time.monotonic() - started < 5
    inside = int(guarded.run(f"print({LIMIT})", ok=True).stdout)
    guarded.run("%oomdoctor guard off", ok=True)
    assert inside != guarded.value(LIMIT)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
def test_a_cell_with_a_limit_is_refused_what_is_more(guarded: Kernel) -> None:
    guarded.run("%oomdoctor guard off", ok=True)
    assert guarded.run("%%memlimit 200MiB\na = np.ones(64 << 17)\nlen(a)", ok=True).data("text/plain") == ["8388608"]
    failed = guarded.run("%%memlimit 200MiB\n1\nb = np.ones(300 << 17)", ok=False)
    assert failed.errors[0]["ename"] == "MemoryError"
    assert "In[" in failed.text
    assert "line 3" in failed.text
    assert "%%memlimit" in failed.text
    guarded.run("b = np.ones(300 << 17); del b", ok=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
def test_the_last_byte_below_a_cells_limit_leaves_room_for_the_diagnosis(cold_kernel: Kernel) -> None:
    cold_kernel.run("%load_ext oomdoctor", ok=True)
    failed = cold_kernel.run(
        "%%memlimit 64MiB\nparts = []\nwhile True:\n    parts.append(bytearray(1 << 21))", ok=False
    )
    assert failed.errors[0]["ename"] == "MemoryError"
    assert "Out of memory, case 1" in failed.text
    assert "makes no diagnosis" not in failed.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
def test_a_limit_above_another_magic_and_above_a_cell_that_awaits(guarded: Kernel) -> None:
    assert guarded.run("%%memlimit 200MiB\n%%capture told\nb = np.ones(300 << 17)").errors[0]["ename"] == "MemoryError"
    assert "stands on the first line of a cell" in guarded.run("%%time\n%%memlimit 1GiB\n1").stderr
    guarded.run("%%memlimit 200MiB\nimport asyncio\nawait asyncio.sleep(0)", ok=True)


def test_a_margin_that_is_no_size_is_one_line(guarded: Kernel) -> None:
    failed = guarded.run("%config OomDoctor.guard_margin = 'much'")
    assert "'much' is not a memory size" in failed.text
    guarded.run("%config OomDoctor.guard_margin = '256MiB'", ok=True)
    assert "keeps 256 MiB of it free" in guarded.run("%oomdoctor guard on", ok=True).stdout
    guarded.run("%config OomDoctor.guard_margin = ''\n%oomdoctor guard off", ok=True)


def test_the_traceback_of_what_has_no_text_is_the_users(guarded: Kernel) -> None:
    failed = guarded.run(
        "class Textless(MemoryError):\n    def __str__(self): raise RuntimeError('no text')\nraise Textless", ok=False
    )
    assert "raise Textless" in failed.text
    assert "oomdoctor/shell" not in failed.text


def test_numpy_alone_stays_alone(cold_kernel: Kernel) -> None:
    cold_kernel.run("%load_ext oomdoctor", ok=True)
    cold_kernel.run("%oomdoctor guard on", ok=True)
    failed = cold_kernel.run("import numpy as np\nb = np.ones(1 << 44)", ok=False)
    assert "Out of memory, case 1" in failed.text
    assert cold_kernel.value("'torch' in __import__('sys').modules") is False
