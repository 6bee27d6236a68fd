"""What the processes that this one started are, in the user's terms.

A DataLoader's workers are known by their place in the iterator that started them, which is found from the process
objects that ``multiprocessing`` keeps, and by the name that the user's loader goes by. Other processes are called by
their name in ``multiprocessing`` or by their command line.

Limits: a worker that a worker started has no process object here; it is known by the name of its thread alone, which
torch sets since 2.6. A loader that no name of the main module holds is not named.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

import psutil

from oomdoctor.objects.kinds import Kind, kind_of, plain_dict, spelled
from oomdoctor.objects.named import is_users

__all__ = ["command", "label", "names"]

_LONGEST: Final = 60
_WORKER_THREAD: Final = "pt_data_worker"
"""Source: ``torch.utils.data._utils.worker._worker_loop``."""
_HELPERS: Final = {
    "multiprocessing.resource_tracker": "multiprocessing resource tracker",
    "multiprocessing.forkserver": "multiprocessing fork server",
}
_SECRET: Final = re.compile(r"(?i)((?:token|passw(?:or)?d|secret|api[-_]?key)[= ])\S+")


def names() -> dict[int, str]:
    """Return the names of the processes that ``multiprocessing`` started here, by pid."""
    started = _started()
    known = {pid: f"{name} (multiprocessing)" for pid, (name, _) in started.items()}
    pids = {id(process): pid for pid, (_, process) in started.items()}
    for iterator in _iterators([process for _, process in started.values()]):
        loader = _loader_name(iterator)
        for index, worker in enumerate(iterator["_workers"]):
            if id(worker) in pids:
                known[pids[id(worker)]] = f"DataLoader worker {index}" + (f" of {loader}" if loader else "")
    return known


def _started() -> dict[int, tuple[str, Any]]:
    """Return name and object of each process by pid. ``active_children`` would reap those that have ended."""
    module = sys.modules.get("multiprocessing.process")
    found = {}
    for process in tuple(getattr(module, "_children", ())):
        state = plain_dict(process) or {}
        pid = (plain_dict(state.get("_popen")) or {}).get("pid")
        if type(pid) is int:
            name = state.get("_name")
            found[pid] = name if type(name) is str else "process", process
    return found


def _iterators(processes: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of each DataLoader iterator that holds some of ``processes`` as its workers."""
    if not processes or "torch.utils.data.dataloader" not in sys.modules:
        return
    lists = [one for one in gc.get_referrers(*processes) if type(one) is list and one is not processes]
    seen: set[int] = set()
    for holder in gc.get_referrers(*lists) if lists else ():
        # An object whose __dict__ was never asked for is the holder itself.
        state = spelled(holder) if type(holder) is dict else plain_dict(holder)
        if state is None or id(state) in seen or "_index_queues" not in state:
            continue
        if type(state.get("_workers")) is list:
            seen.add(id(state))
            yield state


def _loader_name(iterator: dict[str, Any]) -> str | None:
    """Return the name in the main module of the loader with the same dataset and as many workers."""
    for name, value in list((plain_dict(sys.modules.get("__main__")) or {}).items()):
        if is_users(name) and kind_of(type(value)) is Kind.LOADER:
            loader = plain_dict(value) or {}
            workers = loader.get("num_workers"), iterator.get("_num_workers")
            if loader.get("dataset") is iterator.get("_dataset") and _is_same(*workers):
                return name
    return None


def _is_same(one: object, other: object) -> bool:
    """Return whether two numbers are equal, without asking one of a class of the user's."""
    return one is other or (type(one) is int and type(other) is int and one == other)


def label(process: psutil.Process, known: dict[int, str], own_command: list[str]) -> str:
    """Return what ``process`` is called.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    if process.pid in known:
        return known[process.pid]
    name, words = process.name(), command(process)
    if name == _WORKER_THREAD:
        return "DataLoader worker"
    for module, helper in _HELPERS.items():
        if any(f"from {module} import main" in word for word in words):
            return helper
    if words and words == own_command:
        return "fork of this process"
    return _shown(" ".join([PurePath(words[0]).name, *words[1:]])) if words else _shown(name)


def command(process: psutil.Process) -> list[str]:
    """Return the command line of ``process``, empty where it may not be read or the process has only to be reaped.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    try:
        return process.cmdline()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return []


def _shown(line: str) -> str:
    """Return a command line on one line, cut, without control characters and without what is called a secret."""
    plain = "".join(char if char.isprintable() else " " for char in line)
    masked = _SECRET.sub(r"\1…", plain)
    return masked if len(masked) <= _LONGEST else masked[: _LONGEST - 1] + "…"
