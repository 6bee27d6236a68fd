"""Teams of OpenMP: the threads among which a parallel region of PyTorch or NumPy divides its work.

A runtime of OpenMP begins the threads of a team at the first region, keeps them, and ends the *process* where one
cannot begin ("libgomp: Thread creation failed"). Where memory is short that is the user's kernel, so a team begins
while there is room, or regions have one thread. Copies of a process have one thread (see ``fork``): a team does not
come along, and GNU's runtime waits for it. Where the team has ended before, a copy may begin its own.

Limits: runtimes are found in ``/proc``, which is Linux's; elsewhere torch alone can be told to have one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from oomdoctor.sandbox import reserve

_STACK: Final = 8 << 20
"""Bytes of a thread's stack where no limit on stacks is set."""

_HARD: Final = 2
"""``omp_pause_hard``: threads end."""

_begun: dict[str, tuple[int, int]] = {}
"""Of each runtime the process in which its team was begun here, and of how many threads it is."""


def keep_one_thread() -> None:
    """Have each parallel region run in one thread from now on."""
    _have_torch_set_its_number()
    for _, runtime in _runtimes():
        # A number of threads that is set later changes nothing in that, but what waits for so many waits for ever.
        runtime.omp_set_max_active_levels(0)
        runtime.omp_set_num_threads(1)  # torch's way to say it makes its other pool anew
    if sys.platform == "darwin" and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def begin_teams() -> bool:
    """Have each runtime begin this thread's team where there is room for it; return whether all teams are there."""
    done = True
    for path, runtime in _runtimes():
        threads = runtime.omp_get_max_threads()
        process, begun = _begun.get(path, (0, 0))
        if threads > 1 and (process != os.getpid() or begun < threads):
            if _has_room_for(threads - 1) and hasattr(runtime, "GOMP_parallel"):
                # A region that does nothing. LLVM's runtime and Intel's have this function of GNU's too.
                runtime.GOMP_parallel(ctypes.CDLL(None).getpid, None, 0, 0)
                _begun[path] = os.getpid(), threads
            else:
                done = False
    return done


@contextlib.contextmanager
def teams_in_room() -> Iterator[None]:
    """Run the body with teams that are there already, and where there is no room for them with one thread.

    Runtimes say so too when they are asked: oneDNN waits for as many threads as it was told that there are.
    """
    if begin_teams():
        yield
        return
    _have_torch_set_its_number()
    before = _settings(one for _, one in _runtimes())
    keep_one_thread()
    try:
        yield
    finally:
        _allow(before)


@contextlib.contextmanager
def teams_ended() -> Iterator[Callable[[int], None]]:
    """End this thread's teams while the body copies the process; yield what lets a copy begin teams of its own.

    It takes how many copies there are at once: each gets its share of the threads.

    That does nothing where teams cannot be ended, or could not begin again. Source: ``omp_pause_resource_all`` of
    OpenMP 5.0; GNU's runtime has it from GCC 9 on.
    """
    _have_torch_set_its_number()
    found = list(_runtimes())
    before = _settings(one for _, one in found)
    threads = max((threads for _, _, threads in before), default=1)
    can_end = threads > 1 and all(hasattr(one, "omp_pause_resource_all") for _, one in found)
    if not can_end or not _has_room_for(2 * (threads - 1)):  # a copy has one thread: to end a team would wait for it
        yield lambda _: None
        return
    again = {path for path, _ in found if path in _begun}
    ended = [one.omp_pause_resource_all(_HARD) == 0 for _, one in found]
    for path in again:
        del _begun[path]
    try:
        torch = sys.modules.get("torch")
        # Taken here: a copy may have put something else in its place.
        told = (lambda _: None, 1) if torch is None else (torch.set_num_threads, torch.get_num_threads())
        yield partial(_begin_anew, before, *told) if all(ended) else lambda _: None
    finally:
        if again:
            begin_teams()


def _settings(runtimes: Iterable[Any]) -> list[tuple[Any, int, int]]:
    """Return each runtime with how deep its regions may divide their work, and among how many threads."""
    return [(one, one.omp_get_max_active_levels(), one.omp_get_max_threads()) for one in runtimes]


def _allow(before: list[tuple[Any, int, int]]) -> None:
    for runtime, levels, threads in before:
        runtime.omp_set_max_active_levels(levels)
        runtime.omp_set_num_threads(threads)


def _begin_anew(
    before: list[tuple[Any, int, int]], set_number: Callable[[int], None], number: int, copies: int
) -> None:
    """Let a copy have teams of its own. Torch's other pool is made anew first: a team's threads would race for it.

    MKL would take fewer threads while the other copies keep the machine busy, and round otherwise then.
    """
    if number // copies > 1:
        _allow([(runtime, levels, max(threads // copies, 1)) for runtime, levels, threads in before])
        for _, library in _libraries("libtorch_cpu", "mkl_rt"):
            if hasattr(library, "MKL_Set_Dynamic"):
                library.MKL_Set_Dynamic(0)
        set_number(number // copies)


def _have_torch_set_its_number() -> None:
    """Have torch tell the runtime its number of threads now. Source: ``lazy_init_num_threads`` in ``Parallel.h``."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()


def _has_room_for(threads: int) -> bool:
    import resource  # which Windows has not

    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return reserve.has_room(threads * (_STACK if stack == resource.RLIM_INFINITY else stack) + reserve.FOR_THREAD)


def _runtimes() -> Iterator[tuple[str, Any]]:
    """Yield the place and the library of each runtime that this process has loaded."""
    return (found for found in _libraries("omp") if hasattr(found[1], "omp_set_max_active_levels"))


def _libraries(*words: str) -> Iterator[tuple[str, Any]]:
    """Yield the place of each library that this process has loaded whose name has one of some words, and itself."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    mapped = (line.split(maxsplit=5) for line in lines if any(word in line for word in words))
    code = {of[5] for of in mapped if len(of) == 6 and "x" in of[1]}
    for path in sorted(one for one in code if any(word in Path(one).name for word in words)):
        with contextlib.suppress(OSError):
            yield path, ctypes.CDLL(path)
