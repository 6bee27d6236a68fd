"""What can still be had: recorded trees of v1 and v2, nested groups, page cache, swap, and this machine itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from evidence.trees import GIB, MEMINFO, MIB, UNLIMITED, mount, of, plant, v1_group, v2_group

from oomdoctor.guard.gauge import GROUP, MACHINE, Gauge, Reading

V2 = mount("cgroup2", "/", "/sys/fs/cgroup")
V1 = mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")
FILES = 984 * MIB
"""Pages of files in ``v1_group`` and ``v2_group``."""
NO_SWAP = MEMINFO.replace("SwapFree:        2000000 kB", "SwapFree:              0 kB")


@contextmanager
def gauge(root: Path, version: int, groups: dict[str, dict[str, str]], *, meminfo: str = NO_SWAP) -> Iterator[Gauge]:
    base, where = (
        ("sys/fs/cgroup/memory", of("3:memory:/a/b\n", V1)) if version == 1 else ("sys/fs/cgroup", of("0::/a/b\n", V2))
    )
    planted = {f"{base}{path}": files for path, files in groups.items()}
    found = Gauge(plant(root, {**where, "proc/meminfo": meminfo, "proc/vmstat": "oom_kill 5\n"}, planted))
    yield found
    found.close()


@pytest.mark.parametrize(("version", "make"), [(1, v1_group), (2, v2_group)])
def test_what_counts_is_what_cannot_be_reclaimed(tmp_path: Path, version: int, make: object) -> None:
    group = make(4 * GIB, 3 * GIB, kills=2)  # type: ignore[operator]
    with gauge(tmp_path, version, {"/a/b": group}) as found:
        reading = found.read()
        assert reading == Reading(limit=4 * GIB, used=3 * GIB - FILES, usage=3 * GIB, swap=0, name=GROUP)
        assert (found.has_group_limit, found.kills()) == (True, 2)


@pytest.mark.parametrize(("version", "make"), [(1, v1_group), (2, v2_group)])
def test_the_group_above_binds_where_it_leaves_less(tmp_path: Path, version: int, make: object) -> None:
    groups = {"/a/b": make(8 * GIB, 2 * GIB), "/a": make(6 * GIB, 6 * GIB)}  # type: ignore[operator]
    with gauge(tmp_path, version, groups) as found:
        reading = found.read()
        assert reading is not None
        assert (reading.limit, reading.usage) == (6 * GIB, 6 * GIB)


def test_a_limit_above_what_is_visible_counts_in_v1(tmp_path: Path) -> None:
    with gauge(tmp_path, 1, {"/a/b": v1_group(UNLIMITED.strip(), 2 * GIB, hierarchical=3 * GIB)}) as found:
        reading = found.read()
        assert reading is not None
        assert reading.limit == 3 * GIB


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    with gauge(tmp_path, 2, {"/a/b": v2_group("max", 2 * GIB, high=3 * GIB)}) as found:
        reading = found.read()
        assert reading is not None
        assert reading.limit == 3 * GIB


def test_without_a_limit_it_is_the_machine(tmp_path: Path) -> None:
    with gauge(tmp_path, 2, {"/a/b": v2_group("max", 2 * GIB)}) as found:
        reading = found.read()
        assert reading is not None
        assert (reading.name, reading.limit, reading.free) == (MACHINE, 16384000 << 10, 9000000 << 10)
        assert not found.has_group_limit


@pytest.mark.parametrize(("most", "taken", "swap"), [("max\n", 0, 2000000 << 10), (f"{GIB}\n", GIB // 4, 3 * GIB // 4)])
def test_swap_counts_as_far_as_the_group_may_use_it(tmp_path: Path, most: str, taken: int, swap: int) -> None:
    group = {**v2_group(4 * GIB, 3 * GIB), "memory.swap.max": most, "memory.swap.current": f"{taken}\n"}
    with gauge(tmp_path, 2, {"/a/b": group}, meminfo=MEMINFO) as found:
        reading = found.read()
        assert reading is not None
        assert reading.swap == swap
        assert reading.free == GIB + FILES + swap


def test_v1_limits_memory_and_swap_together(tmp_path: Path) -> None:
    both = {"memory.memsw.limit_in_bytes": f"{5 * GIB}\n", "memory.memsw.usage_in_bytes": f"{3 * GIB}\n"}
    with gauge(tmp_path, 1, {"/a/b": v1_group(4 * GIB, 3 * GIB) | both}, meminfo=MEMINFO) as found:
        reading = found.read()
        assert reading is not None
        assert reading.swap == GIB


def test_a_process_that_was_moved_is_found_again(tmp_path: Path) -> None:
    with gauge(tmp_path, 2, {"/a/b": v2_group(4 * GIB, 3 * GIB), "/c": v2_group(2 * GIB, GIB)}) as found:
        assert not found.refresh()
        (tmp_path / "proc/self/cgroup").write_text("0::/c\n")
        assert found.refresh()
        reading = found.read()
        assert reading is not None
        assert reading.limit == 2 * GIB


def test_a_limit_that_was_lowered_holds_at_the_next_look(tmp_path: Path) -> None:
    with gauge(tmp_path, 2, {"/a/b": v2_group(4 * GIB, 3 * GIB)}) as found:
        (tmp_path / "sys/fs/cgroup/a/b/memory.max").write_text(f"{2 * GIB}\n")
        reading = found.read()
        assert reading is not None
        assert (reading.limit, reading.free) == (2 * GIB, FILES - GIB)


@pytest.mark.parametrize(("limit", "margin"), [(GIB // 2, 64 * MIB), (8 * GIB, 256 * MIB), (256 * GIB, 512 * MIB)])
def test_the_margin_is_a_part_of_the_limit_within_bounds(limit: int, margin: int) -> None:
    reading = Reading(limit=limit, used=0, usage=0, swap=0, name=GROUP)
    assert (reading.margin(), reading.margin(5)) == (margin, 5)


def test_nothing_there_is_no_reading(tmp_path: Path) -> None:
    found = Gauge(tmp_path)
    assert found.kills() is None
    assert found.process() is None


def test_this_machine_is_read() -> None:
    found = Gauge()
    reading, process = found.read(), found.process()
    found.close()
    assert reading is not None
    assert 0 < reading.used <= reading.usage + reading.limit
    assert process is None or min(process) > MIB
