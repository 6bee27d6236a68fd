"""The host: this process and its children, the limits that are near, and what the page cache is worth.

People see a machine full of ``buff/cache`` or a container at its limit and blame the cache. Most often it is innocent:
the kernel drops clean pages of files before it refuses memory or kills. It is not where the pages have no file behind
them (tmpfs) or one that they have not been written to yet.

Source: ``drop_caches`` in Documentation/admin-guide/sysctl/vm.rst, "not a means to control the growth" of caches;
cgroup-v1/memory.rst and cgroup-v2.rst for what is charged to a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, DeviceMemory, HostHolding, HostMemory, HostProcess, Measured
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views import labels
from oomdoctor.views.device_card import Card, Fact, largest_role, roles_of
from oomdoctor.views.document import Bar
from oomdoctor.views.holders import TOP, consists_of, holders, worth_telling

_NEAR: Final = 0.8
"""Share of a limit from which it is told, and from which the page cache of a memory cgroup is looked at."""
_WORTH_TELLING: Final = 0.05
"""Share of the memory below which a part of the cache cannot decide whether a cell fits."""
_CHILDREN: Final = 5
_WORKER: Final = re.compile(r"DataLoader worker \d+(?P<loader>( of \w+)?)")
_TENSORS_BESIDE_A_DEVICE: Final = 3
_NO_TENSOR: Final = "NumPy arrays, Python objects and libraries; torch, once loaded, is 0.2 to 0.3 GiB of them"
"""Source: growth of RSS by `import torch` and a first training step, torch 2.13 for CPU: 0.2 GiB; more with CUDA."""

_SHARED: Final = "with all that it shares (RSS)"
_COUNTED: Final = {"RLIMIT_DATA": "the data segment (RLIMIT_DATA)", "RLIMIT_AS": "the address space (RLIMIT_AS)"}
_STRICT: Final = 2
"""``vm.overcommit_memory``. Source: Documentation/mm/overcommit-accounting.rst."""


def host_card(
    host: HostMemory,
    tensors: DeviceMemory | None,
    census: Census | None,
    models: Sequence[ModelFacts],
    *,
    top: int = TOP,
    is_alone: bool = True,
    simulated: int = 0,
    held: Sequence[HostHolding] = (),
) -> Card:
    """Return what to show of the host.

    Args:
        tensors: the host as the device that tensors live on; None where it was not asked about, likewise ``census``.
        top: holders to list; above ``TOP`` all limits and all children.
        is_alone: whether no device is shown above, so that the tensors of the host are what the report is about.
        simulated: bytes of tensors that count for a simulated device and lie in this process.
        held: names that lead to memory that is no tensor's.
    """
    held = worth_telling(host, held)
    is_full = top > TOP
    listed = top if is_alone or is_full else min(top, _TENSORS_BESIDE_A_DEVICE)
    is_nearer = tensors is not None and tensors.total != host.total
    basis = labels.clean(tensors.basis) if tensors is not None and is_nearer else ""
    return Card(
        headline=_headline(host, census, models, simulated, held),
        title="host memory",
        aside=f"strictest limit: {basis}" if basis else "",
        bars=tuple(bar for bar in (host_bar(host), process_bar(host, census, simulated)) if bar is not None),
        holders=holders(census, models, top=listed),
        facts=(
            *_processes(host, None if is_full else _CHILDREN, _unseen(host, census, simulated), held),
            *(_page_cache(host) if is_full or is_in_question(host) else ()),
            *_troubles(host),
            *(fact for fact, ratio in _limits(host) if is_full or ratio >= _NEAR),
        ),
    )


def ceiling(host: HostMemory) -> tuple[int, int, str] | None:
    """Return ``(total, free, which)`` of the machine's memory, or of the memory cgroup where that leaves less."""
    total, free = labels.known(host.total), labels.known(host.available)
    limit, used = labels.known(host.cgroup_limit), labels.known(host.cgroup_used)
    if limit is not None and used is not None and (free is None or limit - used < free):
        return limit, max(limit - used, 0), " (memory cgroup)"
    return None if total is None or free is None else (total, free, "")


