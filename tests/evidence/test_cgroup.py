"""The memory cgroup: recorded trees of every kind of system, and real v1 groups where they can be made."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory_groups
import pytest
from trees import GIB, MIB, RECLAIMABLE, UNLIMITED, mount, of, plant, v1_group, v2_group

from oomdoctor.evidence import _kernel
from oomdoctor.model.unavailable import Unavailable

V2 = mount("cgroup2", "/", "/sys/fs/cgroup")
V1 = mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")
CPU = mount("cgroup", "/", "/sys/fs/cgroup/cpu", "rw,cpu,cpuacct")


def test_the_own_group_of_a_v2_system(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/user.slice/jupyter.service": v2_group(8 * GIB, 6 * GIB, ooms=4, kills=2)}
    found = _kernel.cgroup(plant(tmp_path, of("0::/user.slice/jupyter.service\n", V2), groups))
    assert (found.version, found.limit, found.used) == (2, 8 * GIB, 6 * GIB)
    assert (found.file, found.anon, found.tmpfs) == (GIB, 5 * GIB, 40 * MIB)
    assert found.reclaimable == RECLAIMABLE
    assert (found.oom_kills, found.ooms) == (2, 4)


def test_the_own_group_of_a_v1_system(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/memory/slurm/job_7": v1_group(8 * GIB, 6 * GIB, kills=2)}
    membership = "4:cpu,cpuacct:/elsewhere\n3:memory:/slurm/job_7\n1:name=systemd:/init.scope\n"
    found = _kernel.cgroup(plant(tmp_path, of(membership, CPU, V1), groups))
    assert (found.version, found.limit, found.used) == (1, 8 * GIB, 6 * GIB)
    assert (found.file, found.anon, found.tmpfs) == (GIB, 5 * GIB, 40 * MIB)
    assert found.reclaimable == RECLAIMABLE
    assert (found.oom_kills, found.ooms) == (2, 0)


def test_v1_meeting_its_limit_is_not_running_out(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/memory": v1_group(8 * GIB, 6 * GIB, failcnt=812)}
    found = _kernel.cgroup(plant(tmp_path, of("3:memory:/\n", V1), groups))
    assert isinstance(found.ooms, Unavailable)
    assert "812 times" in found.ooms.reason


@pytest.mark.parametrize("version", [1, 2])
def test_the_strictest_group_above_binds_and_kills_are_the_own_groups(tmp_path: Path, version: int) -> None:
    make: Callable[..., dict[str, str]] = v1_group if version == 1 else v2_group
    base = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    none = UNLIMITED.strip() if version == 1 else "max"
    groups = {
        f"{base}/pod": make(none, 9 * GIB),
        f"{base}/pod/box": make(4 * GIB, 4 * GIB - MIB, kills=9),
        f"{base}/pod/box/own": make(8 * GIB, 2 * GIB, kills=1),
    }
    membership = "3:memory:/pod/box/own\n" if version == 1 else "0::/pod/box/own\n"
    found = _kernel.cgroup(plant(tmp_path, of(membership, V1 if version == 1 else V2), groups))
    assert (found.limit, found.used, found.oom_kills) == (4 * GIB, 4 * GIB - MIB, 1)


def test_a_large_group_with_less_room_is_stricter_than_a_small_one(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/a": v2_group(64 * GIB, 64 * GIB),
        "sys/fs/cgroup/a/b": v2_group(4 * GIB, GIB),
    }
    found = _kernel.cgroup(plant(tmp_path, of("0::/a/b\n", V2), groups))
    assert found.limit == 64 * GIB


def test_memory_high_binds_before_memory_max(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/a": v2_group(8 * GIB, 2 * GIB, high=3 * GIB)}
    assert _kernel.cgroup(plant(tmp_path, of("0::/a\n", V2), groups)).limit == 3 * GIB


def test_a_v1_limit_above_what_is_mounted_is_told_by_the_statistics(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/memory": v1_group(UNLIMITED.strip(), 2 * GIB, hierarchical=3 * GIB)}
    where = of("3:memory:/docker/abc\n", mount("cgroup", "/docker/abc", "/sys/fs/cgroup/memory", "rw,memory"))
    found = _kernel.cgroup(plant(tmp_path, where, groups))
    assert (found.limit, found.used) == (3 * GIB, 2 * GIB)


def test_v1_groups_above_one_without_hierarchy_do_not_count(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/memory/a": {**v1_group(GIB, 0), "memory.use_hierarchy": "0\n"},
        "sys/fs/cgroup/memory/a/b": v1_group(4 * GIB, 2 * GIB),
    }
    assert _kernel.cgroup(plant(tmp_path, of("3:memory:/a/b\n", V1), groups)).limit == 4 * GIB


@pytest.mark.parametrize(
    ("path", "top"),
    [
        pytest.param("/", "/", id="a namespace of its own"),
        pytest.param("/docker/abc", "/docker/abc", id="the host's path, mounted from there"),
        pytest.param("/docker/abc", "/", id="the host's path, which is not there"),
        pytest.param("/../elsewhere", "/", id="outside of the namespace"),
        pytest.param("/", "/../..", id="mounted from outside of the namespace"),
    ],
)
def test_a_container_finds_its_group_at_the_root_of_the_mount(tmp_path: Path, path: str, top: str) -> None:
    groups = {"sys/fs/cgroup": v2_group(2 * GIB, GIB), "sys/fs/elsewhere": v2_group(GIB, GIB)}
    found = _kernel.cgroup(plant(tmp_path, of(f"0::{path}\n", mount("cgroup2", top, "/sys/fs/cgroup")), groups))
    assert (found.version, found.limit, found.own) == (2, 2 * GIB, tmp_path / "sys/fs/cgroup")


def test_a_hybrid_system_has_the_controller_in_v1(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/memory/a": v1_group(2 * GIB, GIB),
        "sys/fs/cgroup/unified/a": {"cgroup.procs": "1\n"},
    }
    unified = mount("cgroup2", "/", "/sys/fs/cgroup/unified")
    found = _kernel.cgroup(plant(tmp_path, of("3:memory:/a\n0::/a\n", unified, CPU, V1), groups))
    assert (found.version, found.limit) == (1, 2 * GIB)


def test_a_v2_group_without_the_controller_is_counted_in_the_next_above(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/a": v2_group(2 * GIB, GIB, kills=3), "sys/fs/cgroup/a/b": {"cgroup.procs": "1\n"}}
    found = _kernel.cgroup(plant(tmp_path, of("0::/a/b\n", V2), groups))
    assert (found.limit, found.oom_kills) == (2 * GIB, 3)


@pytest.mark.parametrize(
    ("files", "groups", "reason"),
    [
        pytest.param({}, {}, "does not tell", id="no proc"),
        pytest.param(of("", V2), {}, "in no memory cgroup", id="no cgroups"),
        pytest.param(of("3:memory:/a\n0::/\n", V2), {}, "(v1) are not mounted", id="controller not mounted"),
        pytest.param(of("0::/\n", V2), {"sys/fs/cgroup": {"memory.stat": "anon 1\n"}}, "root", id="the root of v2"),
    ],
)
def test_where_there_is_no_group_the_reason_is_told(
    tmp_path: Path, files: dict[str, str], groups: dict[str, dict[str, str]], reason: str
) -> None:
    found = _kernel.cgroup(plant(tmp_path, files, groups))
    for value in (found.version, found.limit, found.used, found.reclaimable, found.oom_kills):
        assert isinstance(value, Unavailable)
        assert reason in value.reason


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_without_a_limit_still_tells_its_usage(tmp_path: Path, version: int) -> None:
    where, groups = (
        (of("3:memory:/\n", V1), {"sys/fs/cgroup/memory": v1_group(UNLIMITED.strip(), 2 * GIB)})
        if version == 1
        else (of("0::/a\n", V2), {"sys/fs/cgroup/a": v2_group("max", 2 * GIB)})
    )
    found = _kernel.cgroup(plant(tmp_path, where, groups))
    assert found.limit == Unavailable("the memory cgroup sets no limit")
    assert found.used == 2 * GIB


def test_statistics_of_an_old_kernel_leave_only_what_they_lack_unknown(tmp_path: Path) -> None:
    group = v2_group(2 * GIB, GIB) | {"memory.stat": f"anon {GIB}\nfile 5\n", "memory.events": "garbage\n"}
    found = _kernel.cgroup(plant(tmp_path, of("0::/a\n", V2), {"sys/fs/cgroup/a": group}))
    assert (found.limit, found.anon) == (2 * GIB, GIB)
    assert isinstance(found.reclaimable, Unavailable)
    assert "active_file" in found.reclaimable.reason
    assert isinstance(found.oom_kills, Unavailable)


# Real groups ----------------------------------------------------------------------------------------------------

LIMIT = 512 * MIB

INSIDE = """\
import json, os, sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from oomdoctor.evidence import host
def show(**more):
    memory = host.read()
    facts = {name: value for name in memory.__dataclass_fields__ if isinstance(value := getattr(memory, name), int)}
    print(json.dumps({**facts, "binding": host.binding_limit(memory), **more}), flush=True)
