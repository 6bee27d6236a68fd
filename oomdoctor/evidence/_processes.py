"""The memory of this process and of those that it started.

Resident sets cannot be added up: pages that a worker shares with the process it was forked from are in both. What is
one's alone (USS) and the shared pages divided among their users (PSS) can, but the kernel must walk every page table
entry of the process for them. That takes about 15 ms for each GiB that is resident in pages of 4 KiB (measured on an
AMD EPYC with Linux 6.18), so what may be walked for one reading is bounded, the largest processes after this one first.

A DataLoader's workers are known by their place in the iterator that started them, which is found from the process
objects that ``multiprocessing`` keeps, and by the name that the user's loader goes by. Limits: a worker that a worker
started is known by the name of its thread alone, which torch sets since 2.6.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import psutil

from oomdoctor.evidence._models import held
from oomdoctor.model.memory import HostProcess, Measured
from oomdoctor.model.sizes import GIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.objects.alive import alive
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict
from oomdoctor.objects.named import is_users

_MOST_WALKED: Final = 16 * GIB
LEFT_OUT: Final = Unavailable("it was not read, to save time")
_ENDED: Final = Unavailable("it has ended and holds no memory")
_FORBIDDEN: Final = Unavailable("this process may not read it")
_UNTOLD: Final = Unavailable("the system tells nothing of its processes")
_UNREADABLE: Final = (psutil.Error, OSError, ValueError, LookupError, RuntimeError)
"""What psutil raises where ``/proc`` is missing, or a file there has another form than it knows."""

_LONGEST: Final = 60
_WORKER_THREAD: Final = "pt_data_worker"
"""Source: ``torch.utils.data._utils.worker._worker_loop``."""
_HELPERS: Final = {
    "multiprocessing.resource_tracker": "multiprocessing resource tracker",
    "multiprocessing.forkserver": "multiprocessing fork server",
}
_SECRET: Final = re.compile(r"(?i)((?:token|passw(?:or)?d|secret|api[-_]?key)[= ])\S+")


class Processes(NamedTuple):
    """The fields of ``HostMemory`` that are of processes, in bytes."""

    rss: Measured
    uss: Measured = LEFT_OUT
    pss: Measured = LEFT_OUT
    children: tuple[HostProcess, ...] | Unavailable = LEFT_OUT


def read(*, in_full: bool = True, most_walked: int = _MOST_WALKED) -> Processes:
    """Return the memory of this process and of those that it or its children started.

    Args:
        in_full: read more than the resident set of this process.
        most_walked: resident bytes, summed over processes, that USS and PSS may be read of.
    """
    try:
        own = psutil.Process()
        rss = _resident(own)
    except _UNREADABLE:
        return Processes(_UNTOLD, _UNTOLD, _UNTOLD, _UNTOLD) if in_full else Processes(_UNTOLD)
    if not in_full:
        return Processes(rss)
    left = most_walked - (rss if isinstance(rss, int) else 0)
    try:
        uss, pss = _alone_and_shared(own, rss, most_walked)
    except _UNREADABLE:
        uss = pss = _UNTOLD
    try:
        children: tuple[HostProcess, ...] | Unavailable = tuple(_children(own, left))
    except _UNREADABLE:
        children = Unavailable("the system does not tell which processes this one started")
    return Processes(rss=rss, uss=uss, pss=pss, children=children)


def _children(own: psutil.Process, left: int) -> Iterator[HostProcess]:
    below = own.children(recursive=True)
    if not below:
        return
    known, own_command = names(), _command(own)
    sized = []
    for child in below:
        with suppress(psutil.NoSuchProcess):
            sized.append((child, _resident(child)))
    for child, rss in sorted(sized, key=lambda one: -one[1] if isinstance(one[1], int) else 0):
        # One that ends while it is looked at is left out.
        with suppress(psutil.NoSuchProcess):
            name = _label(child, known, own_command)
            if rss is _ENDED:
                yield HostProcess(pid=child.pid, label=f"{name} (ended)", rss=_ENDED, uss=_ENDED, pss=_ENDED)
                continue
            uss, pss = _alone_and_shared(child, rss, left)
            left -= rss if isinstance(uss, int) and isinstance(rss, int) else 0
            yield HostProcess(pid=child.pid, label=name, rss=rss, uss=uss, pss=pss)


def _resident(process: psutil.Process) -> Measured:
    try:
        return _ENDED if process.status() == psutil.STATUS_ZOMBIE else int(process.memory_info().rss)
    except psutil.ZombieProcess:
        return _ENDED
    except psutil.AccessDenied:
        return _FORBIDDEN


def _alone_and_shared(process: psutil.Process, rss: Measured, left: int) -> tuple[Measured, Measured]:
    """Return USS and PSS of a process."""
    if isinstance(rss, Unavailable):
        return rss, rss
    if rss > left:
        why = Unavailable("walking that much resident memory would take too long")
        return why, why
    try:
        found = process.memory_full_info()
    except psutil.AccessDenied:
        return _FORBIDDEN, _FORBIDDEN
    return _field(found, "uss"), _field(found, "pss")


def _field(found: object, name: str) -> Measured:
    value = getattr(found, name, None)
    return int(value) if value is not None else Unavailable(f"the system does not tell the {name.upper()} of a process")


def names() -> dict[int, str]:
    """Return the names of the processes that ``multiprocessing`` started here, by pid."""
    # ``active_children`` would reap those that have ended.
    started = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
    called = ((_pid_of(one), held(one, "_name")) for one in started)
    known = {
        pid: f"{name if type(name) is str else 'process'} (multiprocessing)" for pid, name in called if pid is not None
    }
    module = sys.modules.get("torch.utils.data.dataloader")
    for iterator in alive(module._MultiProcessingDataLoaderIter) if known and module is not None else ():
        state = plain_dict(iterator) or {}
        loader, workers = _loader_name(state), state.get("_workers")
        for index, worker in enumerate(workers if type(workers) is list else ()):
            if (pid := _pid_of(worker)) in known:
                known[pid] = f"DataLoader worker {index}" + (f" of {loader}" if loader else "")
    return known


def _pid_of(process: Any) -> Any:
    pid = held(process, "_popen", "pid")
    return pid if type(pid) is int else None


def _loader_name(iterator: dict[str, Any]) -> str | None:
    """Return the name in the main module of the loader with the same dataset and as many workers."""
    for name, value in list((plain_dict(sys.modules.get("__main__")) or {}).items()):
        if is_users(name) and kind_of(type(value)) is Kind.LOADER:
            loader = plain_dict(value) or {}
            if all(loader.get(of) is iterator.get(f"_{of}") for of in ("dataset", "num_workers")):
                return name
    return None


def _label(process: psutil.Process, known: dict[int, str], own_command: list[str]) -> str:
    if process.pid in known:
        return known[process.pid]
    name, words = process.name(), _command(process)
    if name == _WORKER_THREAD:
        return "DataLoader worker"
    for module, helper in _HELPERS.items():
        if any(f"from {module} import main" in word for word in words):
            return helper
    if words and words == own_command:
        return "fork of this process"
    return _shown(" ".join([PurePath(words[0]).name, *words[1:]])) if words else _shown(name)


def _command(process: psutil.Process) -> list[str]:
    """Return the command line of ``process``, empty where it may not be read or the process has only to be reaped."""
    try:
        return process.cmdline()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return []


def _shown(line: str) -> str:
    """Return a command line on one line, cut, without control characters and without what is called a secret."""
    plain = "".join(char if char.isprintable() else " " for char in line)
    masked = _SECRET.sub(r"\1…", plain)
    return masked if len(masked) <= _LONGEST else masked[: _LONGEST - 1] + "…"
