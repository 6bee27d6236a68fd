"""``%memreport`` on a machine that tells nothing: no GPU, no NVML, no cgroup, no pressure, no ``/proc`` at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest

PLANTED = """\
import sys
from pathlib import Path
root = Path("root")  # relative, for a report whose lines do not depend on where the test runs
import psutil
psutil.PROCFS_PATH = str(root / "proc")
from oomdoctor.evidence import _kernel, host
_kernel.ROOT = root
host.read.__defaults__ = (root,)
"""
PROGRAM = """\
import sys
sys.modules["pynvml"] = None
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cells = ("%load_ext oomdoctor", "import torch; held = torch.ones(3 << 18)", "%memreport", "%memreport --diff --top 30")
for cell in cells:
    print("In:", cell, flush=True)
    result = shell.run_cell(cell, store_history=True)
    assert result.success, cell
shell.run_line_magic("memreport", "--json report.json")
"""
MISSING = {
    *("total", "available", "page cache", "reclaimable", "dirty", "shared memory", "swap", "committed memory"),
    *("overcommit mode", "RSS", "USS", "PSS", "processes that this one started", "memory pressure", "memory cgroup"),
    *("address space", "memory mappings", "open files", "/dev/shm", "XPU", "MPS"),
}
LINES = re.compile(r"^(Not on this machine|Not available): (.+)\.$")
THINGS = re.compile(r"([^();]+?) \((?:[^()]|\([^()]*\))+\)(?:; |$)")


def _named(report: str) -> list[str]:
    """Return what the report says is missing, as often as it does."""
    lines = [match[2] for line in report.splitlines() if (match := LINES.match(line))]
    assert len(lines) == 2
    things = [thing for line in lines for listed in THINGS.findall(line) for thing in listed.split(", ")]
    return [thing.removesuffix(" of the host") for thing in things]


def _check(done: subprocess.CompletedProcess[str], has: Set[str] = frozenset()) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "oomdoctor could not finish" not in done.stdout + done.stderr
    first, diff = done.stdout.partition("In: %memreport\n")[2].split("In: %memreport --diff --top 30\n")
    for report in (_unwrapped(first), _unwrapped(diff)):
        assert "host memory: how much is in use is not known" in report
        assert "held" in report
        named = _named(report)
        assert sorted(named) == sorted(set(named)), "each thing is named once"
        assert set(named) >= MISSING - has
        assert {"CUDA", "NVML"} & set(named)
    assert "Since the report of In[3]: " in _unwrapped(diff)


def _unwrapped(report: str) -> str:
    """Return the report with its last paragraphs, which are wrapped, on one line each."""
    return re.sub(r"\n(?=[a-z(/]|[A-Z]{3})", " ", report)


def test_a_root_with_nothing_in_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    _check(_run([sys.executable, "-c", PLANTED + PROGRAM], tmp_path))


def test_a_root_with_garbage_in_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("meminfo", "pressure/memory", "self/cgroup", "self/mountinfo", "self/status", "self/stat", "1/stat"):
        (root / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "proc" / name).write_bytes(b"\xff\0 -1 : - garbage\n" * 9)
    done = _run([sys.executable, "-c", PLANTED + PROGRAM], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "oomdoctor could not finish" not in done.stdout + done.stderr


def test_a_real_machine_without_proc_and_sys(tmp_path: Path) -> None:
    hidden = "mount -t tmpfs none /proc && mount -t tmpfs none /sys && "
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "-m", "sh", "-c", "mount -t tmpfs none /proc"]
    if unshare is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("a mount namespace of its own cannot be had here")
    done = _run([unshare, "-m", "sh", "-c", f'{hidden} exec "$0" "$@"', sys.executable, "-c", PROGRAM], tmp_path)
    _check(done, has={"/dev/shm"})


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    home = {**os.environ, "IPYTHONDIR": str(folder), "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=home)


def test_a_report_of_a_program_without_torch_loads_none() -> None:
    cells = "%load_ext oomdoctor", "import numpy as np; held = np.ones(1 << 20)", "%memreport"
    program = f"""\
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    assert shell.run_cell(cell).success, cell
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`held`" in done.stdout