def host_bar(host: HostMemory) -> Bar | None:
    """Return the host's memory as a bar: this process and those that it started, all else in use, and what is free."""
    whole = ceiling(host)
    if whole is None:
        return None
    total, free, which = whole
    used = total - free
    own = min(labels.known(host.rss) or 0, used)
    children = host.children if isinstance(host.children, tuple) else ()
    theirs = min(sum(labels.known(child.uss, child.rss) or 0 for child in children), max(used - own, 0))
    pieces = [
        ("process", "this process", own),
        ("children", "processes that it started", theirs),
        ("outside", "in use otherwise", used - own - theirs),
        ("free", "available", free),
    ]
    return Bar.of(f"host memory{which}", total, pieces)


def process_bar(host: HostMemory, census: Census | None, simulated: int = 0) -> Bar | None:
    """Return what this process holds of the host's memory as a bar of its own: a sliver of a large machine's.

    None where ``census`` found no tensors; ``simulated`` are the bytes of those that count for a simulated device.
    """
    rss = labels.known(host.rss)
    tensors = simulated + (census.found if census is not None else 0)
    if rss is None or not tensors:
        return None
    pieces = [] if census is None else roles_of(census)
    pieces.append(("simulated", "tensors of the simulated device", simulated))
    pieces.append(("process", "other than tensors", rss - tensors))
    return Bar.of("this process", rss, pieces)


def _headline(
    host: HostMemory, census: Census | None, models: Sequence[ModelFacts], simulated: int, held: Sequence[HostHolding]
) -> str:
    whole = ceiling(host)
    if whole is None:
        return "host memory: how much is in use is not known."
    total, free, which = whole
    rss, children = labels.known(host.rss), host.children if isinstance(host.children, tuple) else ()
    own = f", {format_size(rss)} of it by this process" if rss is not None else ""
    if (unseen := _unseen(host, census, simulated)) is not None:
        tensors = unseen < (rss or 0)
        what = f"{format_size(unseen)} of that is no tensor" if tensors else "none of that in tensors"
        if held:
            what += f"; {format_size(held[0].bytes)} is {consists_of(held[0])} in {labels.code(held[0].path)}"
        own += f" ({what})"
    theirs = sum(labels.known(child.uss, child.rss) or 0 for child in children)
    if theirs:
        own += f" and {format_size(theirs)} by {labels.count(len(children), 'process', 'processes')} that it started"
    near = [f"{fact.name} ({fact.figure})" for fact, ratio in _limits(host) if ratio >= _NEAR]
    tail = f"{_tensors(census, models, simulated)}{'; near the limit: ' if near else ''}{', '.join(near)}"
    return f"host memory{which}: {format_size(total - free)} of {format_size(total)} in use{own}{tail}."


def _tensors(census: Census | None, models: Sequence[ModelFacts], simulated: int) -> str:
    """Return how much of this process is tensors, and who has most of them."""
    told = f"; tensors of the simulated device take {format_size(simulated)}" if simulated else ""
    if census is None or not census.found or not census.roles:
        return told
    role, size = max(census.roles, key=lambda item: item[1])
    what = f"{labels.percent(size / census.found)} of it {largest_role(census, role, models)}"
    return f"{told}; tensors take {format_size(census.found)}, {what}"


def _unseen(host: HostMemory, census: Census | None, simulated: int) -> int | None:
    """Return what of this process is no tensor, None where that is the lesser part, or tensors were not searched."""
    rss = labels.known(host.rss)
    if rss is None or census is None:
        return None
    rest = rss - census.found - simulated
    return rest if rest > rss / 2 else None


def _processes(host: HostMemory, most: int | None, unseen: int | None, held: Sequence[HostHolding]) -> Iterator[Fact]:
    if isinstance(host.rss, int):
        parts = [(host.uss, "private (USS)"), (host.pss, "with its share of shared pages (PSS)")]
        why = ", ".join(f"{format_size(size)} {what}" for size, what in parts if isinstance(size, int))
        yield Fact(format_size(host.rss), "this process", why or "resident")
    if unseen is not None:
        yield Fact(format_size(unseen), "outside tensors", _NO_TENSOR)
    for one in held:
        yield Fact(format_size(one.bytes), f"of it in {labels.code(one.path)}", consists_of(one))
    children = host.children if isinstance(host.children, tuple) else ()
    rows = [(child,) for child in children] if most is None else _by_loader(children)
    shown = rows if most is None else rows[:most]
    for row in shown:
        yield _process(row[0]) if len(row) == 1 else _workers(row)
    if rest := [child for row in rows[len(shown) :] for child in row]:
        name = f"{labels.count(len(rest), 'more process', 'more processes')} that it started"
        yield Fact(format_size(sum(map(_own_bytes, rest))), name, "")


