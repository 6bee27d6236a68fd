"""The host's memory as a whole: recorded machines, this machine, and the limit that binds first."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from trees import GIB, KIB, MEMINFO, MIB, PRESSURE, RECLAIMABLE, mount, of, plant, v1_group, v2_group

from oomdoctor.evidence import host
from oomdoctor.evidence.host import HostAccelerator, binding_limit
from oomdoctor.model.memory import HostMemory, Pressure
from oomdoctor.model.unavailable import Unavailable

MACHINE = {
    "proc/meminfo": MEMINFO,
    "proc/pressure/memory": PRESSURE,
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/self/maps": "first\nsecond\nthird\n",
    "proc/self/status": "Name:\tpython\nVmHWM:\t    2048 kB\nVmData:\t    1024 kB\n",
    "dev/shm/file": "",
}
V2 = of("0::/a\n", mount("cgroup2", "/", "/sys/fs/cgroup"))
V1 = of("3:memory:/a\n", mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory"))
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_the_counts_of_a_recorded_machine(tmp_path: Path) -> None:
    found = host.read(plant(tmp_path, MACHINE))
    assert (found.total, found.available) == (16384000 * KIB, 9000000 * KIB)
    assert found.page_cache == 10000000 * KIB
    assert found.dirty == 800000 * KIB
    assert found.tmpfs == 1100000 * KIB
    assert found.reclaimable == 8000000 * KIB
    assert (found.swap_total, found.swap_used) == (2097152 * KIB, 97152 * KIB)
    assert (found.overcommit, found.committed, found.commit_limit) == (0, 12000000 * KIB, 10289152 * KIB)
    assert (found.maps, found.maps_limit, found.process_used) == (3, 65530, 1024 * KIB)
    assert found.pressure == Pressure(some=0.125, full=0.03)


def test_the_parts_of_the_page_cache_do_not_exceed_it(tmp_path: Path) -> None:
    found = host.read(plant(tmp_path, MACHINE))
    parts = (found.reclaimable, found.dirty, found.tmpfs)
    assert sum(part for part in parts if isinstance(part, int)) <= found.page_cache  # type: ignore[operator]


@linux_only
def test_where_the_kernel_tells_nothing_all_is_unavailable_with_a_reason(tmp_path: Path) -> None:
    found = host.read(tmp_path)
    told_otherwise = {
        "rss",
        "uss",
        "pss",
        "children",
        "process_limit",
        "files_open",
        "files_limit",
        "malloc_free",
        "kept_back",
        "unfilled",
    }
    for field in fields(HostMemory):
        if field.name not in told_otherwise:
            value = getattr(found, field.name)
            assert isinstance(value, Unavailable), field.name
            assert value.reason
            assert "not read" not in value.reason


@linux_only
def test_every_field_is_read_on_this_machine() -> None:
    found = host.read()
    unread = {HostMemory.__dataclass_fields__["uss"].default, host._processes.LEFT_OUT}
    assert not [field.name for field in fields(HostMemory) if getattr(found, field.name) in unread]
    for name in ("total", "available", "rss", "uss", "pss", "page_cache", "reclaimable", "files_open", "maps"):
        assert isinstance(getattr(found, name), int), name
    assert 0 < found.uss <= found.pss <= found.rss < found.total  # type: ignore[operator]


# Pressure -------------------------------------------------------------------------------------------------------


def test_the_pressure_of_the_own_group_comes_before_the_machines(tmp_path: Path) -> None:
    group = v2_group(8 * GIB, 6 * GIB) | {"memory.pressure": PRESSURE.replace("12.50", "80.00")}
    found = host.read(plant(tmp_path, MACHINE | V2, {"sys/fs/cgroup/a": group}))
    assert found.pressure == Pressure(some=0.8, full=0.03)


def test_a_group_without_pressure_has_the_machines(tmp_path: Path) -> None:
    found = host.read(plant(tmp_path, MACHINE | V1, {"sys/fs/cgroup/memory/a": v1_group(8 * GIB, 6 * GIB)}))
    assert found.pressure == Pressure(some=0.125, full=0.03)


@pytest.mark.parametrize("text", ["", "some avg10=1.00 avg60=0.00 avg300=0.00 total=0\n", "garbage"])
def test_pressure_in_another_form_is_not_guessed(tmp_path: Path, text: str) -> None:
    found = host.read(plant(tmp_path, MACHINE | {"proc/pressure/memory": text}))
    assert isinstance(found.pressure, Unavailable)


def test_a_kernel_without_pressure_says_so(tmp_path: Path) -> None:
    files = {name: text for name, text in MACHINE.items() if "pressure" not in name}
    found = host.read(plant(tmp_path, files))
    assert isinstance(found.pressure, Unavailable)
    assert "/proc/pressure/memory" in found.pressure.reason


# The limit that binds -------------------------------------------------------------------------------------------


def roomy(**changes: Any) -> HostMemory:
    nothing = Unavailable("not set")
    values = dict.fromkeys((field.name for field in fields(HostMemory)), nothing)
    return HostMemory(**{**values, "total": 64 * GIB, "available": 40 * GIB, **changes})


def test_the_least_room_binds() -> None:
    assert binding_limit(roomy()) == (64 * GIB, 40 * GIB, "the machine's memory")
    limited = roomy(process_limit=8 * GIB, process_used=5 * GIB, process_limit_name="RLIMIT_DATA")
    assert binding_limit(limited) == (8 * GIB, 3 * GIB, "RLIMIT_DATA")
    both = replace(limited, cgroup_limit=10 * GIB, cgroup_used=8 * GIB)
    assert binding_limit(both) == (10 * GIB, 2 * GIB, "the limit of the memory cgroup")


def test_page_cache_of_the_group_counts_as_free() -> None:
    full = roomy(cgroup_limit=10 * GIB, cgroup_used=10 * GIB, cgroup_reclaimable=6 * GIB)
    assert binding_limit(full)[1] == 6 * GIB
    unknown = replace(full, cgroup_reclaimable=Unavailable("not told"))
    assert binding_limit(unknown)[1] == 0


def test_no_more_is_free_than_the_limit() -> None:
    # Counters of a group lag behind each other by some pages of every core.
    assert binding_limit(roomy(cgroup_limit=GIB, cgroup_used=0, cgroup_reclaimable=MIB))[1] == GIB


def test_what_the_kernel_may_promise_binds_under_strict_overcommit_alone() -> None:
    promised = {"commit_limit": 20 * GIB, "committed": 19 * GIB}
    assert binding_limit(roomy(**promised, overcommit=2)) == (20 * GIB, GIB, "what the kernel may promise in all")
    for mode in (0, 1, Unavailable("not told")):
        assert binding_limit(roomy(**promised, overcommit=mode))[2] == "the machine's memory"


def test_what_is_over_its_limit_has_no_room() -> None:
    over = roomy(process_limit=GIB, process_used=2 * GIB, process_limit_name="RLIMIT_AS")
    assert binding_limit(over) == (GIB, 0, "RLIMIT_AS")


def test_without_any_limit_known_nothing_is_promised() -> None:
    nothing = roomy(total=Unavailable("not told"), available=Unavailable("not told"))
    assert binding_limit(nothing) == (0, 0, "no limit could be read")


@pytest.mark.parametrize(("version", "files"), [(1, V1), (2, V2)])
def test_a_recorded_group_full_of_cache_binds_with_its_cache_as_room(
    tmp_path: Path, version: int, files: dict[str, str]
) -> None:
    group = v1_group(2 * GIB, 2 * GIB) if version == 1 else v2_group(2 * GIB, 2 * GIB)
    folder = "sys/fs/cgroup/memory/a" if version == 1 else "sys/fs/cgroup/a"
    found = host.read(plant(tmp_path, MACHINE | files, {folder: group}))
    assert found.cgroup_version == version
    assert binding_limit(found) == (2 * GIB, RECLAIMABLE, "the limit of the memory cgroup")


# This machine ---------------------------------------------------------------------------------------------------

UNDER_LIMIT = """\
import json, resource, sys
from pathlib import Path
from oomdoctor.evidence import host
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
used = int(status[sys.argv[2]].split()[0]) << 10
resource.setrlimit(getattr(resource, sys.argv[1]), (used + (300 << 20), resource.RLIM_INFINITY))
memory = host.read()
capacity, free, which = host.binding_limit(memory)
kept = bytearray(free - (32 << 20))
try:
    bytearray(64 << 20)
