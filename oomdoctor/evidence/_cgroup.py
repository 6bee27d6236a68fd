"""The memory cgroup that binds this process: its limit, what is charged to it, and what the kernel did about it.

A process may use no more than the strictest of its own group and of all groups above it. The groups are found by the
paths that ``/proc/self/cgroup`` names below the mount points that ``/proc/self/mountinfo`` tells. In a container the
path may lie outside of what is mounted; then the root of the mount is the container's own group, or the nearest to it
that can be seen. On a hybrid system the version is that of the hierarchy that has the memory controller.

Source: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.

Limits: of a limit above everything that is visible, v1 tells the size and not what is charged to it; v2 tells nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from oomdoctor.evidence import _proc
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import Measured

_UNLIMITED: Final = 1 << 60
"""v1 writes the largest count of pages for no limit, which is a little less than 2**63 bytes."""
_NO_LIMIT: Final = Unavailable("the memory cgroup sets no limit")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Cgroup(NamedTuple):
    """The fields of ``HostMemory`` that are a cgroup's, in bytes.

    Attributes:
        oom_kills: in this process's own group; all else is of the group that binds.
        own: folder of this process's own group, None where there is none.
    """

    version: Measured
    limit: Measured
    used: Measured
    file: Measured
    reclaimable: Measured
    anon: Measured
    tmpfs: Measured
    oom_kills: Measured
    ooms: Measured
    own: Path | None = None

    def figures(self) -> dict[str, Any]:
        """Return the value of each figure by its name."""
        return {name: value for name, value in self._asdict().items() if name != "own"}


class _Form(NamedTuple):
    """What a version calls its files and the keys of its ``memory.stat``, which count the groups below as well."""

    version: int
    usage: str
    limits: tuple[str, ...]
    kills: str
    file: str
    anon: str
    tmpfs: str
    reclaimed_from: tuple[str, str]
    unwritten: tuple[str, str]


_V1: Final = _Form(
    version=1,
    usage="memory.usage_in_bytes",
    limits=("memory.limit_in_bytes",),
    kills="memory.oom_control",
    file="total_cache",
    anon="total_rss",
    tmpfs="total_shmem",
    reclaimed_from=("total_active_file", "total_inactive_file"),
    unwritten=("total_dirty", "total_writeback"),
)
# Above memory.high nothing is killed, but every allocation is stalled until enough was reclaimed.
_V2: Final = _Form(
    version=2,
    usage="memory.current",
    limits=("memory.max", "memory.high"),
    kills="memory.events",
    file="file",
    anon="anon",
    tmpfs="shmem",
    reclaimed_from=("active_file", "inactive_file"),
    unwritten=("file_dirty", "file_writeback"),
)


class _Mount(NamedTuple):
    form: _Form
    top: str
    folder: Path


def read(root: Path = _proc.ROOT) -> Cgroup:
    """Return the group that leaves this process the least; where none sets a limit, its own."""
    found = _folders(root)
    if isinstance(found, Unavailable):
        return Cgroup(found, found, found, found, found, found, found, found, found)
    form, folders = found
    return min((_group(form, folder, own=folders[0]) for folder in folders), key=_room)


def _group(form: _Form, folder: Path, *, own: Path) -> Cgroup:
    """Return what the files of ``folder`` tell.

    Pages that wait to be written cannot be dropped at once; tmpfs and locked pages stand on other lists than those
    that files are reclaimed from.
    """
    stat = _proc.table(folder / "memory.stat")
    active, inactive = (stat[key] for key in form.reclaimed_from)
    return Cgroup(
        version=form.version,
        limit=_limit(form, folder, stat),
        used=_proc.number(folder / form.usage),
        file=stat[form.file],
        reclaimable=_proc.less(_proc.total(active, inactive), *(stat[key] for key in form.unwritten)),
        anon=stat[form.anon],
        tmpfs=stat[form.tmpfs],
        oom_kills=_proc.table(own / form.kills)["oom_kill"],
        ooms=_ooms(form, folder),
        own=own,
    )


def _limit(form: _Form, folder: Path, stat: _proc.Table) -> Measured:
    """Return the strictest limit of one group; v1 tells in ``memory.stat`` also that of groups above it."""
    own = [_bound(folder / name) for name in form.limits]
    above = [stat["hierarchical_memory_limit"]] if form is _V1 else []
    told = [limit for limit in (*own, *above) if isinstance(limit, int)]
    if told and min(told) < _UNLIMITED:
        return min(told)
    return next((limit for limit in own if isinstance(limit, Unavailable)), _NO_LIMIT)


def _bound(path: Path) -> Measured:
    """Return the number in ``path``, in which v2 writes ``max`` for no limit."""
    found = _proc.text(path)
    return _UNLIMITED if isinstance(found, str) and found.strip() == "max" else _proc.number(path)


def _ooms(form: _Form, folder: Path) -> Measured:
    """Return how often the group ran out. v1 counts how often its limit was met, which page cache does as well."""
    if form is _V2:
        return _proc.table(folder / "memory.events")["oom"]
    met = _proc.number(folder / "memory.failcnt")
    if isinstance(met, Unavailable) or met == 0:
        return met
    return Unavailable(f"cgroup v1 counts only how often the limit was met, page cache included: {met} times")


def _room(group: Cgroup) -> float:
    """Return what the group could still be charged with, endless where it has no limit."""
    if isinstance(group.limit, Unavailable) or isinstance(group.used, Unavailable):
        return float("inf")
    return group.limit - group.used + (group.reclaimable if isinstance(group.reclaimable, int) else 0)


def _folders(root: Path) -> tuple[_Form, list[Path]] | Unavailable:
    """Return the version in force, and the folders of this process's own group and of those above it."""
    memberships = _proc.text(root / "proc/self/cgroup")
    mountinfo = _proc.text(root / "proc/self/mountinfo")
    if isinstance(memberships, Unavailable) or isinstance(mountinfo, Unavailable):
        return Unavailable("the kernel does not tell which cgroup this process is in")
    found = _membership(memberships)
    if isinstance(found, Unavailable):
        return found
    form, path = found
    mounts = [mount for mount in _mounts(mountinfo, root) if mount.form is form]
    if not mounts:
        return Unavailable(f"the files of the memory cgroup (v{form.version}) are not mounted here")
    mount, own = next(
        ((mount, own) for mount in mounts if (own := _place(mount, path)) is not None), (mounts[0], mounts[0].folder)
    )
    folders = list(_upwards(form, own, mount.folder))
    return (form, folders) if folders else Unavailable("this process is in the root of the cgroups, without a limit")


