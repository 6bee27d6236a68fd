"""One device, as a card and as a bar: what is in use and by whom, inside the allocator and outside of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.text import Text

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, DeviceMemory, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Bar, Document, Line, Table, apart, given
from oomdoctor.views.holder_groups import NAMELESS, grouped
from oomdoctor.views.holders import TOP, Holders, holders

_PROCESSES: Final = 5
_CACHE_WORTH_TELLING: Final = 0.25


class Fact(NamedTuple):
    """One figure, what it is of, and what that means for the reader."""

    figure: str
    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What one memory is shown as: a device or the host.

    ``aside`` is what it calls itself, and which limit its total is. Of the host, ``bars`` are the whole of it and this
    process on a scale of its own.
    """

    headline: str
    title: str
    aside: str
    bars: tuple[Bar, ...]
    holders: Holders
    facts: tuple[Fact, ...]

    def blocks(self) -> Document:
        """Return all but its headline."""
        facts = tuple((Text(figure, "figure"), name, why) for figure, name, why in self.facts)
        return (
            *(self.bars or (Line(self.title, "name"),)),
            *given(Line(self.aside, "muted") if self.aside else None),
            *self.holders.blocks("Top holders"),
            *apart(Table("facts", facts) if facts else None),
        )


def device_card(device: DeviceMemory, census: Census | None, models: Sequence[ModelFacts], *, top: int = TOP) -> Card:
    """Return what to show of ``device``; ``census`` is None where it was not searched."""
    basis = f"total: {labels.clean(device.basis)}" if device.basis else ""
    card = labels.clean(device.card, 120) if isinstance(device.card, str) else ""
    return Card(
        headline=_headline(device, census, models),
        title=labels.device_name(device),
        aside="; ".join(part for part in (card, basis) if part),
        bars=(bar,) if (bar := device_bar(device, census)) is not None else (),
        holders=holders(census, models, top=top),
        facts=(*_inside(device), *_outside(device, max(_PROCESSES, top if top > TOP else 0))),
    )


def in_use(device: DeviceMemory) -> tuple[int, int | None] | None:
    """Return the bytes in use on ``device`` and its total; what its allocator only reserves is not in use."""
    total, free = labels.known(device.total), labels.known(device.free)
    if total is not None and free is not None:
        return max(total - free - _cached(device), 0), total
    held = labels.known(device.allocated, device.reserved)
    return None if held is None else (held, total)


def _headline(device: DeviceMemory, census: Census | None, models: Sequence[ModelFacts]) -> str:
    name, whole = labels.device_name(device), in_use(device)
    if whole is None:
        return f"{name}: how much is in use is not known."
    used, total = whole
    of = f" of {format_size(total)}" if total is not None else ""
    told = f"{format_size(used)}{of} in use"
    parts = [f"{labels.percent(min(size / used, 1.0))} {what}" for size, what in _most(device, census, models) if used]
    cached = _cached(device)
    if cached > _CACHE_WORTH_TELLING * (used + cached):
        told += f" and {format_size(cached)} more reserved, not in use"
    return f"{name}: {'; '.join((told, *([', '.join(parts)] if parts else [])))}."


def _most(device: DeviceMemory, census: Census | None, models: Sequence[ModelFacts]) -> Iterator[tuple[int, str]]:
    """Yield bytes and words of the largest part of what is in use, and of the largest role where that is another."""
    if census is not None:
        unheld = "has no known holder"
        held = [
            (size, unheld if role is Role.UNEXPLAINED else f"is {largest_role(census, role, models)}")
            for role, size in census.roles
        ]
    else:
        held = [(labels.known(device.allocated) or 0, "is allocated by this process")]
    outside = [
        (labels.known(device.context) or 0, "is the CUDA context and libraries"),
        (labels.known(device.elsewhere) or 0, "is used by other processes"),
    ]
    largest = max(held, key=lambda part: part[0], default=(0, ""))
    other = max(outside, key=lambda part: part[0])
    yield from (part for part in ([other] if other[0] > largest[0] else []) + [largest] if part[0])


def largest_role(census: Census, role: Role, models: Sequence[ModelFacts]) -> str:
    """Return the words for ``role``, with the holder that has most of it, if one has a name."""
    size = census.bytes_of(role)
    held = [holding for holding in grouped(census, models) if holding.role is role]
    first = max(held, key=lambda holding: holding.bytes, default=None)
    if first is None or first.path.startswith(NAMELESS):
        return labels.ROLES[role]
    much = "" if first.bytes > 0.9 * size else ", most of it" if first.bytes >= size / 2 else ", the largest share"
    return f"{labels.ROLES[role]}{much} in {labels.code(first.path)}"


def _cached(device: DeviceMemory) -> int:
    allocated, reserved = labels.known(device.allocated), labels.known(device.reserved)
    return max(reserved - allocated, 0) if allocated is not None and reserved is not None else 0


