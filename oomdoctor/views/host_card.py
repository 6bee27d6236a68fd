"""The host: this process and its children, the limits that are near, and what the page cache is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Census, DeviceMemory, HostMemory, HostProcess, Measured, ModelFacts
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.bar import ceiling, host_bar, process_bar
from oomdoctor.views.card import Card, Fact
from oomdoctor.views.device_card import largest_role
from oomdoctor.views.holders import TOP, holders
from oomdoctor.views.page_cache import is_in_question, page_cache_advice

__all__ = ["host_card"]

_NEAR: Final = 0.8
_CHILDREN: Final = 5
_TENSORS_BESIDE_A_DEVICE: Final = 3
_NO_TENSOR: Final = (
    "only tensors are named here; the rest is NumPy arrays, Python objects and libraries, 0.2 to 0.3 GiB of it torch"
)
"""Source: growth of RSS by `import torch` and a first training step, torch 2.13 for CPU: 0.2 GiB; more with CUDA."""

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
) -> Card:
    """Return what to show of the host.

    Args:
        tensors: the host as the device that tensors live on; None where it was not asked about, likewise ``census``.
        top: holders to list; above ``TOP`` all limits and all children.
        is_alone: whether no device is shown above, so that the tensors of the host are what the report is about.
        simulated: bytes of tensors that count for a simulated device and lie in this process.
    """
    is_full = top > TOP
    listed = top if is_alone or is_full else min(top, _TENSORS_BESIDE_A_DEVICE)
    is_nearer = tensors is not None and tensors.total != host.total
    basis = words.clean(tensors.basis) if tensors is not None and is_nearer else ""
    return Card(
        headline=_headline(host, census, models, simulated),
        title="host memory",
        aside=f"strictest limit: {basis}" if basis else "",
        bars=tuple(bar for bar in (host_bar(host), process_bar(host, census, simulated)) if bar is not None),
        holders=holders(census, models, top=listed),
        facts=(
            *_processes(host, None if is_full else _CHILDREN, _unseen(host, census, simulated)),
            *(_page_cache(host) if is_full or is_in_question(host) else ()),
            *_troubles(host),
            *(fact for fact, ratio in _limits(host) if is_full or ratio >= _NEAR),
        ),
    )


def _headline(host: HostMemory, census: Census | None, models: Sequence[ModelFacts], simulated: int) -> str:
    whole = ceiling(host)
    if whole is None:
        return "host memory: how much is in use is not known."
    total, free, which = whole
    rss, children = words.known(host.rss), host.children if isinstance(host.children, tuple) else ()
    own = f", {format_size(rss)} of it by this process" if rss is not None else ""
    if (unseen := _unseen(host, census, simulated)) is not None:
        own += f" ({format_size(unseen)} of that is no tensor)"
    theirs = sum(words.known(child.uss, child.rss) or 0 for child in children)
    if theirs:
        own += f" and {format_size(theirs)} by {words.count(len(children), 'process', 'processes')} that it started"
    near = [f"{fact.name} ({fact.figure})" for fact, ratio in _limits(host) if ratio >= _NEAR]
    tail = f"{_tensors(census, models, simulated)}{'; near the limit: ' if near else ''}{', '.join(near)}"
    return f"host memory{which}: {format_size(total - free)} of {format_size(total)} in use{own}{tail}."


def _tensors(census: Census | None, models: Sequence[ModelFacts], simulated: int) -> str:
    """Return how much of this process is tensors, and who has most of them."""
    told = f"; tensors of the simulated device take {format_size(simulated)}" if simulated else ""
    if census is None or not census.found or not census.roles:
        return told
    role, size = max(census.roles, key=lambda item: item[1])
    what = f"{words.percent(size / census.found)} of it {largest_role(census, role, models)}"
    return f"{told}; tensors take {format_size(census.found)}, {what}"


def _unseen(host: HostMemory, census: Census | None, simulated: int) -> int | None:
    """Return what of this process is no tensor, None where that is the lesser part, or tensors were not searched."""
    rss = words.known(host.rss)
    if rss is None or census is None:
        return None
    rest = rss - census.found - simulated
    return rest if rest > rss / 2 else None


def _processes(host: HostMemory, most: int | None, unseen: int | None) -> Iterator[Fact]:
    own = HostProcess(pid=0, label="this process", rss=host.rss, uss=host.uss, pss=host.pss)
    children = host.children if isinstance(host.children, tuple) else ()
    shown = children if most is None else children[:most]
    if isinstance(host.rss, int):
        yield _process(own)
    if unseen is not None:
        yield Fact(figure=format_size(unseen), name="of it no tensor", why=_NO_TENSOR)
    yield from map(_process, shown)
    if rest := children[len(shown) :]:
        size = sum(words.known(child.uss, child.rss) or 0 for child in rest)
        yield Fact(figure=format_size(size), name=f"{len(rest)} more processes that it started", why="")


def _process(process: HostProcess) -> Fact:
    uss, pss = ("", "") if process.pid else (" is its alone", " with shared pages shared out")
    parts = [("USS", process.uss, uss), ("PSS", process.pss, pss)]
    why = ", ".join(f"{name} {format_size(size)}{what}" for name, size, what in parts if isinstance(size, int))
    pid = f" (pid {process.pid})" if process.pid else ""
    return Fact(figure=_size(process.rss), name=f"{words.clean(process.label, 60)}{pid}", why=why or "resident")


def _size(value: Measured) -> str:
    return format_size(value) if isinstance(value, int) else "?"


def _page_cache(host: HostMemory) -> Iterator[Fact]:
    if isinstance(host.page_cache, int):
        advice = " ".join(words.clean(sentence, 600) for sentence in page_cache_advice(host))
        yield Fact(figure=format_size(host.page_cache), name="page cache", why=advice)


def _troubles(host: HostMemory) -> Iterator[Fact]:
    """Yield what shows that memory was short: kills, swap in use, tasks that waited."""
    if kills := words.known(host.cgroup_oom_kills):
        ooms = words.known(host.cgroup_ooms)
        why = "by the kernel in this memory cgroup" + (f", which ran out {words.count(ooms, 'time')}" if ooms else "")
        yield Fact(figure=str(kills), name="killed for lack of memory", why=why)
    if swap := words.known(host.swap_used):
        total = words.known(host.swap_total)
        why = f"of {format_size(total)}; what lies there must be read back from disk" if total else ""
        yield Fact(figure=format_size(swap), name="swap in use", why=why)
    if not isinstance(host.pressure, Unavailable) and host.pressure.some >= 0.01:
        why = f"of the last 10 s some task waited for memory, {words.percent(host.pressure.full)} of them all tasks did"
        yield Fact(figure=words.percent(host.pressure.some), name="memory pressure", why=why)


def _limits(host: HostMemory) -> Iterator[tuple[Fact, float]]:
    """Yield each limit that is set, with how much of it is used, 0 to 1."""
    shm_total, shm_free = words.known(host.shm_total), words.known(host.shm_free)
    shm_used = shm_total - shm_free if shm_total is not None and shm_free is not None else None
    sizes = (
        ("the memory cgroup", words.known(host.cgroup_used), words.known(host.cgroup_limit), _cgroup(host)),
        ("the data segment (RLIMIT_DATA)", words.known(host.data_used), words.known(host.data_limit), ""),
        ("/dev/shm", shm_used, shm_total, "DataLoader workers pass batches through it"),
    )
    for name, used, limit, why in sizes:
        if used is not None and limit:
            of = f"{format_size(used)} of {format_size(limit)}" + (f"; {why}" if why else "")
            yield Fact(figure=words.percent(used / limit), name=name, why=of), used / limit
    counts = [("open files", host.files_open, host.files_limit), ("memory mappings", host.maps, host.maps_limit)]
    for name, number, most in counts:
        if isinstance(number, int) and isinstance(most, int) and most:
            yield Fact(figure=words.percent(number / most), name=name, why=f"{number} of {most}"), number / most
    used, limit = words.known(host.committed), words.known(host.commit_limit)
    if host.overcommit == _STRICT and used is not None and limit:
        why = f"{format_size(used)} of {format_size(limit)}; the system promises no more than it has"
        yield Fact(figure=words.percent(used / limit), name="committed memory", why=why), used / limit


def _cgroup(host: HostMemory) -> str:
    cannot, can = words.known(host.cgroup_anon), words.known(host.cgroup_reclaimable)
    if cannot is None or can is None:
        return ""
    return f"{format_size(cannot)} is held by programs, {format_size(can)} is page cache that can be dropped"