def _membership(text: str) -> tuple[_Form, str] | Unavailable:
    """Return version and path of this process's memory cgroup, by ``/proc/self/cgroup``."""
    unified = None
    lines = [line.split(":", 2) for line in text.split("\n") if line]
    known = [line for line in lines if len(line) == 3]
    for _, controllers, path in known:
        if "memory" in controllers.split(","):
            return _V1, path
        if not controllers:
            unified = _V2, path
    if unified is not None:
        return unified
    if len(known) < len(lines):
        return Unavailable("the list of this process's cgroups has another form than is known")
    return Unavailable("this process is in no memory cgroup")


def _mounts(text: str, root: Path) -> Iterator[_Mount]:
    """Yield the hierarchies that may have the memory controller, by ``/proc/self/mountinfo``."""
    for line in text.split("\n"):
        before, _, behind = line.partition(" - ")
        fields, kinds = before.split(" "), behind.split(" ", 2)
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and "memory" in kinds[2].split(",")):
            top, point = _plain(fields[3]), _plain(fields[4])
            yield _Mount(_V2 if kinds[0] == "cgroup2" else _V1, top, root / point.lstrip("/"))


def _plain(path: str) -> str:
    """Return a path of mountinfo without its escapes: a space is a backslash and ``040``."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), path)


def _place(mount: _Mount, path: str) -> Path | None:
    """Return the folder of the group at ``path``, None where it is not below what is mounted."""
    group, top = PurePosixPath(path), PurePosixPath(mount.top)
    # A group outside of this process's cgroup namespace begins with "/..".
    if ".." in group.parts or not group.is_relative_to(top):
        return None
    folder = mount.folder / group.relative_to(top)
    return folder if _proc.may_exist(folder) else None


def _upwards(form: _Form, own: Path, top: Path) -> Iterator[Path]:
    """Yield the folders with a memory controller from ``own`` up to ``top``, those whose limit counts for it."""
    for folder in (own, *own.parents):
        if _proc.may_exist(folder / form.usage):
            yield folder
        # Before Linux 5.11 the groups below a v1 group were not counted in it unless told so, by this file.
        if folder == top or _proc.number(folder.parent / "memory.use_hierarchy") == 0:
            return
