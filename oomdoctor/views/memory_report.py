"""The memory as it stands now, as ``%memreport`` shows it: the devices, the host, what grew, what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from rich.text import Text

from oomdoctor.errors import UsageError
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import CellGrowth, DeviceMemory, HostMemory, JittorMemory, Usage
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views import labels
from oomdoctor.views.device_card import Card, device_card
from oomdoctor.views.document import Bar, Block, Document, Head, Line, Section, Table, Timeline, apart, prose
from oomdoctor.views.growth import Change, DeviceGrowth, compare
from oomdoctor.views.holder_groups import WEIGHTS, one_per_group
from oomdoctor.views.holders import TOP
from oomdoctor.views.host_card import host_card

_HOST: Final = "cpu"
_UNUSED: Final = "this process has not used"
_BUILT_WITHOUT: Final = " is built without"

# That there is no limit is no want.
_LIMITS: Final = frozenset({"cap", "cgroup_limit", "files_limit", "maps_limit", "process_limit", "process_limit_name"})
_THINGS: Final = {
    "rss": "RSS",
    "uss": "USS",
    "pss": "PSS",
    "card": "name of the card",
    "context": "CUDA context",
    "elsewhere": "use by other processes",
    "processes": "processes on the device",
    "children": "processes that this one started",
    "pressure": "memory pressure",
    "tmpfs": "shared memory",
    "process_used": "address space",
    "committed": "committed memory",
    "commit_limit": "committed memory",
    "overcommit": "overcommit mode",
}
_FAMILIES: Final = {
    "cgroup": "memory cgroup",
    "shm": "/dev/shm",
    "swap": "swap",
    "files": "open files",
    "maps": "memory mappings",
}


def survey(
    evidence: Evidence,
    *,
    top: int = TOP,
    growth: GrowthRows | None = None,
    history: Timeline | None = None,
    absent: Sequence[tuple[str, Unavailable]] = (),
) -> Document:
    """Return one sentence for each memory of ``evidence``, then the devices one by one, then the host.

    Args:
        top: holders to list for each device. Above ``holders.TOP`` weights are listed one by one, and all limits.
        history: how much was in use at the ends of the cells so far.
        absent: what is known to be missing on this machine, by name.
    """
    found = cards(evidence, top=top)
    return (
        *(_headline(card.headline) for card in found),
        *apart(*(growth.blocks() if growth is not None else [])),
        *(Section(card.blocks()) for card in found),
        *(() if evidence.jittor is None else (Section(tuple(_jittor(evidence.jittor, top))),)),
        *((Head("Memory over time"), history) if history is not None else ()),
        *apart(*(Line(line, "muted") for line in absences(evidence, absent))),
    )


def _jittor(memory: JittorMemory, top: int) -> Iterator[Block]:
    """Yield what Jittor holds, and the names that lead to most of its variables."""
    yield Head("Jittor")
    yield Line(
        f"{memory.alive} variables are alive, of which the program holds {memory.held}; "
        f"{memory.operators} operators wait to be computed or are kept for a gradient."
    )
    if memory.pool_used is not None and memory.pool_unused is not None:
        used, unused = format_size(memory.pool_used), format_size(memory.pool_unused)
        yield Line(f"Its pools hold {used} in use and {unused} unused.")
    for one in memory.holders[:top]:
        yield Line(f"`{labels.clean(one.path, 120)}` leads to {format_size(one.bytes)} of variables.", "muted")


def cards(evidence: Evidence, *, top: int = TOP) -> tuple[Card, ...]:
    """Return the card of each memory; the host comes last."""
    models = evidence.code.models
    devices = [device for device in evidence.devices if device.name != _HOST]
    host = host_card(
        evidence.host,
        next((device for device in evidence.devices if device.name == _HOST), None),
        evidence.census_of(_HOST),
        models,
        top=top,
        is_alone=not devices,
        simulated=sum(labels.known(device.allocated) or 0 for device in devices if device.simulated),
        held=evidence.beside_tensors,
    )
    return (*(device_card(device, evidence.census_of(device.name), models, top=top) for device in devices), host)


def _headline(sentence: str) -> Line:
    text = prose(sentence)
    text.stylize_before("strong", 0, sentence.index(": "))
    return Line(text, "lead")


def focus(evidence: Evidence, device: str) -> Evidence:
    """Return ``evidence`` of the first device whose name begins so, and of the host as a whole.

    Raises:
        UsageError: no device in use is called so.
    """
    names = [found.name for found in evidence.devices]
    chosen = next((name for name in names if name == device), None)
    chosen = chosen or next((name for name in names if device and name.startswith(device)), None)
    if chosen is None:
        raise UsageError(f"no device {device!r} is in use: there is {' and '.join(names)}")
    return replace(
        evidence,
        devices=tuple(found for found in evidence.devices if found.name == chosen),
        censuses=tuple(census for census in evidence.censuses if census.device == chosen),
    )


def absences(evidence: Evidence, absent: Sequence[tuple[str, Unavailable]] = ()) -> tuple[str, ...]:
    """Return a line for what the machine lacks and one for what cannot be told, each thing with its reason.

    A figure that wants for the same reason as something ``absent`` is not named again.
    """
    told = {missing.reason for _, missing in absent}
    figures: dict[str, list[str]] = {}
    named: set[str] = set()
    devices = [(device, labels.device_name(device)) for device in evidence.devices if device.name != _HOST]
    whose: list[tuple[DeviceMemory | HostMemory, str]] = [*devices, (evidence.host, "the host")]
    for thing, where, reason in ((thing, where, reason) for memory, where in whose for thing, reason in _of(memory)):
        names = figures.setdefault(_reason(reason), [])
        if reason in told or thing in names:
            continue
        names.append(f"{thing} of {where}" if thing in named else thing)
        named.add(thing)
    lacking: dict[str, list[str]] = {}
    for name, missing in absent:
        is_idle = missing.reason.startswith(_UNUSED)
        (figures if is_idle else lacking).setdefault(_reason(missing.reason), []).append(labels.clean(name, 120))
    lines = (("Not on this machine", lacking), ("Not available", figures))
    return tuple(f"{title}: {text}." for title, things in lines if (text := _listed(things)))


def _listed(things: dict[str, list[str]]) -> str:
    """Return ``CUDA, XPU (torch is built without them); NVML (no NVIDIA driver)``."""
    parts = []
    for reason, names in things.items():
        shown = reason + (" them" if len(names) > 1 else " it") if reason.endswith(_BUILT_WITHOUT) else reason
        parts += [f"{', '.join(dict.fromkeys(names))} ({shown})"] if names else []
    return "; ".join(parts)


def _reason(reason: str) -> str:
    """Return ``reason`` without what the name of the missing thing says already, so that equal reasons are one."""
    who, without, _ = reason.partition(_BUILT_WITHOUT)
    short = f"{who}{without}" if without else reason.removeprefix("this machine has ")
    return labels.clean(short).removesuffix(".")


def _of(memory: DeviceMemory | HostMemory) -> Iterator[tuple[str, str]]:
    """Yield each figure that is not there, and the reason."""
    for field in fields(memory):
        value: Any = getattr(memory, field.name)
        # The default stands for a figure that nobody asked for, and says nothing of the machine.
        if isinstance(value, Unavailable) and value != field.default and field.name not in _LIMITS:
            family = _FAMILIES.get(field.name.partition("_")[0])
            yield family or _THINGS.get(field.name, field.name.replace("_", " ")), value.reason


_WORTH_A_ROW: Final = 0.005
_UNCOMPARED: Final = "its tensors and those of the host are not compared"
_NOTHING: Final = "nothing that can be compared"


class GrowthRow(NamedTuple):
    """One change: ``+128 MiB``, of what, and where."""

    change: str
    what: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRows:
    """All that changed since a moment: a sentence, and the changes behind it."""

    sentence: str
    rows: tuple[GrowthRow, ...]
    more: str | None = None

    def blocks(self) -> Iterator[Block]:
        """Yield what is shown of it."""
        styles = {"+": "grew", "-": "shrank"}
        rows = ((Text(change, styles.get(change[0], "figure")), what, where) for change, what, where in self.rows)
        yield Line(self.sentence)
        if self.rows:
            yield Table("growth", tuple(rows))
        if self.more:
            yield Line(self.more, "more")


NOTHING_YET: Final = GrowthRows(
    sentence="There is nothing to compare with yet: this is the first report. The next `%memreport --diff` compares "
    "with it.",
    rows=(),
)


def _signed(size: int) -> str:
    """Return ``+1.00 MiB`` or ``-1.00 MiB``."""
    return f"{'+' if size >= 0 else ''}{format_size(size)}"


def growth_rows(before: Evidence, after: Evidence, when: str, *, top: int = TOP, only: str | None = None) -> GrowthRows:
    """Return the ``top`` largest changes on each device, by role and then by holder.

    All that was collected is given: what one device alone has cannot tell that another was switched off.

    Args:
        when: the moment of ``before``, in words: ``the report of In[3]``.
        top: above ``TOP`` weights are compared one by one.
        only: the one device to tell of.
    """
    models = (*before.code.models, *after.code.models)
    growth = compare(before, after) if top > TOP else compare(_by_model(before, models), _by_model(after, models))
    devices = [device for device in growth.devices if only in (None, device.device)]
    name = labels.clean(growth.switched or "", 40)
    changed = f"{name} (simulated) was switched on, off or to another size: {_UNCOMPARED}" if growth.switched else ""
    totals = [
        f"{_name(device)} {_signed(device.allocated)} {'in tensors' if device.device == 'cpu' else 'allocated'}"
        for device in devices
        if device.allocated is not None and (device.allocated or device.device != "cpu")
    ]
    totals += [] if growth.rss is None else [f"this process {_signed(growth.rss)} resident in host memory"]
    changes = [_rows(device, top) for device in devices]
    left_out = sum(number for _, number in changes)
    return GrowthRows(
        sentence=f"Since {when}: {'; '.join(filter(None, (changed, ', '.join(totals)))) or _NOTHING}.",
        rows=tuple(row for rows, _ in changes for row in rows),
        more=f"and {labels.count(left_out, 'smaller change')}" if left_out else None,
    )


def _by_model(evidence: Evidence, models: Sequence[ModelFacts]) -> Evidence:
    """Return ``evidence`` with one holder for all weights of a model, so that a first step is one change."""
    joined = (replace(one, holdings=one_per_group(one, models)) for one in evidence.censuses)
    return replace(evidence, censuses=tuple(joined))


def _rows(device: DeviceGrowth, top: int) -> tuple[list[GrowthRow], int]:
    """Return the changes on ``device``, and how many are left out of them.

    The roles come first, each with its holder where one alone has changed by as much; then the largest other holders,
    without those that are as nothing beside them.
    """
    where, changes = _name(device), device.holders
    roles = dict(device.roles)
    of_role = {role: [change for change in changes if change.role is role] for role in roles}
    single = {role: held[0] for role, held in of_role.items() if len(held) == 1 and held[0].bytes == roles[role]}
    least = max((abs(change.bytes) for change in device.holders), default=0) * _WORTH_A_ROW
    others = [change for change in changes if change not in single.values()]
    listed = [change for change in others if change in changes[:top] and abs(change.bytes) >= least]
    rows = []
    for role, size in device.roles:
        holder = f": {labels.code(single[role].path, 120)}{_end(single[role])}" if role in single else ""
        rows.append(GrowthRow(_signed(size), f"{labels.ROLES[role]}{holder}", where))
    for change in listed:
        kind = f" ({labels.ROLES[change.role]})" if change.role in WEIGHTS else ""
        rows.append(GrowthRow(_signed(change.bytes), f"{labels.code(change.path, 120)}{kind}{_end(change)}", where))
    return rows, len(others) - len(listed)


def _end(change: Change) -> str:
    return ", new" if change.is_new else ", gone" if change.is_gone else ""


def _name(device: DeviceGrowth) -> str:
    name = "host memory" if device.device == "cpu" else labels.clean(device.device, 40)
    return f"{name} (simulated)" if device.simulated else name


def cells_table(cells: Sequence[CellGrowth]) -> Document:
    """Return a row for each cell, with what each memory has grown by in it, and the largest growth marked."""
    if not cells:
        return (Line("No cell has ended since oomdoctor was loaded."),)
    names = sorted({name for cell in cells for name in cell.grown}, key=lambda name: (name == "host", name))
    largest = {name: max(cell.grown.get(name, 0) for cell in cells) for name in names}

    def row(cell: CellGrowth) -> tuple[str | Text, ...]:
        most = [name for name in names if cell.grown.get(name, 0) == largest[name] > 0]
        figures = (_signed(cell.grown[name]) if name in cell.grown else "" for name in names)
        return f"In[{cell.number}]", *figures, Text(f"most of {' and '.join(most)}" if most else "", "grew")

    title = "What each cell has left: allocated on devices, and this process's resident memory on the host."
    head = tuple(Text(word, "muted") for word in ("Cell", *names, ""))
    return Line(title), Table("cells", (head, *map(row, cells)))


def live(usages: Sequence[Usage], state: str) -> tuple[Line | Bar, ...]:
    """Return a line and a bar for each memory, and what is to be said of the output itself.

    Of the host, what is in use below its limit stands as reserved.
    """
    blocks: list[Line | Bar] = []
    for usage in usages:
        used, reserved, limit = (labels.known(size) for size in (usage.used, usage.reserved, usage.limit))
        is_host, below = usage.name == "host", "" if limit is None else f" of {format_size(limit)}"
        words = ("resident in this process", "in use") if is_host else ("allocated", "reserved")
        figures = zip((used, reserved), words, strict=True)
        told = [f"{format_size(size)} {word}" for size, word in figures if size is not None]
        sentence = f"{labels.clean(usage.name, 40)}: {', '.join(told) or 'unknown'}{below}"
        held, whole = used or 0, max(reserved or 0, used or 0)
        rest = ("outside", "in use otherwise") if is_host else ("cached", "reserved, not in use")
        pieces = [("process", words[0], held), (*rest, whole - held), ("free", "free", (limit or whole) - whole)]
        blocks.append(Line(sentence))
        if (bar := Bar.of(sentence, limit, pieces)) is not None:
            blocks.append(replace(bar, budget=None, budget_ratio=None, is_slim=True))
    return (*blocks, Line(state, "muted"))
