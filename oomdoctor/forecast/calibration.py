"""How far forecasts were off on this machine: kept from one healed cell to the next, so that the error shown is earned.

A row is a forecast peak and the peak measured when the changed cell ran, with what tells which rows are alike: the
basis, the version of torch, the kind of device, and a hash of the names of the model classes. No code, no name and no
path is kept. The rows lie in one file of the user's cache directory, the newest last, at most a thousand or so.

The error is a conformal bound: with ``n`` rows the ``ceil(0.95 (n + 1))``-th smallest error, which the next forecast
stays within with a probability of at least 95 %, provided that it is like those before it. That takes 19 rows; from 20
on it is used. It can only widen the margin that the benchmarks found, since rows come from cells that were healed, and
those whose forecast was too low are missing among them: they ran out of memory again.

Limits: where files cannot be locked (Windows), two processes that write in the same moment may lose a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from oomdoctor.model.absence import Unavailable

__all__ = [
    *("Calibration", "Row", "applied", "applied_now", "cache_folder", "calibration", "hash_of", "keep", "rows"),
    *("summary", "widened"),
]

_FILE: Final = "forecasts.jsonl"
_KEPT: Final = 1000
_MOST: Final = 1200
"""So many rows make the file be cut to the newest ``_KEPT``."""
_LEAST: Final = 20
_COVERAGE: Final = 0.95
_LONGEST: Final = 1 << 20
"""A file of more bytes is no file of ours, or a damaged one: its end alone is read."""
_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forecast beside what was measured, in bytes.

    Attributes:
        basis: of the forecast.
        models: hash of the names of the model classes; ``torch``: its version; ``device``: the kind of device.
    """

    forecast: int
    measured: int
    basis: str
    models: str
    torch: str
    device: str

    @property
    def error_ratio(self) -> float:
        """How far off the forecast was, as a share of it."""
        return abs(self.measured / self.forecast - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the rows say of forecasts like the next one.

    Attributes:
        rows: how many are alike.
        error_ratio: how far off 95 % of such forecasts are at most, None where there are too few rows to say.
    """

    rows: int = 0
    error_ratio: float | None = None

    def widened(self, margin: float) -> float:
        """Return the margin of the benchmarks, or the error that was met here where that is larger."""
        return margin if self.error_ratio is None else max(margin, round(self.error_ratio, 4))


_NONE: Final = Calibration()
_applied: ContextVar[Calibration] = ContextVar("calibration", default=_NONE)


@contextlib.contextmanager
def applied(found: Calibration) -> Iterator[None]:
    """Have forecasts that are made in this block, and in processes that it forks, tell the error of ``found``."""
    token = _applied.set(found)
    try:
        yield
    finally:
        _applied.reset(token)


def applied_now() -> Calibration:
    """Return what is applied to forecasts where this is called."""
    return _applied.get()


def widened(margin: float) -> float:
    """Return the error to tell where the benchmarks found ``margin``."""
    return _applied.get().widened(margin)


def calibration(kept: Iterable[Row], *, basis: str, models: str, torch: str, device: str) -> Calibration:
    """Return what ``kept`` says of a forecast of this kind: rows of the same models alone where they are enough."""
    alike = [row for row in kept if (row.basis, row.torch, row.device) == (basis, torch, device)]
    same = [row for row in alike if row.models == models]
    chosen = same if len(same) >= _LEAST else alike
    return Calibration(rows=len(chosen), error_ratio=_bound(chosen))


def summary(kept: tuple[Row, ...] | Unavailable) -> str:
    """Say how many rows there are, and how far off the forecasts were."""
    if isinstance(kept, Unavailable):
        return kept.reason
    bound = _bound(kept)
    if bound is None:
        return f"{len(kept)}" if not kept else f"{len(kept)} (their error is told from {_LEAST} on)"
    return f"{len(kept)}, {_COVERAGE:.0%} of them at most {bound:.1%} off"


def _bound(kept: Sequence[Row]) -> float | None:
    """Return what the error of the next forecast stays below with the probability that is asked for."""
    if len(kept) < _LEAST:
        return None
    return sorted(row.error_ratio for row in kept)[math.ceil(_COVERAGE * (len(kept) + 1)) - 1]


def hash_of(classes: Iterable[str]) -> str:
    """Return a hash of names of classes, the same whatever their order."""
    return hashlib.sha256("\n".join(sorted(set(classes))).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder for what may be lost: that of the system, in the user's home.

    Source: XDG Base Directory Specification 0.8; an ``XDG_CACHE_HOME`` that is not absolute is to be ignored.
    """
    told = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if told.is_absolute():
        return told / "oomdoctor"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "oomdoctor" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "oomdoctor"
    return Path.home() / ".cache" / "oomdoctor"


def rows(folder: Path | None = None) -> tuple[Row, ...] | Unavailable:
    """Return what is kept, oldest first; lines that are damaged are passed over."""
    try:
        path = (folder or cache_folder()) / _FILE
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - _LONGEST, 0))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return Unavailable(f"the forecasts kept could not be read: {_told(error)}")
    return tuple(row for line in lines[-_MOST:] if (row := _parsed(line)) is not None)


def keep(row: Row, folder: Path | None = None) -> Unavailable | None:
    """Add a row; return why it could not be added, if so."""
    try:
        where = folder or cache_folder()
        where.mkdir(parents=True, exist_ok=True)
        with _locked(where / f"{_FILE}.lock"):
            _append(where / _FILE, row)
    except (OSError, RuntimeError) as error:
        return Unavailable(f"the forecast could not be kept: {_told(error)}")
    return None


def _append(path: Path, row: Row) -> None:
    line = json.dumps(asdict(row)).encode() + b"\n"
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        whole = not size or file.read(1) == b"\n"  # the last writer was not cut off
        file.write(line if whole else b"\n" + line)
        file.flush()
        file.seek(max(size - _LONGEST, 0))
        lines = file.read().splitlines(keepends=True)
    if size > _LONGEST or len(lines) > _MOST:
        _replace(path, [line for line in lines[-_KEPT:] if _parsed(line) is not None])


def _replace(path: Path, lines: list[bytes]) -> None:
    """Write the file anew, so that whoever reads it meets the old one or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(b"".join(lines))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes out for the time of the block.

    Raises:
        OSError: one of them does not come out.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    with path.open("ab") as file:
        end = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        yield  # closing the file unlocks it


def _parsed(line: bytes) -> Row | None:
    try:
        fields: Any = json.loads(line)
        row = Row(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (row.basis, row.models, row.torch, row.device)
    sound = all(type(size) is int and size > 0 for size in (row.forecast, row.measured))
    return row if sound and all(type(text) is str for text in texts) else None


def _told(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
