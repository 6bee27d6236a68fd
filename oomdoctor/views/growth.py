"""What grew, as sentences and rows: since the last cell by the counters, since the last report by role and holder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rich.text import Text

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Change, DeviceGrowth, Mark, Switch, compare, difference, switched
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
    switch = switched(mark.simulated, now.simulated)
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
    changes = [_rows(device, top) for device in devices]
    left_out = sum(number for _, number in changes)
    return GrowthRows(
        sentence=f"Since {when}: {_joined(changed, totals)}.",
        rows=tuple(row for rows, _ in changes for row in rows),
        more=f"and {words.count(left_out, 'smaller change')}" if left_out else None,
    )


def _by_model(evidence: Evidence, models: Sequence[ModelFacts]) -> Evidence:
    """Return ``evidence`` with one holder for all weights of a model, so that a first step is one change."""
    joined = (replace(one, holdings=one_per_group(one, models)) for one in evidence.censuses)
    return replace(evidence, censuses=tuple(joined))


def _rows(device: DeviceGrowth, top: int) -> tuple[list[GrowthRow], int]:
    """Return the changes on ``device``, and how many are left out of them.

    The roles come first, each with its holder where one alone has changed by as much; then the largest other holders,
    without those that are as nothing beside them; then what moved from one path to another.
    """
    where, moved = _name(device), tuple(_renamed(device.holders))
    changes = [change for change in device.holders if not any(change is one for pair in moved for one in pair)]
    roles = dict(device.roles)
    of_role = {role: [change for change in changes if change.role is role] for role in roles}
    single = {role: held[0] for role, held in of_role.items() if len(held) == 1 and held[0].bytes == roles[role]}
    least = max((abs(change.bytes) for change in device.holders), default=0) * _WORTH_A_ROW
    others = [change for change in changes if change not in single.values()]
    listed = [change for change in others if change in changes[:top] and abs(change.bytes) >= least]
    rows = []
    for role, size in device.roles:
        holder = f": {words.code(single[role].path, 120)}{_end(single[role])}" if role in single else ""
        rows.append(GrowthRow(_signed(size), f"{words.ROLES[role]}{holder}", where))
    for change in listed:
        kind = f" ({words.ROLES[change.role]})" if change.role in WEIGHTS else ""
        rows.append(GrowthRow(_signed(change.bytes), f"{words.code(change.path, 120)}{kind}{_end(change)}", where))
    for gone, new in moved[:top]:
        if abs(new.bytes) >= least:
            what = f"{words.code(gone.path, 120)} is now {words.code(new.path, 120)}"
            rows.append(GrowthRow(format_size(new.bytes), what, where))
    return rows, len(others) - len(listed)


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
