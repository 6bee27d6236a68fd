"""Finds rule files and reads them: plain files of text of a sane size, each once, whatever lies beside them.

What begins with a dot is passed over: Jupyter keeps copies in ``.ipynb_checkpoints``.
Limits: links to folders below the one that was named are not followed.
"""

from __future__ import annotations

import os
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
        paths: files, which are taken whatever they are called, and folders, which are searched for rule files.
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
    def fault(where: Path, message: str) -> None:
        faults.append(Fault(path=str(where), line=1, message=message))

    def refused(error: OSError) -> None:
        fault(Path(error.filename or path), f"the folder cannot be read: {error.strerror}")

    try:
        os.stat(path)  # noqa: PTH116 - `Path.exists` would hide why
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can be called so
        return fault(path, "there is no such file or folder")
    except OSError as error:
        return fault(path, f"it cannot be looked at: {error.strerror}")
    if not path.is_dir():
        yield path
        return
    entries = 0
    for place, folders, names in os.walk(path, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        entries += len(folders) + len(names)
        if entries > _MOST_ENTRIES:
            fault(path, f"more than {_MOST_ENTRIES:,} files lie here: name the folder of the rules")
            return
        for name in sorted(names):
            if not name.startswith(".") and (one := Path(place, name)).suffix.lower() in _SUFFIXES:
                yield one


def text_of(path: Path) -> str:
    """Return the text of a file, without the mark that editors of Windows put first.

    Raises:
        ValueError: it is no file, too large, no text in UTF-8, or cannot be read; the message says which, in one line.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe that nobody writes to would be waited for
            raise ValueError("this is not a plain file")
        content = path.read_bytes() if path.stat().st_size <= _LARGEST else None
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror or error}") from None
    if content is None:
        raise ValueError(f"a rule file has at most {_LARGEST >> 10} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ValueError(f"the file is not text in UTF-8: line {line} has the byte {byte:#04x}") from None