except MemoryError:
    refused = True
else:
    refused = False
print(json.dumps([capacity - used, free, which, refused, len(kept)]))
"""


@linux_only
@pytest.mark.parametrize(("name", "counts"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_real_limit_of_the_process_binds_where_it_is_said_to(name: str, counts: str) -> None:
    program = [sys.executable, "-c", UNDER_LIMIT, name, counts]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    capacity, free, which, refused, kept = json.loads(done.stdout)
    assert which == name
    assert capacity == 300 * MIB
    assert free == pytest.approx(300 * MIB, abs=8 * MIB)
    assert kept > 250 * MIB
    assert refused


@linux_only
def test_a_real_file_in_shared_memory_is_tmpfs_and_cannot_be_dropped() -> None:
    path = Path(f"/dev/shm/oomdoctor_test_{os.getpid()}")
    before = host.read(in_full=False)
    try:
        path.write_bytes(bytes(128 * MIB))
        after = host.read(in_full=False)
    except OSError as error:
        pytest.skip(f"/dev/shm takes no 128 MiB here: {error}")
    finally:
        path.unlink(missing_ok=True)
    grown = {name: getattr(after, name) - getattr(before, name) for name in ("tmpfs", "page_cache", "shm_free")}
    assert grown["tmpfs"] == pytest.approx(128 * MIB, rel=0.25)
    assert grown["shm_free"] == pytest.approx(-128 * MIB, rel=0.25)
    assert after.reclaimable - before.reclaimable < 64 * MIB  # type: ignore[operator]


@linux_only
def test_open_files_and_mappings_are_counted() -> None:
    before = host.read()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    after = host.read()
    for descriptor in opened:
        os.close(descriptor)
    assert after.files_open - before.files_open == 10  # type: ignore[operator]
    assert 0 < after.maps < after.maps_limit  # type: ignore[operator]
    assert after.files_open < after.files_limit  # type: ignore[operator]


@linux_only
def test_reading_is_quick() -> None:
    def quickest(**options: Any) -> float:
        taken = []
        for _ in range(20):
            begun = time.perf_counter()
            host.read(**options)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    resident = psutil.Process().memory_info().rss
    # What is meant is 10 ms; walking shared pages takes as much again for each half GiB, and the machine may be busy.
    assert quickest() < 0.03 + 0.02 * resident / GIB
    assert quickest(in_full=False) < 0.01


def test_the_quick_reading_has_all_that_binds() -> None:
    found = host.read(in_full=False)
    assert isinstance(found.uss, Unavailable)
    assert isinstance(found.children, Unavailable)
    assert binding_limit(found)[2] == binding_limit(host.read())[2]


def test_the_host_as_a_device_has_the_limit_that_binds() -> None:
    device = HostAccelerator().read()
    capacity, free, which = binding_limit(host.read(in_full=False))
    assert (device.total, device.basis) == (capacity, which)
    assert device.free == pytest.approx(free, rel=0.2)


def test_the_hosts_peak_counts_pages_of_mapped_files_and_says_so(tmp_path: Path) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel lets no high-water mark begin anew here")
    (tmp_path / "pages").write_bytes(bytes(32 * MIB))
    device = HostAccelerator()
    device.reset_peak()
    with (tmp_path / "pages").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[::4096]) == 0
    peak = device.read().peak_allocated
    assert isinstance(peak, int)
    assert peak > 24 * MIB
    assert "pages of mapped files included" in device.measure


# Other systems --------------------------------------------------------------------------------------------------


def test_a_system_that_tells_little_is_read_without_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = namedtuple("svmem", "total available percent used free")
    monkeypatch.setattr(psutil, "LINUX", False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: windows(8 * GIB, 3 * GIB, 62.5, 5 * GIB, 3 * GIB))

    def no_swap() -> Any:
        raise RuntimeError("no performance counters")

    monkeypatch.setattr(psutil, "swap_memory", no_swap)
    monkeypatch.delattr(psutil.Process, "num_fds")
    found = host.read(tmp_path)
    assert (found.total, found.available) == (8 * GIB, 3 * GIB)
    assert found.page_cache == Unavailable("the system does not tell it")
    assert isinstance(found.swap_used, Unavailable)
    assert found.reclaimable == Unavailable("only Linux tells this")
    assert found.files_open == Unavailable("the system does not tell how many files are open")
    assert isinstance(found.cgroup_limit, Unavailable)
    assert isinstance(found.shm_total, Unavailable)
