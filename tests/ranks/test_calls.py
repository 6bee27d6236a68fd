"""Functions under ``heal`` that all ranks call, in processes that the program starts: healed on all, or on none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROOT, same

PROGRAM = (ROOT / "tests" / "ranks" / "call_program.py").read_text(encoding="utf-8")
LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program has ended: its status, what it printed, and what each rank has told."""

    status: int
    printed: str
    told: list[Any]

    def of(self, name: str) -> list[Any]:
        return [one[name] for one in self.told]


def run(folder: Path, source: str = PROGRAM, *, heals: bool = True, world: int = 2, **settings: str) -> Ended:
    """Run the program and return how it has ended."""
    folder.mkdir()
    (folder / "train.py").write_text(source, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"START": "spawn", "MEET": "before", "WHERE": "backward", "HEAL": "1" if heals else "", "PORT": port}
    told |= {"OUT": str(folder / "left"), "WORLD": str(world), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    told |= {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, **told, **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    paths = [folder / f"left.{rank}.pt" for rank in range(world)]
    left = [torch.load(path) if path.exists() else None for path in paths]
    return Ended(status=done.returncode, printed=done.stdout + done.stderr, told=left)


@pytest.mark.parametrize(
    ("start", "meet", "world"),
    [("spawn", "before", 2), ("spawn", "within", 3), ("accelerate", "before", 2), ("ddp_spawn", "before", 2)],
)
def test_every_rank_is_left_as_by_a_fresh_program_with_the_changed_function(
    tmp_path: Path, start: str, meet: str, world: int
) -> None:
    healed = run(tmp_path / "healed", START=start, MEET=meet, world=world)
    assert healed.status == 0, healed.printed
    assert [one and one["kind"] for one in healed.of("outcome")] == ["healed"] * world
    ((changed,), *others) = healed.of("changed")
    assert others == [[changed]] * (world - 1)
    assert "in batch_parts(2, x, y, ddp=model):" in changed
    fresh = run(tmp_path / "fresh", changed, heals=False, START=start, MEET=meet, world=world)
    assert same(healed.of("left"), fresh.of("left"))


def test_a_group_that_was_made_before_anything_was_noted_is_healed_too(tmp_path: Path) -> None:
    """As by Ray Train, which makes it before it unpacks the function; its connections are those between the ranks."""
    unnoted = (
        "from oomdoctor.shell import job_calls\n    job_calls._Process.groups.remove()\n"
        "    job_calls._Process.groups = None\n    meet(rank, world)"
    )
    healed = run(tmp_path / "healed", PROGRAM.replace("# at first", unnoted), world=3)
    assert healed.status == 0, healed.printed
    assert [one and one["kind"] for one in healed.of("outcome")] == ["healed"] * 3
    assert all(one["ranks"]["released_s"] < 5 for one in healed.of("outcome"))
    changed = healed.of("changed")[0][0].replace(unnoted, "# at first")
    fresh = run(tmp_path / "fresh", changed, heals=False, world=3)
    assert same(healed.of("left"), fresh.of("left"))


def test_a_second_call_is_one_of_the_changed_function(tmp_path: Path) -> None:
    """The group is made anew by the first call, and goes on to be used."""
    healed = run(tmp_path / "healed", CALLS="2")
    assert healed.status == 0, healed.printed
    assert healed.printed.count("ran to its end with 1 change in place") == 2  # once on each rank
    fresh = run(tmp_path / "fresh", healed.of("changed")[0][0], heals=False, CALLS="2")
    assert same(healed.of("left"), fresh.of("left"))


def test_what_cannot_be_healed_is_raised_on_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path / "late", WHERE="late", MEET="within")
    assert [one["kind"] for one in done.of("outcome")] == ["refused"] * 2
    ((other,), (own,)) = done.of("left")
    assert other.startswith("PeerOutOfMemory: rank 1 ran out of memory: OutOfMemoryError: CUDA out of memory.")
    assert own.startswith("OutOfMemoryError: CUDA out of memory.")


def test_an_error_of_the_programs_own_is_its_own_and_nobody_is_let_out_of_anything(tmp_path: Path) -> None:
    ours = run(tmp_path / "ours", WHERE="error", CALLS="2")
    plain = run(tmp_path / "plain", WHERE="error", CALLS="2", heals=False)
    assert (ours.status, ours.of("outcome")) == (0, [None, None]), ours.printed
    assert ours.of("left")[1] == ["KeyError: 'a mistake'"] * 2
    assert same(ours.of("left"), plain.of("left"))
    assert "oomdoctor" not in ours.printed


def test_calls_in_which_nothing_happens_are_as_without_heal(tmp_path: Path) -> None:
    ours = run(tmp_path / "ours", WHERE="nowhere", CALLS="3", METHOD=f"file://{tmp_path}/meeting")
    plain = run(tmp_path / "plain", WHERE="nowhere", CALLS="3", heals=False)
    assert (ours.status, ours.of("outcome")) == (0, [None, None]), ours.printed
    assert same(ours.of("left"), plain.of("left"))
    assert "oomdoctor" not in ours.printed


def test_where_the_keeper_of_the_store_is_killed_the_others_raise_within_seconds_and_say_why(tmp_path: Path) -> None:
    killed = "import time\n    if rank == 0:\n        os.kill(os.getpid(), 9)\n    time.sleep(2)"
    goes_on = (
        "import signal\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # by which the launcher ends the others
    )
    begun = time.monotonic()
    done = run(
        tmp_path / "killed", PROGRAM.replace("# at its end", killed).replace("# at first", goes_on), WHERE="late"
    )
    assert time.monotonic() - begun < 60
    assert done.status != 0
    assert done.told[0] is None
    assert done.told[1]["left"][0].startswith("OutOfMemoryError: CUDA out of memory.")
    assert "oomdoctor: the ranks are not healed together any more: the job's store does not answer" in done.printed
