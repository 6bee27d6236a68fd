"""``%%mempeak``: the peak and the increment of a cell, by counters, and the line of the peak, by samples."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kernels import Kernel

from oomdoctor.shell.mempeak import _Peak, measured

MIB = 1 << 20
HOLDS = """\
%%mempeak
import time
big = torch.ones(24 << 18)
again = big + 1; time.sleep(0.5); del again
small = torch.ones(1 << 18)
small.shape[0]"""


def device_line(printed: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith("cuda:0"))


def test_the_peak_the_increment_and_the_line_of_each_memory(ready: Kernel) -> None:
    ready.run("big = small = None", ok=True)
    reply = ready.run(HOLDS, ok=True)
    device, host = reply.stdout.splitlines()
    assert device.startswith("cuda:0 (simulated): peak 56.0 MiB, increment 48.0 MiB (line 4, sampled)")
    assert re.fullmatch(r"host: peak (≈ )?[\d.]+ [MG]iB, increment (≈ )?\d\d\.\d MiB \(line 4, sampled\)", host)
    assert reply.data("text/plain") == [str(1 << 18)], "the last value is shown as always"


def test_the_cell_is_one_of_its_own_and_may_await(ready: Kernel) -> None:
    reply = ready.run("%%mempeak\nimport asyncio\nawait asyncio.sleep(0)\nkept_number = 1", ok=True)
    number = reply.content["execution_count"]
    assert "increment 0 B" in device_line(reply.stdout)
    assert ready.run("kept_number", ok=True).content["execution_count"] == number + 1


def test_a_peak_of_before_is_told_as_it_is_reset(ready: Kernel) -> None:
    ready.run("big = again = small = None\nscrap = torch.ones(64 << 18)\ndel scrap", ok=True)
    assert device_line(ready.run("%%mempeak\nnone = 1", ok=True).stdout) == (
        "cuda:0 (simulated): peak 8.00 MiB, increment 0 B; earlier peak 72.0 MiB"
    )
    assert "earlier" not in device_line(ready.run("%%mempeak\nnone = 1", ok=True).stdout)


def test_a_measurement_within_another_leaves_it_its_peak(ready: Kernel) -> None:
    inner = "scrap = torch.ones(16 << 18); del scrap\n%mempeak small = torch.ones(1 << 18)"
    first, _, second, _ = ready.run(f"%%mempeak\n{inner}\ndel small", ok=True).stdout.splitlines()
    assert first.startswith("cuda:0 (simulated): peak 9.00 MiB, increment 1.00 MiB")
    assert second.startswith("cuda:0 (simulated): peak 24.0 MiB, increment 16.0 MiB")


def test_a_cell_that_fails_has_its_own_traceback_and_no_numbers(ready: Kernel) -> None:
    reply = ready.run("%%mempeak\nx = 1\n1 / 0", ok=False)
    assert reply.content["ename"] == "ZeroDivisionError"
    assert "----> 3 1 / 0" in reply.text
    assert "peak 8" not in reply.text
    assert "oomdoctor" not in reply.text
    assert "SyntaxError" in ready.run("%%mempeak\ndef f(:\n    pass", ok=False).text


def test_a_cell_that_ran_out_is_diagnosed_at_its_line(ready: Kernel) -> None:
    ready.run("%config OomDoctor.forecast_time_s = 0", ok=True)
    reply = ready.run("%%mempeak\nx = 1\ntoo_much = torch.ones(600 << 18)", ok=False)
    assert "Out of memory" in reply.text
    assert "too_much = torch.ones(600 << 18)" in reply.text
    assert "line 3" in reply.text
    assert "increment" not in reply.stdout


STATEMENTS = {
    "%mempeak y = torch.ones(4 << 18)": 4.0,
    "%%time\n%%mempeak\ny = torch.ones(4 << 18)": 4.0,
    "%%mempeak\n%%time\ny = torch.ones(4 << 18)": 4.0,
    "%%capture out\n%mempeak y = torch.ones(4 << 18)": None,
    "\n%%mempeak\n\n\ny = torch.ones(4 << 18)": 4.0,
}


@pytest.mark.parametrize("cell", STATEMENTS)
def test_ways_to_write_it(ready: Kernel, cell: str) -> None:
    ready.run("y = None", ok=True)
    printed = ready.run(cell, ok=True).stdout
    if STATEMENTS[cell] is None:
        assert printed == ""
        printed = ready.value("out.stdout")
    assert device_line(printed).startswith("cuda:0 (simulated): peak 12.0 MiB, increment 4.00 MiB")
    assert ready.value("y.numel()") == 1 << 20


TYPED = {
    "%mempeak": "%mempeak takes a statement on its line; above a cell, write %%mempeak",
    "%%mempeak foo\nuntouched = 1": "%%mempeak takes nothing but --help on its line, not 'foo'",
    "%%mempeak\n\n\n": "%%mempeak measures the cell below its line, and there is nothing below it",
}


@pytest.mark.parametrize("typed", TYPED, ids=ascii)
def test_what_cannot_be_used_is_one_line_and_nothing_runs(ready: Kernel, typed: str) -> None:
    reply = ready.run(typed)
    assert reply.stderr == f"oomdoctor: {TYPED[typed]}\n"
    assert reply.stdout == ""
    assert ready.value("'untouched' in globals()") is False


def test_the_usage_and_the_help(ready: Kernel) -> None:
    for typed in ("%mempeak --help", "%%mempeak --help\n1 / 0"):
        assert ready.run(typed, ok=True).stdout.startswith("Run the cell below, and print the peak")
    assert "`%%mempeak`: run the cell below" in ready.run("%oomdoctor help", ok=True).stdout


PLAIN = """\
import sys, threading
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("%load_ext oomdoctor", "%%mempeak\\nhere = bytearray(64 << 20)\\nimport time; time.sleep(0.2)\\n",
             "%%mempeak\\nimport asyncio\\nawait asyncio.sleep(0)\\n", "%unload_ext oomdoctor"):
    assert shell.run_cell(cell, store_history=True).success, cell