def _by_loader(children: Sequence[HostProcess]) -> list[tuple[HostProcess, ...]]:
    """Return the workers of each loader together, and every other process by itself, the largest first."""
    rows: dict[object, tuple[HostProcess, ...]] = {}
    for child in children:
        worker = _WORKER.fullmatch(child.label)
        key = child.pid if worker is None else worker["loader"]
        rows[key] = (*rows.get(key, ()), child)
    return sorted(rows.values(), key=lambda row: -sum(map(_own_bytes, row)))


def _own_bytes(process: HostProcess) -> int:
    return labels.known(process.uss, process.rss) or 0


def _workers(row: Sequence[HostProcess]) -> Fact:
    """Return the workers of one loader as one fact."""
    loader = labels.clean(row[0].label, 60).partition(" of ")
    alone, resident = _between([one.uss for one in row]), _between([one.rss for one in row])
    why = [f"{alone} private each (USS)"] if alone else []
    why += [f"{resident} each {_SHARED}"] if resident else []
    name = f"{len(row)} DataLoader workers{''.join(loader[1:])}"
    return Fact(format_size(sum(map(_own_bytes, row))), name, "; ".join(why))


def _between(sizes: Sequence[Measured]) -> str:
    """Return ``12.0 to 14.0 MiB``, nothing where a size is not known."""
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return ""
    least, most = format_size(min(known)), format_size(max(known))
    number, unit = least.rsplit(" ", 1)
    return most if least == most else f"{number if most.endswith(f' {unit}') else least} to {most}"


def _process(process: HostProcess) -> Fact:
    """Return a process that this one started by what would be freed if it ended, or by what is known of it."""
    rss, uss, pss = (labels.known(size) for size in (process.rss, process.uss, process.pss))
    shared = f"{format_size(rss)} {_SHARED}" if rss is not None else ""
    if uss is not None:
        part = f"{format_size(pss)} with its share of shared pages (PSS)" if pss is not None else ""
        why = "; ".join(filter(None, ("private (USS)", ", ".join(filter(None, (shared, part))))))
    else:
        why = _SHARED if rss is not None else labels.clean(getattr(process.rss, "reason", ""))
    size = labels.known(process.uss, process.rss)
    name = f"{labels.clean(process.label, 60)} (pid {process.pid})"
    return Fact("?" if size is None else format_size(size), name, why)


def _page_cache(host: HostMemory) -> Iterator[Fact]:
    if isinstance(host.page_cache, int):
        advice = " ".join(labels.clean(sentence, 600) for sentence in page_cache_advice(host))
        yield Fact(format_size(host.page_cache), "page cache", advice)


def _troubles(host: HostMemory) -> Iterator[Fact]:
    """Yield what shows that memory was short: kills, swap in use, tasks that waited."""
    if kills := labels.known(host.cgroup_oom_kills):
        ooms = labels.known(host.cgroup_ooms)
        why = "by the kernel in this memory cgroup" + (f", which ran out {labels.count(ooms, 'time')}" if ooms else "")
        yield Fact(str(kills), "killed for lack of memory", why)
    if swap := labels.known(host.swap_used):
        total = labels.known(host.swap_total)
        why = f"of {format_size(total)}; what lies there must be read back from disk" if total else ""
        yield Fact(format_size(swap), "swap in use", why)
    if not isinstance(host.pressure, Unavailable) and host.pressure.some >= 0.01:
        why = (
            f"of the last 10 s some task waited for memory, {labels.percent(host.pressure.full)} of them all tasks did"
        )
        yield Fact(labels.percent(host.pressure.some), "memory pressure", why)


