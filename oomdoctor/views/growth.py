"""What grew, as sentences and rows: since the last cell by the counters, since the last report by role and holder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rich.text import Text

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Change, DeviceGrowth, Mark, Switch, compare, difference
from oomdoctor.model.memory import DeviceMemory, Role
from oomdoctor.model.sizes import format_size
from oomdoctor.views import words
from oomdoctor.views.document import Block, Line, Table
from oomdoctor.views.grouping import WEIGHTS, one_per_group
from oomdoctor.views.holders import TOP

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


def since_cell(mark: Mark, now: Mark, devices: tuple[DeviceMemory, ...]) -> str:
    """Return what the counters say has grown on ``devices`` and in this process since the cell of ``mark`` began."""
    before, after = dict(mark.allocated), dict(now.allocated)
    switch = mark.switch_to(now)
    changed = "" if switch is None else f"{_switched(switch)}, so its tensors cannot be compared"
    parts = [
        f"{words.device_name(device)} {_signed(after[device.name] - before.get(device.name, 0))} allocated"
        for device in devices
        if device.name in after and (switch is None or device.name != switch.device)
    ]
    parts += _resident(difference(mark.rss, now.rss))
    return f"Since In[{mark.cell}] began: {_joined(changed, parts)}."


def _switched(switch: Switch) -> str:
    """Return what became of the simulated device, in words."""
    name = f"{words.clean(switch.device, 40)} (simulated)"
    if switch.before is None:
        return f"{name} was switched on"
    if switch.after is None:
        return f"{name} was switched off"
    if switch.before == switch.after:
        return f"{name} was switched off and on again"
    return f"{name} went from {format_size(switch.before)} to {format_size(switch.after)}"


def _joined(changed: str, parts: Sequence[str]) -> str:
    return "; ".join(filter(None, (changed, ", ".join(parts)))) or _NOTHING


def _resident(grown: int | None) -> list[str]:
    return [] if grown is None else [f"this process {_signed(grown)} resident in host memory"]


def growth_rows(before: Evidence, after: Evidence, when: str, *, top: int = TOP, only: str | None = None) -> GrowthRows:
    """Return the ``top`` largest changes on each device, by role and then by holder.

    Args:
        before: all that was collected then, and ``after`` now: what one device alone has cannot tell that another
            was switched off.
        when: the moment of ``before``, in words: ``the report of In[3]``.
        top: above ``TOP`` weights are compared one by one.
        only: the one device to tell of.
    """
    models = (*before.code.models, *after.code.models)
    growth = compare(before, after) if top > TOP else compare(_by_model(before, models), _by_model(after, models))
    devices = [device for device in growth.devices if only in (None, device.device)]
    changed = "" if growth.switch is None else f"the device changed, as {_switched(growth.switch)}: {_UNCOMPARED}"
    totals = [
        f"{_name(device)} {_signed(device.allocated)} {'in tensors' if device.device == 'cpu' else 'allocated'}"
        for device in devices
        if device.allocated is not None and (device.allocated or device.device != "cpu")
    ]
    totals += _resident(growth.rss)
    changes = [_Changes.of(device, top) for device in devices]
    left_out = sum(change.left_out for change in changes)
    return GrowthRows(
        sentence=f"Since {when}: {_joined(changed, totals)}.",
        rows=tuple(row for change in changes for row in change.rows()),
        more=f"and {words.count(left_out, 'smaller change')}" if left_out else None,
    )


def _by_model(evidence: Evidence, models: Sequence[ModelFacts]) -> Evidence:
    """Return ``evidence`` with one holder for all weights of a model, so that a first step is one change."""
    joined = (replace(one, holdings=one_per_group(one, models)) for one in evidence.censuses)
    return replace(evidence, censuses=tuple(joined))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """What there is to list of one device.

    Attributes:
        listed: the largest changes, without those that are as nothing beside them.
        renamed: what one path lost and another got, both of one role and of one size.
        single: the one holder whose change is all that its role changed by.
    """

    device: DeviceGrowth
    listed: tuple[Change, ...]
    renamed: tuple[tuple[Change, Change], ...]
    single: dict[Role, Change]
    left_out: int

    @classmethod
    def of(cls, device: DeviceGrowth, top: int) -> _Changes:
        """Sort out the changes on ``device``."""
        renamed = tuple(_renamed(device.holders))
        moved = {id(change) for pair in renamed for change in pair}
        changes = [change for change in device.holders if id(change) not in moved]
        by_role: dict[Role, list[Change]] = {}
        for change in changes:
            by_role.setdefault(change.role, []).append(change)
        roles = dict(device.roles)
        single = {
            role: held[0] for role, held in by_role.items() if len(held) == 1 and held[0].bytes == roles.get(role)
        }
        least = max((abs(change.bytes) for change in device.holders), default=0) * _WORTH_A_ROW
        listed = [change for change in changes[:top] if abs(change.bytes) >= least]
        return cls(
            device=device,
            listed=tuple(change for change in listed if change not in single.values()),
            renamed=tuple(pair for pair in renamed[:top] if abs(pair[0].bytes) >= least),
            single=single,
            left_out=sum(change not in listed and change not in single.values() for change in changes),
        )

    def rows(self) -> Iterator[GrowthRow]:
        """Yield the roles, each with its holder where it has one alone, then the other holders, then what moved."""
        where = _name(self.device)
        for role, size in self.device.roles:
            one = self.single.get(role)
            holder = f": {words.code(one.path, 120)}{_end(one)}" if one is not None else ""
            yield GrowthRow(change=_signed(size), what=f"{words.ROLES[role]}{holder}", where=where)
        for change in self.listed:
            kind = f" ({words.ROLES[change.role]})" if change.role in WEIGHTS else ""
            what = f"{words.code(change.path, 120)}{kind}{_end(change)}"
            yield GrowthRow(change=_signed(change.bytes), what=what, where=where)
        for gone, new in self.renamed:
            what = f"{words.code(gone.path, 120)} is now {words.code(new.path, 120)}"
            yield GrowthRow(change=format_size(new.bytes), what=what, where=where)


def _renamed(changes: Sequence[Change]) -> Iterator[tuple[Change, Change]]:
    """Yield ``(gone, new)`` where just one path of a role lost what just one other got."""
    alike: dict[tuple[Role, int], list[Change]] = {}
    for change in changes:
        if change.is_gone or change.is_new:
            alike.setdefault((change.role, abs(change.bytes)), []).append(change)
    for pair in alike.values():
        gone, new = [change for change in pair if change.is_gone], [change for change in pair if change.is_new]
        if len(gone) == len(new) == 1:
            yield gone[0], new[0]


def _end(change: Change) -> str:
    return ", new" if change.is_new else ", gone" if change.is_gone else ""


def _name(device: DeviceGrowth) -> str:
    name = "host memory" if device.device == "cpu" else words.clean(device.device, 40)
    return f"{name} (simulated)" if device.simulated else name