assert not any("mempeak" in names for names in shell.magics_manager.magics.values())
assert not any("oomdoctor" in thread.name for thread in threading.enumerate())
assert "torch" not in sys.modules
"""


def test_in_plain_ipython_without_torch_and_gone_once_unloaded() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"host: peak (≈ )?[\d.]+ MiB, increment (≈ )?6[4-6]\.\d MiB \(line [23], sampled\)", first)
    assert second.startswith("host: peak ")


@pytest.mark.gpu
def test_on_cuda_the_peak_is_the_allocators_and_none_is_initialised(start_kernel: Callable[..., Kernel]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    kernel = start_kernel()
    kernel.run("%load_ext oomdoctor\nimport torch", ok=True)
    assert kernel.run("%%mempeak\nx = 1", ok=True).stdout.startswith("host: ")
    assert kernel.value("torch.cuda.is_initialized()") is False
    first = kernel.run("%%mempeak\nx = torch.ones(64 << 18, device='cuda')", ok=True).stdout
    assert first.startswith("cuda:0: peak 64.0 MiB, increment 64.0 MiB")
    kernel.run("y = x + 1; del y", ok=True)
    second = kernel.run("%%mempeak\nz = x[: 8 << 18] + 1", ok=True).stdout
    assert second.startswith("cuda:0: peak 72.0 MiB, increment 8.00 MiB")
    assert "; earlier peak 128 MiB" in second.splitlines()[0]
    assert kernel.value("torch.cuda.max_memory_allocated()") == 72 * MIB
    assert "cuda:0" in kernel.run("%memreport --cells", ok=True).data("text/plain")[0]


# The parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        ("%%mempeak\nx", "# %%mempeak\nx"),
        ("\n \n%%mempeak  \n\nx", "#\n#\n# %%mempeak\n\nx"),
        ("%%mempeak  # how much\nx", "# %%mempeak\nx"),
        ("%%mempeak\n    x\n    y", "    # %%mempeak\n    x\n    y"),
        ("%%mempeak x\ny", None),
        ("%%mempeak\n%%time\nx", None),
        ("%%mempeak\n  \n", None),
        ("x\n%%mempeak\ny", None),
        ("%%mempeaks\ny", None),
    ],
)
def test_a_cell_keeps_its_lines(cell: str, runs: str | None) -> None:
    assert measured(cell) == runs


SENTENCES = {
    "peak 3.00 MiB, increment 2.00 MiB (line 7, sampled)": _Peak(MIB, MIB, 3 * MIB, line=7, kept=3 * MIB),
    "peak 9.00 MiB, increment 8.00 MiB (between two samples)": _Peak(MIB, MIB, 3 * MIB, line=7, kept=9 * MIB),
    "peak ≈ 3.00 MiB, increment ≈ 2.00 MiB (line 7, sampled)": _Peak(MIB, 5 * MIB, 3 * MIB, line=7, kept=5 * MIB),
    "peak 6.00 MiB, increment 5.00 MiB (between two samples)": _Peak(MIB, 5 * MIB, 3 * MIB, line=7, kept=6 * MIB),
    "peak 1.00 MiB, increment 0 B; earlier peak 2.00 MiB": _Peak(MIB, MIB, MIB, earlier=2 * MIB, kept=MIB),
    # The program has reset the peak itself: a sample knows better.
    "peak 3.00 MiB, increment 2.00 MiB (line 2, sampled)": _Peak(MIB, MIB, 3 * MIB, line=2, kept=MIB),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_is_told_of_a_peak(sentence: str) -> None:
    assert SENTENCES[sentence].sentence("cuda:0", has_lines=True) == f"cuda:0: {sentence}"