def _inside(device: DeviceMemory) -> Iterator[Fact]:
    """Yield what the caching allocator of this process tells."""
    allocated, split = labels.known(device.allocated), labels.known(device.inactive_split)
    if allocated is not None:
        peak = labels.known(device.peak_allocated)
        why = f"live tensors; at most {format_size(peak)} since the peak was last reset" if peak else "live tensors"
        yield Fact(format_size(allocated), "allocated", why)
    if cached := _cached(device):
        why = "kept by the allocator for new tensors; `torch.cuda.empty_cache()` gives back what is not split"
        yield Fact(format_size(cached), "reserved, not in use", why)
    if split:
        largest = labels.known(device.largest_free_block)
        why = "fragmentation: free parts of segments that are partly in use, so they cannot be given back"
        why += f"; the largest free block is {format_size(largest)}" if largest else ""
        yield Fact(format_size(split), "of it inactive split", why)
    for pool in device.private_pools:
        why = f"kept apart for a CUDA graph or a `torch.cuda.MemPool`; {format_size(pool.allocated)} of it is allocated"
        yield Fact(format_size(pool.reserved), f"private pool {labels.clean(pool.name, 60)}", why)
    if (cap := labels.known(device.cap)) is not None:
        why = "this process may reserve no more (`torch.cuda.set_per_process_memory_fraction`)"
        yield Fact(format_size(cap), "cap", why)
    if retries := labels.known(device.retries):
        why = "times the allocator gave back its cache to serve a request, which is slow"
        yield Fact(str(retries), "retries", why)
    if ooms := labels.known(device.ooms):
        yield Fact(str(ooms), "failures", "requests that could not be served at all")


def _outside(device: DeviceMemory, most: int) -> Iterator[Fact]:
    """Yield what only the driver tells: this process beside its segments, other processes, and what is free."""
    if context := labels.known(device.context):
        why = "this process outside of the allocator: kernels, cuBLAS and cuDNN, NCCL"
        yield Fact(format_size(context), "CUDA context and libraries", why)
    others = [] if not isinstance(device.processes, tuple) else [one for one in device.processes if not one.is_own]
    if elsewhere := labels.known(device.elsewhere):
        why = "the driver names none of them" if not others else labels.count(len(others), "process", "processes")
        yield Fact(format_size(elsewhere), "other processes", why)
    for process in others[:most]:
        size = format_size(process.bytes) if isinstance(process.bytes, int) else "?"
        name = labels.clean(process.name, 80) if process.name else "a process that cannot be named"
        yield Fact(size, f"pid {process.pid}", name)
    if len(others) > most:
        yield Fact("", "", f"and {len(others) - most} more")
    if (free := labels.known(device.free)) is not None:
        yield Fact(format_size(free), "free", "what the driver could still give")


def device_bar(
    device: DeviceMemory, census: Census | None, *, total: int | None = None, asked: int | None = None
) -> Bar | None:
    """Return the bar of ``device``, None where nothing at all is known; ``census`` is None where none was taken.

    Args:
        total: what a message says about the capacity, used where the device itself cannot say.
        asked: bytes of the request that failed.
    """
    total = labels.known(device.total, total)
    pieces = [piece for piece in _in_bar(device, census, total) if piece[2] > 0]
    used = sum(size for _, _, size in pieces)
    if asked:
        within = asked if total is None else max(0, min(asked, total - used))
        pieces += [("asked", "request", within), ("over", "over the limit", asked - within)]
    if total is not None:
        pieces.append(("free", "free", total - used - (asked or 0)))
    return Bar.of(labels.limited_name(device), total, pieces)


def _in_bar(device: DeviceMemory, census: Census | None, total: int | None) -> Iterator[tuple[str, str, int]]:
    """Yield kind, label and bytes of all that is in use, as far as it is known."""
    allocated, reserved, free = labels.known(device.allocated), labels.known(device.reserved), labels.known(device.free)
    found = 0
    if census is not None:
        roles = roles_of(census)
        yield from roles
        found = sum(size for *_, size in roles)
        allocated = max(found, allocated or 0)
    if allocated is not None:
        rest_label = "allocated" if census is None else labels.ROLES[Role.UNEXPLAINED]
        yield Role.UNEXPLAINED.value, rest_label, allocated - found
    inside = max(allocated or 0, reserved or 0)
    yield "cached", "reserved, not in use", inside - (allocated or 0)
    if total is not None and free is not None:
        yield from _rest(device, total - free - inside)


def roles_of(census: Census) -> list[tuple[str, str, int]]:
    """Return kind, label and bytes of what has a holder, the largest first."""
    held = [(role.value, labels.ROLES[role], size) for role, size in census.roles if role is not Role.UNEXPLAINED]
    return sorted(held, key=lambda piece: -piece[2])


def _rest(device: DeviceMemory, rest: int) -> Iterator[tuple[str, str, int]]:
    """Yield who has the ``rest`` of what is in use, as far as the driver tells."""
    known = (
        ("context", "CUDA context and libraries", labels.known(device.context)),
        ("elsewhere", "other processes", labels.known(device.elsewhere)),
    )
    for kind, label, size in known:
        yield kind, label, max(min(size or 0, rest), 0)
        rest -= size or 0
    if device.name == "cpu" and device.basis.startswith(
        ("RLIMIT_", labels.OF_CELL)
    ):  # which counts nothing of other processes
        yield "process", "this process", rest
    else:
        yield "outside", "in use otherwise" if device.name == "cpu" else "other use of the device", rest
