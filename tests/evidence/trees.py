"""Recorded ``/proc`` and ``/sys/fs/cgroup`` files, planted under a folder that the collectors read as their root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MEMINFO = """\
MemTotal:       16384000 kB
MemFree:         1024000 kB
MemAvailable:    9000000 kB
Buffers:          200000 kB
Cached:          9800000 kB
SwapCached:            0 kB
Active:          4100000 kB
Inactive:        8000000 kB
Active(anon):     300000 kB
Inactive(anon):  3000000 kB
Active(file):    3800000 kB
Inactive(file):  5000000 kB
Unevictable:      100000 kB
Mlocked:          100000 kB
SwapTotal:       2097152 kB
SwapFree:        2000000 kB
Dirty:            700000 kB
Writeback:        100000 kB
Shmem:           1100000 kB
CommitLimit:    10289152 kB
Committed_AS:   12000000 kB
HugePages_Total:       0
"""

PRESSURE = """\
some avg10=12.50 avg60=4.10 avg300=1.02 total=8412345
full avg10=3.00 avg60=1.00 avg300=0.20 total=2412345
"""

UNLIMITED = "9223372036854771712\n"


def mount(kind: str, top: str, point: str, options: str = "rw") -> str:
    """A line of mountinfo, with an optional field as systemd's mounts have."""
    return f"35 31 0:32 {top} {point} rw,nosuid shared:9 - {kind} {kind} {options}"


ROOT_MOUNT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


def v2_group(limit: int | str, used: int, *, high: int | str = "max", ooms: int = 0, kills: int = 0) -> dict[str, str]:
    """Files of a v2 group; of what it uses, 1 GiB is cache, of which 40 MiB is tmpfs and 60 MiB waits to be written."""
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": (
            f"anon {used - GIB}\nfile {GIB}\nkernel 1000\nshmem {40 * MIB}\nfile_mapped 5000\nfile_dirty {50 * MIB}\n"
            f"file_writeback {10 * MIB}\nactive_file {484 * MIB}\ninactive_file {500 * MIB}\nunevictable 0\n"
        ),
        "memory.events": f"low 0\nhigh 3\nmax 7\noom {ooms}\noom_kill {kills}\noom_group_kill 0\n",
    }


def v1_group(
    limit: int | str, used: int, *, hierarchical: int | str | None = None, kills: int = 0, failcnt: int = 0
) -> dict[str, str]:
    """Files of a v1 group, filled as ``v2_group``; its own counters without ``total_`` are small."""
    above = limit if hierarchical is None else hierarchical
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.failcnt": f"{failcnt}\n",
        "memory.use_hierarchy": "1\n",
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        "memory.stat": (
            "cache 1\nrss 1\nshmem 1\ndirty 1\nwriteback 1\nactive_file 1\ninactive_file 1\n"
            f"hierarchical_memory_limit {above}\ntotal_cache {GIB}\ntotal_rss {used - GIB}\ntotal_shmem {40 * MIB}\n"
            f"total_dirty {50 * MIB}\ntotal_writeback {10 * MIB}\ntotal_active_file {484 * MIB}\n"
            f"total_inactive_file {500 * MIB}\n"
        ),
    }


RECLAIMABLE = 924 * MIB
"""What can be dropped of the cache of ``v1_group`` and ``v2_group``."""


def plant(root: Path, files: Mapping[str, str], groups: Mapping[str, Mapping[str, str]] | None = None) -> Path:
    """Write ``files``, and the files of each group by its folder, below ``root``."""
    whole = dict(files)
    for folder, group in (groups or {}).items():
        whole |= {f"{folder}/{name}": text for name, text in group.items()}
    for name, text in whole.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def of(membership: str, *mounts: str) -> dict[str, str]:
    """The two files that tell where this process's groups are."""
    return {"proc/self/cgroup": membership, "proc/self/mountinfo": "\n".join([ROOT_MOUNT, *mounts]) + "\n"}
