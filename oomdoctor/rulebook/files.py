"""Finds rule files and reads them: plain files of text of a sane size, each once, whatever lies beside them.

A folder of the user's is a folder of the user's: it has links in circles, pipes, copies that Jupyter keeps in
``.ipynb_checkpoints``, and folders that may not be read. Nothing here waits for a file or reads one without end.
Limits: links to folders below the one that was named are not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from oomdoctor.errors import Fault

_LARGEST: Final = 256 << 10
_MOST_ENTRIES: Final = 100_000
_SUFFIXES: Final = frozenset({".yaml", ".yml"})


def expanded(path: Path) -> Path:
    """Return the path with ``~`` in place, as it is where there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def files_in(paths: Sequence[Path], faults: list[Fault]) -> Iterator[Path]:
    """Yield the rule files of ``paths``, each once, however many ways lead to it.

    Args:
        paths: files, which are taken whatever they are called, and folders, which are searched for rule files. What
            begins with a dot is passed over.
        faults: gets what cannot be looked at.
    """
    seen: set[str] = set()
    for path in paths:
        for one in _found(path, faults):
            real = os.path.realpath(one)
            if real not in seen:
                seen.add(real)
                yield one


def _found(path: Path, faults: list[Fault]) -> Iterator[Path]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can be called so
        faults.append(_fault(path, "there is no such file or folder"))
    except OSError as error:
        faults.append(_fault(path, f"it cannot be looked at: {error.strerror}"))
    else:
        yield from _walk(path, faults) if is_folder else (path,)


def _walk(folder: Path, faults: list[Fault]) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        faults.append(_fault(Path(error.filename or folder), f"the folder cannot be read: {error.strerror}"))

    entries = 0
    for place, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        entries += len(folders) + len(names)
        if entries > _MOST_ENTRIES:
            faults.append(_fault(folder, f"more than {_MOST_ENTRIES:,} files lie here: name the folder of the rules"))
            return
        for name in sorted(names):
            if not name.startswith(".") and (path := Path(place, name)).suffix.lower() in _SUFFIXES:
                yield path


def text_of(path: Path) -> str:
    """Return the text of a file, without the mark that editors of Windows put first.

    Raises:
        ValueError: it is no file, too large, no text in UTF-8, or cannot be read; the message says which, in one line.
    """
    try:
        # A pipe that nobody writes to would be waited for, hence not blocking; what it is, is asked of what was opened.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("this is not a plain file")
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST:
        raise ValueError(f"a rule file has at most {_LARGEST >> 10} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ValueError(f"the file is not text in UTF-8: line {line} has the byte {byte:#04x}") from None


def _fault(path: Path, message: str) -> Fault:
    return Fault(path=str(path), line=1, message=message)
