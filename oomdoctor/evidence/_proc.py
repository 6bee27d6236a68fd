"""Small files of the kernel, read as numbers. What is not there or not allowed is ``Unavailable`` and says which file.

The files under ``/proc`` and ``/sys/fs/cgroup`` that tell about memory come in two forms: one number, and a table with
``key value`` on each line, where a value may carry the unit ``kB``.

Source: proc(5), Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import Measured

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
