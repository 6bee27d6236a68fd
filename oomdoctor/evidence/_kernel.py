"""Files of the kernel that tell of memory, and the cgroup that binds this process: its limit, what is charged to it.

The files under ``/proc`` and ``/sys/fs/cgroup`` come in two forms: one number, and a table with ``key value`` on each
line, where a value may carry the unit ``kB``. What is not there or not allowed is ``Unavailable`` and says which file.

A process may use no more than the strictest of its own group and of all groups above it. The groups are found by the
paths that ``/proc/self/cgroup`` names, below the places where every system mounts them. In a container the path may
begin outside of what is mounted; then the rest of it is looked for, and the root of the mount is the container's own
group, or the nearest to it that can be seen. On a hybrid system the version is that of the memory controller.

Source: proc(5), cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.

Limits: of a limit above everything that is visible, v1 tells the size and not what is charged to it; v2 tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from oomdoctor.model.memory import Measured
from oomdoctor.model.unavailable import Unavailable

ROOT: Final = Path("/")

_LARGEST_FILE: Final = 16 << 20
"""Far above what the kernel writes: ``mountinfo`` of a host with thousands of containers has a few MiB."""
_PIECE: Final = 1 << 16
"""The kernel makes a buffer of the size asked for before it reads a file of ``/proc/sys``, and refuses a large one."""
_LARGEST: Final = 1 << 64
"""The kernel counts in 64 bits."""
_DIGITS: Final = len(str(_LARGEST))


def text(path: Path) -> str | Unavailable:
    """Return the text of a file; bytes that are not UTF-8 are kept as surrogates."""
    found = bytearray()
    try:
        with path.open("rb", buffering=0) as file:
            while len(found) <= _LARGEST_FILE and (more := file.read(_PIECE)):
                found += more
    except FileNotFoundError:
        return Unavailable(f"there is no {path}")
    except OSError as error:
        return Unavailable(f"{path} cannot be read: {error.strerror or error}")
    except ValueError as error:  # a NUL in the path
        return Unavailable(f"{path} cannot be read: {error}")
    if len(found) > _LARGEST_FILE:
        return Unavailable(f"{path} is too long to be what the kernel writes")
    return found.decode("utf-8", "surrogateescape")


def may_exist(path: Path) -> bool:
    """Return whether there is a file or folder, or it cannot be told, because the way to it is forbidden."""
    try:
        path.stat()
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def number(path: Path) -> Measured:
    """Return the number that a file consists of."""
    found = text(path)
    if isinstance(found, Unavailable):
        return found
    count = _count(found.strip())
    return Unavailable(f"{path} holds no number") if count is None else count


def _count(word: str, unit: int = 1) -> int | None:
    """Return how many times ``unit`` the word says, None where it is no number that the kernel could have counted."""
    if not (word.isascii() and word.isdigit() and len(word) <= _DIGITS):
        return None
    return count if (count := int(word) * unit) < _LARGEST else None


class Table(dict[str, Measured]):
    """The table that a file holds: numbers by their keys, sizes in bytes; a key that is not there says so."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._found = path, text(path)
        for line in self._found.splitlines() if isinstance(self._found, str) else ():
            words = line.split()
            if len(words) > 1:
                key, count = words[0].rstrip(":"), _count(words[1], 1024 if words[2:] == ["kB"] else 1)
                self[key] = Unavailable(f"{path} holds no number for {key}") if count is None else count

    def __missing__(self, key: str) -> Measured:
        return Unavailable(f"{self._path} has no {key}") if isinstance(self._found, str) else self._found


def total(*parts: Measured) -> Measured:
    """Return the sum of ``parts``, or why one of them is not known."""
    result = 0
    for part in parts:
        if isinstance(part, Unavailable):
            return part
        result += part
    return result


def less(whole: Measured, *parts: Measured) -> Measured:
    """Return ``whole`` without ``parts``, at least zero, or why one of them is not known."""
    taken = total(*parts)
    if isinstance(whole, Unavailable) or isinstance(taken, Unavailable):
        return whole if isinstance(whole, Unavailable) else taken
    return max(whole - taken, 0)


UNLIMITED: Final = 1 << 60
"""v1 writes the largest count of pages for no limit, which is a little less than 2**63 bytes."""
_NO_LIMIT: Final = Unavailable("the memory cgroup sets no limit")


