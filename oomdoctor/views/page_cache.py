"""What the page cache is worth to a program that needs memory, in sentences with the user's own numbers.

People see a machine full of ``buff/cache`` or a container at its limit and blame the cache. Most often it is innocent:
the kernel drops clean pages of files before it refuses memory or kills. It is not where the pages have no file behind
them (tmpfs) or one that they have not been written to yet.

Source: ``drop_caches`` in Documentation/admin-guide/sysctl/vm.rst, "not a means to control the growth" of caches;
cgroup-v1/memory.rst and cgroup-v2.rst for what is charged to a group.

Limits: where the GPU shares the machine's memory, the driver may count the cache as used; the host's memory alone does
not tell whether that is so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from oomdoctor.model.memory import HostMemory
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words

_WORTH_TELLING: Final = 0.05
"""Share of the memory below which a part of the cache cannot decide whether a cell fits."""


_NEAR: Final = 0.8
"""Share of a memory cgroup's limit from which its page cache is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """The page cache of what binds, in bytes: of the memory cgroup with a limit, else of the machine.

    Attributes:
        charged_to: usage of the cgroup that counts it, None for the machine's.
        unwritten: what must be written to disk first.
    """

    whole: int
    charged_to: int | None
    size: int
    droppable: int | None
    tmpfs: int
    unwritten: int
    has_swap: bool

    def matters(self, part: int | None) -> bool:
        """Return whether ``part`` is worth a sentence."""
        return part is not None and part >= _WORTH_TELLING * self.whole


def page_cache_advice(host: HostMemory) -> tuple[str, ...]:
    """Return at most four sentences: whether the page cache is the cause, and what could be done about it."""
    cache = _of_group(host) or _of_machine(host)
    return tuple(_sentences(cache)) if cache is not None else ()


def is_in_question(host: HostMemory) -> bool:
    """Return whether the page cache may be why memory is short.

    That is where a memory cgroup is near its limit, which counts the cache as used, and where most of the memory that
    is not available is cache that the kernel cannot drop. Cache that it can drop is available.
    """
    limit, used = words.known(host.cgroup_limit), words.known(host.cgroup_used)
    if limit and used is not None and used >= _NEAR * limit:
        return True
    total, available, size = words.known(host.total), words.known(host.available), words.known(host.page_cache)
    if total is None or available is None or size is None:
        return False
    droppable = words.known(host.reclaimable)
    held = (
        size - droppable if droppable is not None else (words.known(host.tmpfs) or 0) + (words.known(host.dirty) or 0)
    )
    return held > (total - available) / 2


def _of_group(host: HostMemory) -> _Cache | None:
    limit, used, size = (words.known(value) for value in (host.cgroup_limit, host.cgroup_used, host.cgroup_file))
    total = words.known(host.total)
    if limit is None or used is None or size is None or (total is not None and total <= limit):
        return None
    droppable, tmpfs = words.known(host.cgroup_reclaimable), words.known(host.cgroup_tmpfs) or 0
    return _Cache(
        whole=limit,
        charged_to=used,
        size=size,
        droppable=droppable,
        tmpfs=tmpfs,
        unwritten=0 if droppable is None else max(size - tmpfs - droppable, 0),
        has_swap=bool(words.known(host.swap_total)),
    )


def _of_machine(host: HostMemory) -> _Cache | None:
    total, size = words.known(host.total), words.known(host.page_cache)
    if total is None or size is None:
        return None
    return _Cache(
        whole=total,
        charged_to=None,
        size=size,
        droppable=words.known(host.reclaimable),
        tmpfs=words.known(host.tmpfs) or 0,
        unwritten=words.known(host.dirty) or 0,
        has_swap=bool(words.known(host.swap_total)),
    )


def _sentences(cache: _Cache) -> Iterator[str]:
    size = format_size(cache.size)
    if not cache.matters(cache.size):
        where = "" if cache.charged_to is None else " in this memory cgroup"
        yield f"Page cache holds copies of files; {size}{where} is too little to be the cause."
        return
    yield _what_it_is(cache, size)
    if cache.matters(cache.tmpfs):
        fate = "can only move to swap" if cache.has_swap else "cannot drop"
        yield (
            f"{format_size(cache.tmpfs)} is tmpfs (/dev/shm and shared memory), which the kernel {fate}: "
            "delete the files or end the processes that hold it."
        )
    if cache.matters(cache.unwritten):
        why = "waits to be written to disk" if cache.charged_to is None else "waits to be written to disk or is locked"
        yield f"{format_size(cache.unwritten)} {why} and cannot be dropped before; `sync` writes files."
    if cache.droppable is not None and cache.matters(cache.droppable):
        yield (
            f"`drop_caches` would not help: it needs root, frees only what the kernel would drop by itself "
            f"({format_size(cache.droppable)}), and every file must then be read from disk again."
        )


def _what_it_is(cache: _Cache, size: str) -> str:
    """Return what is cached, and what of it is not the cause because the kernel can drop it."""
    if cache.charged_to is None:
        what, when = f"Page cache holds copies of files, {size} here", "when a program needs the memory"
    else:
        used = format_size(cache.charged_to)
        what = f"The {used} that the memory cgroup counts as used include {size} of page cache, copies of files"
        when = "before it kills a process"
    if cache.droppable is None:
        return f"{what}; the kernel drops what is clean of it {when}."
    if not cache.matters(cache.droppable) and cache.matters(cache.size - cache.droppable):
        return f"{what}; the kernel can drop only {format_size(cache.droppable)} of it."
    return f"{what}; the kernel drops {format_size(cache.droppable)} of it {when}, so that part is not the cause."
