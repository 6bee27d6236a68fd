"""The record that outlives its kernel: real processes that are killed, and what is made of what they leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomdoctor.guard import black_box
from oomdoctor.guard.black_box import Now, left_behind, opened, place, system, verdict

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
MIB = 1 << 20
DIES = """
import os, signal, sys
from pathlib import Path
from oomdoctor.guard.black_box import opened, place, system
record = opened(Path(sys.argv[1]), {**place(), "group": "/g", "system": system()})
record.begin(7, "kept = []\\nkept.append(1)")
record.note(kills=3, line=2, text="kept.append(1)", rss=300 << 20, used=500 << 20, limit=512 << 20)
print("ready", flush=True)
if sys.argv[2] == "waits": sys.stdin.read()
if sys.argv[2] == "ends": record.remove()
if sys.argv[2] == "idle": record.end()
os.kill(os.getpid(), signal.SIGKILL)
"""


def dead(folder: Path, how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", DIES, str(folder), how], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_a_record_outlives_a_kill_and_is_told_once(tmp_path: Path) -> None:
    dead(tmp_path, "dies")
    ((facts, now),) = left_behind(tmp_path, place())
    assert (facts["cell"], now.kills, facts["group"]) == (7, 3, "/g")
    assert (now.line, now.rss, now.used, now.limit) == (2, 300 * MIB, 500 * MIB, 512 * MIB)
    told = verdict(facts, now, "/g", 4)
    assert told == (
        "The OOM killer ended the last kernel in In[7], line 2: `kept.append(1)`. The kernel held 300 MiB. "
        "500 MiB of 512 MiB were in use. The kill counter of this group rose by 1 after its last look."
    )
    assert list(left_behind(tmp_path, place())) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["ends", "idle"])
def test_a_clean_end_and_an_end_between_cells_tell_nothing(tmp_path: Path, how: str) -> None:
    dead(tmp_path, how)
    assert list(left_behind(tmp_path, place())) == []
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path), "waits"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline() == "ready\n"
        assert list(left_behind(tmp_path, place())) == []
        assert len(list(tmp_path.iterdir())) == 1
        alive.kill()
    assert len(list(left_behind(tmp_path, place()))) == 1


def test_the_record_of_another_notebook_waits_for_it(tmp_path: Path) -> None:
    dead(tmp_path, "dies")
    assert list(left_behind(tmp_path, {**place(), "notebook": "/other.ipynb"})) == []
    assert len(list(left_behind(tmp_path, place()))) == 1


def test_what_is_no_record_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.oomdoctor").write_bytes(b"x" * 17)
    (tmp_path / "other.json").write_text("{}")
    assert list(left_behind(tmp_path, place())) == []
    assert list(left_behind(tmp_path / "nowhere", place())) == []


def test_a_long_source_has_room(tmp_path: Path) -> None:
    record = opened(tmp_path, place())
    assert record is not None
    record.begin(1, "x = '\u4e00'\n" * 5000)
    record.note(kills=None, line=3, text="\u4e00" * 500)
    record.close()
    ((facts, _),) = left_behind(tmp_path, place())
    assert facts["source"].startswith("x = ")


def test_a_copy_does_not_remove_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = opened(tmp_path, place())
    assert record is not None
    with monkeypatch.context() as patched:
        patched.setattr(black_box.os, "getpid", lambda: -1)
        record.remove()
    assert len(list(tmp_path.iterdir())) == 1
    record.remove()
    assert list(tmp_path.iterdir()) == []


def now(used: int, kills: int) -> Now:
    return Now(running=1, line=0, rss=0, used=used, limit=512 * MIB, kills=kills, at_ns=0, text=b"")


FACTS: dict[str, Any] = {"cell": 1, "group": "/g", "system": json.loads(json.dumps(system()))}


@pytest.mark.parametrize(
    ("facts", "used", "seen", "group", "kills", "begins", "proof"),
    [
        ({}, 500, 3, "/g", 5, "The OOM killer ended", "rose by 2"),
        ({}, 500, 3, "/g", 3, "Something else than the OOM killer ended", "did not rise"),
        ({}, 500, 3, "/new", 0, "The OOM killer probably ended", "has gone"),
        ({}, 100, 3, "/new", 0, "Something ended", "memory was not full"),
        ({"system": {"boot": "another"}}, 500, 3, "/g", 9, "The OOM killer probably ended", "has gone"),
        ({}, 500, -1, "/g", None, "The OOM killer probably ended", "has gone"),
    ],
)
def test_what_proves_it(
    facts: dict[str, Any], used: int, seen: int, group: str, kills: int | None, begins: str, proof: str
) -> None:
    told = verdict(FACTS | facts, now(used * MIB, seen), group, kills)
    assert told.startswith(begins)
    assert proof in told
