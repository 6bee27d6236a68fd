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
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + ({room} << 20), resource.RLIM_INFINITY))
{after}
print(float(data.sum()))
"""


def run(before: str, after: str, room: int = 2) -> subprocess.CompletedProcess[str]:
    source = PROGRAM.format(before=before, after=after, room=room)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=100)


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


CONVOLUTION = """\
net, images = torch.nn.Conv2d(3, 32, 3, padding=1), torch.randn(16, 3, 32, 32)
def train():
    net(images).sum().backward()
    return torch.get_num_threads()
"""


@pytest.mark.parametrize("earlier", ["", "train()"])
def test_what_waits_for_all_of_a_team_is_told_how_many_there_are(earlier: str) -> None:
    within = "with teams_in_room(): print(train(), float((images.view(-1, 32) @ images.view(-1, 32).T)[0, 0]) > 0)"
    ended = run(
        CONVOLUTION + earlier, f"from oomdoctor.sandbox import openmp\nopenmp.begin_teams = bool\n{within}", 900
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("1 True\n")
