"""Small files of the kernel, read as numbers. What is not there or not allowed is ``Unavailable`` and says which file.

The files under ``/proc`` and ``/sys/fs/cgroup`` that tell about memory come in two forms: one number, and a table with
``key value`` on each line, where a value may carry the unit ``kB``.

Source: proc(5), Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Measured

__all__ = ["ROOT", "Table", "less", "number", "table", "text", "total"]

ROOT: Final = Path("/")


def text(path: Path) -> str | Unavailable:
    """Return the text of a file; bytes that are not UTF-8 are kept as surrogates."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return Unavailable(f"there is no {path}")
    except OSError as error:
        return Unavailable(f"{path} cannot be read: {error.strerror}")


def number(path: Path) -> Measured:
    """Return the number that a file consists of."""
    found = text(path)
    if isinstance(found, Unavailable):
        return found
    try:
        return int(found)
    except ValueError:
        return Unavailable(f"{path} holds no number")


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of one file by their keys, sizes in bytes; a key that is not there says so."""

    path: Path
    values: Mapping[str, int] | Unavailable

    def __getitem__(self, key: str) -> Measured:
        """Return the number for ``key``."""
        if isinstance(self.values, Unavailable):
            return self.values
        return self.values.get(key, Unavailable(f"{self.path} has no {key}"))


def table(path: Path) -> Table:
    """Return the table that a file holds; lines whose value is no number are left out."""
    found = text(path)
    if isinstance(found, Unavailable):
        return Table(path, found)
    values = {}
    for line in found.splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            values[words[0].rstrip(":")] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return Table(path, values)


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
