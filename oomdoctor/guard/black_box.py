"""A record of what the kernel is doing that outlives it, and what the next kernel makes of it.

The record is a file of 4 KiB that is mapped shared: what is written there is in the page cache, so it is there after a
SIGKILL too. It says which kernel it is, and while a cell runs which one, at which line, and with how much memory. A
lock on it tells that its process is alive, in containers that share the folder as well. A record whose process is gone
while a cell was running is told once, by the next kernel in the same place; a clean end leaves none.

What proves that the kernel's OOM killer ended a process is its counter for the memory cgroup, where it rose after the
last look of that process: workers and copies that were killed before are in what it has seen. A container that was
restarted has a new counter: then how full the memory was makes it probable, and no more.

Limits: Linux and macOS, where files can be locked. A record on a file system without locks is left alone.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomdoctor.model.sizes import format_size

try:
    fcntl: Any = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

SIZE: Final = 4096
_NOW: Final = struct.Struct("<qqqqqqq240s")
"""Whether a cell runs, its line, RSS, use and limit of the memory that binds, kills, when that was, the line's text."""
_LENGTH: Final = struct.Struct("<q")
_NAMES: Final = _NOW.size + _LENGTH.size
_SUFFIX: Final = ".oomdoctor"
_KEPT_S: Final = 30 * 86_400
"""Age from which a record that nobody has come back to is removed."""
_NEAR_RATIO: Final = 0.8
_UNKNOWN: Final = -1
_LONGEST: Final = 100
_LONGEST_TEXT: Final = 1_500


class Now(NamedTuple):
    """What a record says of the moment, sizes in bytes; ``kills`` is the group's counter, below zero for unknown."""

    running: int
    line: int
    rss: int
    used: int
    limit: int
    kills: int
    at_ns: int
    text: bytes


class Record:
    """The record of this kernel.

    Args:
        folder: where it is.
        facts: what does not change: the place and the group.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._path = folder / f"{os.getpid()}-{time.time_ns()}{_SUFFIX}"
        self._facts, self._owner = dict(facts), os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, SIZE)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptor, self._map = descriptor, mmap.mmap(descriptor, SIZE)  # shared, so that it is no data

    def begin(self, number: int, source: str) -> None:
        """Note the cell that begins."""
        told = {**self._facts, "cell": number, "source": source[:_LONGEST_TEXT]}
        text = json.dumps(told).encode()
        if len(text) > SIZE - _NAMES:
            text = json.dumps({**told, "source": source[: _LONGEST_TEXT // 6]}).encode()[: SIZE - _NAMES]
        self._map[_NOW.size : _NAMES + len(text)] = _LENGTH.pack(len(text)) + text
        self.note(kills=None)

    def note(
        self, *, kills: int | None, line: int = 0, text: str = "", rss: int = 0, used: int = 0, limit: int = 0
    ) -> None:
        """Note the moment, in which a cell runs."""
        counter = _UNKNOWN if kills is None else kills
        _NOW.pack_into(self._map, 0, 1, line, rss, used, limit, counter, time.time_ns(), text.encode()[:240])

    def end(self) -> None:
        """Note that no cell is running."""
        _NOW.pack_into(self._map, 0, 0, 0, 0, 0, 0, _UNKNOWN, time.time_ns(), b"")

    def remove(self) -> None:
        """Remove it: this kernel ends as it should."""
        if self._owner == os.getpid():
            with suppress(OSError):
                self._path.unlink()
            self.close()

    def close(self) -> None:
        """Let go of the file, which stays."""
        with suppress(OSError, ValueError):
            self._map.close()
            os.close(self._descriptor)


def place() -> dict[str, str]:
    """Return what tells the place of this kernel: the machine, the notebook's folder, and the notebook where known."""
    return {
        "host": socket.gethostname(),
        "folder": str(Path.cwd()),
        "notebook": os.environ.get("JPY_SESSION_NAME", ""),
    }


def system() -> dict[str, str]:
    """Return what is another after the machine or the container was started anew."""
    told = {}
    for name, path in (("boot", "/proc/sys/kernel/random/boot_id"), ("pids", "/proc/self/ns/pid")):
        with suppress(OSError):
            told[name] = str(Path(path).readlink()) if name == "pids" else Path(path).read_text("ascii").strip()
    return told


def opened(folder: Path, facts: Mapping[str, Any]) -> Record | None:
    """Return a record in ``folder``, which is made; None where there can be none."""
    if fcntl is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Record(folder, facts)
    except (OSError, ValueError):
        return None


def left_behind(folder: Path, here: Mapping[str, str]) -> Iterator[tuple[dict[str, Any], Now]]:
    """Yield the facts of each kernel that has ended while a cell ran, at the place ``here``, and remove its record."""
    if fcntl is None or not folder.is_dir():
        return
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with suppress(OSError, ValueError, KeyError, struct.error):
            found = _read_if_dead(path)
            if found is None:
                continue
            facts, now = found
            if any(facts[name] != value for name, value in here.items()):
                if time.time() - now.at_ns / 1e9 > _KEPT_S:
                    path.unlink()
                continue
            path.unlink()
            if now.running:
                yield facts, now


def _read_if_dead(path: Path) -> tuple[dict[str, Any], Now] | None:
    """Return what a record says whose process holds no lock on it any more."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: it is alive
        content = os.read(descriptor, SIZE)
    finally:
        os.close(descriptor)
    now = Now(*_NOW.unpack_from(content))
    (length,) = _LENGTH.unpack_from(content, _NOW.size)
    if not 0 < length <= SIZE - _NAMES:  # it had run no cell
        path.unlink()
        return None
    facts = json.loads(content[_NAMES : _NAMES + length])
    return facts if facts is None else (facts, now)


def verdict(facts: Mapping[str, Any], now: Now, group: str, kills: int | None) -> str:
    """Return the sentences that say how the kernel of a record has ended.

    Args:
        group: of this kernel; ``kills``: its counter now.
    """
    text = now.text.rstrip(b"\0").decode("utf-8", "replace").strip()
    line = f", line {now.line}: `{text[:_LONGEST]}`" if now.line else ""
    where = f"In[{facts['cell']}]{line}"
    held = f" The kernel held {format_size(now.rss)}." if now.rss else ""
    if now.limit:
        held += f" {format_size(now.used)} of {format_size(now.limit)} were in use."
    is_same = facts.get("group") == group and facts.get("system") == system()
    is_full = now.limit > 0 and now.used >= _NEAR_RATIO * now.limit
    if is_same and now.kills != _UNKNOWN and kills is not None and kills > now.kills:
        what, proof = (
            "The OOM killer ended the last kernel in",
            f"The kill counter of this group rose by {kills - now.kills} after its last look.",
        )
    elif is_same and now.kills != _UNKNOWN and kills is not None:
        what, proof = (
            "Something else than the OOM killer ended the last kernel in",
            "The kill counter of this group did not rise after its last look.",
        )
    elif is_full:
        what, proof = (
            "The OOM killer probably ended the last kernel in",
            "Its container has gone, and its kill counter with it.",
        )
    else:
        what, proof = "Something ended the last kernel in", "Its container has gone, and memory was not full."
    return f"{what} {where}.{held} {proof}"