def fill(size):
    mapped = bytearray(size)
    mapped[::4096] = b"x" * len(mapped[::4096])
    return mapped
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A real v1 memory group with a limit, and one inside of it without."""
    if not memory_groups.can_make_groups():
        pytest.skip("groups need root and cgroup v1")
    with memory_groups.group(LIMIT, inner="inner") as inner:
        yield inner


def inside(group: Path, body: str, *args: str) -> list[dict[str, Any]]:
    """Run ``body`` in a process of ``group`` and return what it showed."""
    done = subprocess.run(
        [sys.executable, "-c", INSIDE + body, str(group), *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_real_limit_of_the_group_above_binds(group: Path) -> None:
    # The kernel brings the counts of a group up to date every two seconds.
    before, after = inside(group, f"time.sleep(3); show(); kept = fill({100 * MIB}); time.sleep(3); show()")
    assert (before["cgroup_version"], before["cgroup_limit"]) == (1, LIMIT)
    assert before["binding"][0] == LIMIT
    assert before["binding"][2] == "the limit of the memory cgroup"
    assert after["cgroup_anon"] - before["cgroup_anon"] == pytest.approx(100 * MIB, rel=0.1)
    assert before["binding"][1] - after["binding"][1] == pytest.approx(100 * MIB, rel=0.1)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A file to be, on a file system whose pages can be dropped."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    if kind.strip() in ("tmpfs", "ramfs", "overlayfs"):
        pytest.skip(f"the temporary folder is on {kind.strip()}, which has no page cache of its own")
    return tmp_path / "file"


CACHE = """\
show()
with open(sys.argv[2], "wb") as file:
    for _ in range(150):
        file.write(bytes(1 << 20))
    file.flush()
    show()
    os.fsync(file.fileno())
