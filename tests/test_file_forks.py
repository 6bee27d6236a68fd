"""What becomes of tests in a process of their own is told as of those that are in none."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFTEST = """\
import file_forks
def pytest_configure(config):
    config.pluginmanager.register(file_forks.Files())
"""
OWN = """\
import os, time, pytest
pytestmark = pytest.mark.own_process
FIRST = os.getpid()
seen = []
def test_passes(): seen.append(os.getpid())
def test_is_in_the_same_process(): assert seen == [FIRST]
def test_fails(): assert seen == []
def test_is_skipped(): pytest.skip("for a reason")
def test_hangs(): time.sleep(60)
def test_ends_the_process(): os._exit(0)
def test_is_in_another_process(): assert seen == []
"""
SHARED = "import sys\ndef test_there_is_no_torch_here(): assert 'torch' not in sys.modules\n"


@pytest.mark.thorough
def test_failures_hangs_and_ends_of_the_process_are_told(tmp_path: Path) -> None:
    for name in ("file_forks.py", "kernel_forks.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = own_process: x\ntimeout = 5\n")
    for name, text in (("conftest.py", CONFTEST), ("test_own.py", OWN), ("test_shared.py", SHARED)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ends = {name: end for end, name in re.findall(r"^(PASSED|FAILED) \S+::(\w+)", done.stdout, re.MULTILINE)}
    failed = {name for name, end in ends.items() if end == "FAILED"}
    assert failed == {"test_fails", "test_hangs", "test_ends_the_process"}, done.stdout
    assert len(ends) == 7, done.stdout
    assert "1 skipped" in done.stdout
    assert "Timeout (>5.0s)" in done.stdout
    assert "the process of this file has ended" in done.stdout
