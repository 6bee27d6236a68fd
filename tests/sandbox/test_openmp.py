"""Where a thread cannot begin, OpenMP ends the process: a retry there has one thread, or those that are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on data are Linux's")

PROGRAM = """\
import resource, torch
from pathlib import Path
from oomdoctor.sandbox.openmp import begin_teams, teams_in_room
torch.set_num_threads(2)
data = torch.empty(1 << 20)
{before}
used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (2 << 20), resource.RLIM_INFINITY))
{after}
print(float(data.sum()))
"""


def run(before: str, after: str) -> subprocess.CompletedProcess[str]:
    source = PROGRAM.format(before=before, after=after)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


def test_without_room_a_region_ends_the_process() -> None:
    ended = run("", "data.fill_(2)")
    assert ended.returncode
    assert "Thread creation failed" in ended.stderr


def test_without_room_regions_have_one_thread() -> None:
    ended = run("", "with teams_in_room(): data.fill_(2)\nprint(begin_teams())")
    assert ended.returncode, "what runs after it is the user's, as it would have been"
    assert ended.stdout == "False\n"


@pytest.mark.parametrize("after", ["data.fill_(2)", "with teams_in_room(): data.fill_(2)"])
def test_a_team_that_was_begun_in_time_is_there(after: str) -> None:
    ended = run("print(begin_teams())", after)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"True\n{2.0 * (1 << 20)}")