show()
free = host.binding_limit(host.read(in_full=False))[1]
kept = fill(free - (24 << 20))
show(asked=len(kept))
"""


def test_real_page_cache_is_free_once_written_and_makes_room_without_a_kill(group: Path, on_disk: Path) -> None:
    empty, dirty, clean, full = inside(group, CACHE, str(on_disk))
    assert clean["cgroup_file"] - empty["cgroup_file"] == pytest.approx(150 * MIB, rel=0.1)
    assert dirty["cgroup_reclaimable"] < clean["cgroup_reclaimable"]
    assert clean["cgroup_reclaimable"] - empty["cgroup_reclaimable"] == pytest.approx(150 * MIB, rel=0.1)
    assert empty["cgroup_used"] + 140 * MIB < clean["cgroup_used"]
    assert clean["binding"][1] == pytest.approx(empty["binding"][1], abs=20 * MIB)
    # What was said to be free could be had, and nothing was killed for it.
    assert full["asked"] > 150 * MIB
    assert full["cgroup_oom_kills"] == 0
    assert full["cgroup_file"] < clean["cgroup_file"] - 50 * MIB


KILL = f"""\
show()
child = os.fork()
if not child:
    kept = []
    while True:
        kept.append(fill({32 * MIB}))
_, status = os.waitpid(child, 0)
show(signal=os.WTERMSIG(status))
"""


def test_a_real_kill_is_counted(group: Path) -> None:
    before, after = inside(group, KILL)
    assert after["signal"] == signal.SIGKILL
    assert (before["cgroup_oom_kills"], after["cgroup_oom_kills"]) == (0, 1)
    assert after["cgroup_version"] == 1