def _limits(host: HostMemory) -> Iterator[tuple[Fact, float]]:
    """Yield each limit that is set, with how much of it is used, 0 to 1."""
    shm_total, shm_free = labels.known(host.shm_total), labels.known(host.shm_free)
    shm_used = shm_total - shm_free if shm_total is not None and shm_free is not None else None
    counted = _COUNTED.get(str(host.process_limit_name), "this process")
    committed = host.committed if host.overcommit == _STRICT else None
    limits = (
        ("the memory cgroup", host.cgroup_used, host.cgroup_limit, format_size, _cgroup(host)),
        (counted, host.process_used, host.process_limit, format_size, ""),
        ("/dev/shm", shm_used, shm_total, format_size, "; DataLoader workers pass batches through it"),
        ("open files", host.files_open, host.files_limit, str, ""),
        ("memory mappings", host.maps, host.maps_limit, str, ""),
        ("committed memory", committed, host.commit_limit, format_size, "; the system promises no more than it has"),
    )
    for name, used, limit, spelled, why in limits:
        if isinstance(used, int) and isinstance(limit, int) and limit:
            fact = Fact(labels.percent(used / limit), name, f"{spelled(used)} of {spelled(limit)}{why}")
            yield fact, used / limit


def _cgroup(host: HostMemory) -> str:
    cannot, can = labels.known(host.cgroup_anon), labels.known(host.cgroup_reclaimable)
    if cannot is None or can is None:
        return ""
    return f"; {format_size(cannot)} is held by programs, {format_size(can)} is page cache that can be dropped"


class _Cache(NamedTuple):
    """The page cache of what binds, in bytes: of the memory cgroup with a limit, else of the machine.

    ``charged_to`` is the usage of the cgroup that counts it, and ``unwritten`` must be written to disk first.
    """

    whole: int
    charged_to: int | None
    size: int
    droppable: int | None
    tmpfs: int
    unwritten: int

    def matters(self, part: int | None) -> bool:
        """Return whether ``part`` is worth a sentence."""
        return part is not None and part >= _WORTH_TELLING * self.whole


def page_cache_advice(host: HostMemory) -> tuple[str, ...]:
    """Return at most four sentences: whether the page cache is the cause, and what could be done about it."""
    cache = _cache(host)
    return () if cache is None else tuple(_sentences(cache, has_swap=bool(labels.known(host.swap_total))))


def is_in_question(host: HostMemory) -> bool:
    """Return whether the page cache may be why memory is short.

    That is where a memory cgroup is near its limit, which counts the cache as used, and where most of the memory that
    is not available is cache that the kernel cannot drop. Cache that it can drop is available.
    """
    limit, used = labels.known(host.cgroup_limit), labels.known(host.cgroup_used)
    if limit and used is not None and used >= _NEAR * limit:
        return True
    total, available, size = labels.known(host.total), labels.known(host.available), labels.known(host.page_cache)
    if total is None or available is None or size is None:
        return False
    droppable, tmpfs, dirty = (labels.known(one) for one in (host.reclaimable, host.tmpfs, host.dirty))
    held = size - droppable if droppable is not None else (tmpfs or 0) + (dirty or 0)
    return held > (total - available) / 2


def _cache(host: HostMemory) -> _Cache | None:
    total = labels.known(host.total)
    limit, used, size = (labels.known(value) for value in (host.cgroup_limit, host.cgroup_used, host.cgroup_file))
    if limit is not None and used is not None and size is not None and (total is None or total > limit):
        droppable, tmpfs = labels.known(host.cgroup_reclaimable), labels.known(host.cgroup_tmpfs) or 0
        unwritten = 0 if droppable is None else max(size - tmpfs - droppable, 0)
        return _Cache(limit, used, size, droppable, tmpfs, unwritten)
    size, droppable = labels.known(host.page_cache), labels.known(host.reclaimable)
    if total is None or size is None:
        return None
    return _Cache(total, None, size, droppable, labels.known(host.tmpfs) or 0, labels.known(host.dirty) or 0)


def _sentences(cache: _Cache, *, has_swap: bool) -> Iterator[str]:
    size = format_size(cache.size)
    if not cache.matters(cache.size):
        where = "" if cache.charged_to is None else " in this memory cgroup"
        yield f"Page cache holds copies of files; {size}{where} is too little to be the cause."
        return
    yield _what_it_is(cache, size)
    if cache.matters(cache.tmpfs):
        fate = "can only move to swap" if has_swap else "cannot drop"
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
