"""Who holds the memory of one device, as rows: what belongs together in one row, the largest first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, Holding, HostHolding, HostMemory, Role
from oomdoctor.model.sizes import MIB, format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Document, Fold, Head, Inline, Line, Table, Treemap, apart, given
from oomdoctor.views.holder_groups import WEIGHTS, grouped, saved_within
from oomdoctor.views.pictures import treemap

TOP: Final = 10
"""Holders that are listed where no number is asked for. Where more are asked for, single weights are listed."""

_WORTH_A_ROW: Final = 0.005
_WORTH_A_LINE: Final = 0.05
_AT_LEAST: Final = 3
_GRAPH: Final = "→ graph"
_MOST_OF_IT: Final = 0.5
_PADDING: Final = 1.01
"""How much larger than its elements a storage may be without being called larger."""
_BITS: Final = re.compile(r"[a-z]+(\d+)")
"""Bits of one element, in the name of its type. Source: https://docs.pytorch.org/docs/stable/tensor_attributes.html"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRow:
    """One holder: its share of all that was found, what it consists of, and the line that lets go of it."""

    size: str
    share: str
    role: str
    path: str
    detail: str
    frees: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The largest holders of one memory, what was left out of the list, and how much has no holder at all."""

    rows: tuple[HolderRow, ...]
    more: str | None
    accounted: str | None
    notes: tuple[str, ...]
    treemap: Treemap | None = None

    def blocks(self, title: str, *, folded: bool = False) -> Document:
        """Return what is shown of it."""
        told = (Line(text) for text in (self.accounted, *self.notes) if text)
        below = given(Line(self.more, "more") if self.more else None, *told)
        if not self.rows:
            return apart(*below)
        blocks = (*given(self.treemap), Table("holders", tuple(map(_cells, self.rows))), *below)
        return (Fold(title, blocks),) if folded else (Head(title), *blocks)


def _cells(row: HolderRow) -> tuple[Inline, ...]:
    what = Text.assemble((row.path, "path"), "  " if row.detail else "", (row.detail, "detail"))
    if row.frees:
        what.append("\n").append("free it with: ", "detail").append(row.frees, "freeing")
    return Text(row.size, "figure"), row.share, row.role, what


def worth_telling(host: HostMemory, beside: Sequence[HostHolding]) -> list[HostHolding]:
    """Return the names that lead to a part of this process that is worth a line."""
    rss = labels.known(host.rss)
    return [one for one in beside if rss is not None and one.bytes >= _WORTH_A_LINE * rss]


def consists_of(held: HostHolding) -> str:
    """Return what a holding is, what most of it is, and the line that makes it hold more."""
    what = _most_of(held)
    is_one = held.array_bytes > held.bytes / 2 and held.arrays == 1 and held.kind == "ndarray"
    kind = f"{labels.clean(held.kind, 40)}: " if held.kind and not is_one else ""
    return f"{kind}{what}" + (f"; {held.grown_by} makes it grow" if held.grown_by else "")


def _most_of(held: HostHolding) -> str:
    if held.array_bytes > held.bytes / 2:
        return labels.count(held.arrays, "NumPy array")
    return "text, bytes and other Python objects" if held.objects > 1 else "one Python object"


def holders(
    census: Census | None, models: Sequence[ModelFacts], *, top: int = TOP, beside: Sequence[HostHolding] = ()
) -> Holders:
    """Return the ``top`` largest holders of ``census``; above ``TOP`` the weights of models one by one.

    ``beside`` are names that lead to memory that is no tensor's, without a share of the tensors.
    """
    others = [(held.bytes, _row_of_host(held)) for held in beside]
    if census is None:
        return Holders(rows=tuple(row for _, row in others), more=None, accounted=None, notes=())
    found = census.holdings if top > TOP else grouped(census, models)
    ranked = sorted(found, key=lambda holding: -holding.bytes)
    worth = sum(holding.bytes >= census.found * _WORTH_A_ROW for holding in ranked)
    shown = ranked[: top if top > TOP else min(top, max(worth, _AT_LEAST))]
    rest, left_out = census.found - sum(holding.bytes for holding in shown), len(ranked) - len(shown)
    smaller = labels.count(left_out, "smaller holder") if left_out else "smaller holders"
    rows = [*((holding.bytes, _row(holding, census.found, models)) for holding in shown), *others]
    return Holders(
        rows=tuple(row for _, row in sorted(rows, key=lambda sized: -sized[0])),
        more=f"and {smaller}, {format_size(rest)} in all" if left_out or rest >= MIB else None,
        accounted=_accounted(census),
        notes=tuple(labels.clean(note, 600) for note in census.notes),
        treemap=treemap(census, models),
    )


def _accounted(census: Census) -> str | None:
    """Return how much of what the allocator counts has a holder, and what has none."""
    ratio = census.accounted_ratio
    if ratio is None or not isinstance(census.allocated, int) or not census.allocated:
        return None
    rest = max(census.allocated - census.found, 0)
    # What has no holder is never rounded away.
    shown = labels.percent(min(ratio, 0.999) if rest else ratio, 1)
    whole = f"({format_size(census.found)} of {format_size(census.allocated)})"
    unexplained = f"no holder found for {format_size(rest)}" if rest else "nothing is unexplained"
    return f"Accounted for {shown} of allocated {whole}; {unexplained}."


def _row(holding: Holding, found: int, models: Sequence[ModelFacts]) -> HolderRow:
    return HolderRow(
        size=format_size(holding.bytes),
        share=_share(holding.bytes / found) if found else "",
        role=labels.ROLES[holding.role],
        path=labels.clean(holding.path, 120),
        detail="".join((*_detail(holding), *_saved(holding, models))).strip(),
        frees=labels.clean(holding.frees, 160) if holding.frees else None,
    )


def _row_of_host(held: HostHolding) -> HolderRow:
    path, size = labels.clean(held.path, 120), format_size(held.bytes)
    return HolderRow(size=size, share="", role="no tensor", path=path, detail=consists_of(held), frees=None)


def _detail(holding: Holding) -> Iterator[str]:
    """Yield how many storages there are and what they are like; of several, what the largest is like."""
    is_joined = holding.shape is None
    own = _own_bytes(holding)
    if holding.count > 1:
        noun = "workspace" if holding.role is Role.WORKSPACE else "tensor"
        yield labels.count(holding.count, WEIGHTS.get(holding.role, noun) if is_joined else noun)
        yield " " if is_joined or holding.bytes == holding.count * (own or 0) else ", largest "
    if holding.dtype:
        yield labels.clean(holding.dtype, 30)
    if not is_joined:
        yield f"{' ' if holding.dtype else ''}[{', '.join(map(str, holding.shape or ()))}]"
    # A mean above what its shape takes can only be if the largest storage is above it.
    if own is not None and holding.bytes > own * holding.count * _PADDING:
        yield ", a view of a larger storage"


def _saved(holding: Holding, models: Sequence[ModelFacts]) -> Iterator[str]:
    """Yield in which modules most of what a graph holds was saved, by what the graph tells."""
    parts = saved_within(holding, models) if _GRAPH in holding.path else ()
    if sum(share for _, share in parts) <= _MOST_OF_IT:
        return
    names = [(labels.clean(module, 80), labels.percent(share)) for module, share in parts]
    if len(names) == 1:
        yield f"; {names[0][1]} of it saved in {names[0][0]}"
    else:
        yield f"; most of it saved in {', '.join(f'{name} ({share})' for name, share in names)}"


def _own_bytes(holding: Holding) -> int | None:
    """Return what the elements of the largest tensor take, None where that is not known."""
    bits = "8" if holding.dtype == "bool" else (_BITS.match(holding.dtype or "") or [None, None])[1]
    return None if bits is None or holding.shape is None else int(bits) // 8 * math.prod(holding.shape)


def _share(ratio: float) -> str:
    return labels.percent(ratio) if ratio >= 0.005 else "<1 %"