class Cgroup(NamedTuple):
    """The fields of ``HostMemory`` that are a cgroup's, in bytes.

    ``oom_kills`` is of this process's own group, whose folder is ``own``; all else is of the group that binds.
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


class Form(NamedTuple):
    """What a version calls its files and the keys of its ``memory.stat``, which count the groups below as well."""

    version: int
    mounts: tuple[str, ...]
    usage: str
    limits: tuple[str, ...]
    kills: str
    file: str
    anon: str
    tmpfs: str
    reclaimed_from: tuple[str, str]
    unwritten: tuple[str, str]


_V1: Final = Form(
    version=1,
    mounts=("sys/fs/cgroup/memory",),
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
_V2: Final = Form(
    version=2,
    mounts=("sys/fs/cgroup/unified", "sys/fs/cgroup"),
    usage="memory.current",
    limits=("memory.max", "memory.high"),
    kills="memory.events",
    file="file",
    anon="anon",
    tmpfs="shmem",
    reclaimed_from=("active_file", "inactive_file"),
    unwritten=("file_dirty", "file_writeback"),
)


def cgroup(root: Path = ROOT) -> Cgroup:
    """Return the group that leaves this process the least; where none sets a limit, its own."""
    found = group_folders(root)
    if isinstance(found, Unavailable):
        return Cgroup(found, found, found, found, found, found, found, found, found)
    form, folders = found
    return min((_group(form, folder, own=folders[0]) for folder in folders), key=_room)


def _group(form: Form, folder: Path, *, own: Path) -> Cgroup:
    """Return what the files of ``folder`` tell.

    Pages that wait to be written cannot be dropped at once; tmpfs and locked pages stand on other lists than those
    that files are reclaimed from.
    """
    stat = Table(folder / "memory.stat")
    active, inactive = (stat[key] for key in form.reclaimed_from)
    return Cgroup(
        version=form.version,
        limit=_limit(form, folder, stat),
        used=number(folder / form.usage),
        file=stat[form.file],
        reclaimable=less(total(active, inactive), *(stat[key] for key in form.unwritten)),
        anon=stat[form.anon],
        tmpfs=stat[form.tmpfs],
        oom_kills=Table(own / form.kills)["oom_kill"],
        ooms=_ooms(form, folder),
        own=own,
    )


def _limit(form: Form, folder: Path, stat: Table) -> Measured:
    """Return the strictest limit of one group; v1 tells in ``memory.stat`` also that of groups above it."""
    own = [_bound(folder / name) for name in form.limits]
    above = [stat["hierarchical_memory_limit"]] if form is _V1 else []
    told = [limit for limit in (*own, *above) if isinstance(limit, int)]
    if told and min(told) < UNLIMITED:
        return min(told)
    return next((limit for limit in own if isinstance(limit, Unavailable)), _NO_LIMIT)


def _bound(path: Path) -> Measured:
    """Return the number in ``path``, in which v2 writes ``max`` for no limit."""
    found = text(path)
    return UNLIMITED if isinstance(found, str) and found.strip() == "max" else number(path)


def _ooms(form: Form, folder: Path) -> Measured:
    """Return how often the group ran out. v1 counts how often its limit was met, which page cache does as well."""
    if form is _V2:
        return Table(folder / "memory.events")["oom"]
    met = number(folder / "memory.failcnt")
    if isinstance(met, Unavailable) or met == 0:
        return met
    return Unavailable(f"cgroup v1 counts only how often the limit was met, page cache included: {met} times")


def _room(group: Cgroup) -> float:
    """Return what the group could still be charged with, endless where it has no limit."""
    if isinstance(group.limit, Unavailable) or isinstance(group.used, Unavailable):
        return float("inf")
    return group.limit - group.used + (group.reclaimable if isinstance(group.reclaimable, int) else 0)


def group_folders(root: Path) -> tuple[Form, list[Path]] | Unavailable:
    """Return the version in force, and the folders of this process's own group and of those above it."""
    memberships = text(root / "proc/self/cgroup")
    if isinstance(memberships, Unavailable):
        return Unavailable("the kernel does not tell which cgroup this process is in")
    found = _membership(memberships)
    if isinstance(found, Unavailable):
        return found
    form, path = found
    top = next(filter(may_exist, (root / mount for mount in form.mounts)), None)
    if top is None:
        return Unavailable(f"the files of the memory cgroup (v{form.version}) are not mounted here")
    folders = list(_upwards(form, _place(top, path), top))
    return (form, folders) if folders else Unavailable("this process is in the root of the cgroups, without a limit")


def _membership(text: str) -> tuple[Form, str] | Unavailable:
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


def _place(top: Path, path: str) -> Path:
    """Return the folder of the group at ``path`` below what is mounted, the mount itself where none is there."""
    parts = PurePosixPath(path).parts[1:]
    # A group outside of this process's cgroup namespace begins with "/..".
    folders = [top.joinpath(*parts[first:]) for first in range(len(parts))] if ".." not in parts else []
    return next(filter(may_exist, folders), top)


def _upwards(form: Form, own: Path, top: Path) -> Iterator[Path]:
    """Yield the folders with a memory controller from ``own`` up to ``top``, those whose limit counts for it."""
    for folder in (own, *own.parents):
        if may_exist(folder / form.usage):
            yield folder
        # Before Linux 5.11 the groups below a v1 group were not counted in it unless told so, by this file.
        if folder == top or number(folder.parent / "memory.use_hierarchy") == 0:
            return
