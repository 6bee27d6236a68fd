"""Who holds the memory of one device, as rows: what belongs together in one row, the largest first.

The weights of a model, their gradients, the state of an optimizer and the items of a container are one row each,
however many they are: two models read the same way whatever their depth. What outweighs the rest of its group keeps a
row of its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rich.text import Text

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, Holding, HostHolding, HostMemory, Role
from oomdoctor.model.sizes import MIB, format_size
from oomdoctor.views import labels
from oomdoctor.views.document import Document, Fold, Head, Inline, Line, Table, apart, given

NAMELESS: Final = "("
"""What the path of a holder without a name begins with."""

WEIGHTS: Final = {Role.PARAMETER: "parameter", Role.GRADIENT: "gradient", Role.BUFFER: "buffer"}
"""Roles of what belongs to a model, and what one storage of it is called."""

_OWN_ROW_OF_ALL: Final = 0.1
_OWN_ROW_OF_GROUP: Final = 0.5
_MOST: Final = 0.9
"""Share of a role from which on it is said to be of one module."""
_STEP: Final = re.compile(r"""(?:\._modules)?\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\]'"])*\]|\.[^\W\d]\w*""")
_FEW_PARTS: Final = 2
_FEW: Final = 3
"""Up to so many items of one container keep rows of their own."""

_MOST_NAMES: Final = 6
"""A line that unbinds more is not told."""
_DELETES: Final = re.compile(r"del [\w, ]+")

_STATE: Final = re.compile(r"(?P<optimizer>.+?)(?:\.state\[.+\]| → state of a parameter of .+)\['[^']*'\]")
_ITEM: Final = re.compile(
    r"(?P<before>(?:local `)?)(?P<root>[^\W\d]\w*)(?P<way>[\[.][^`→]*?)?(?P<after>(?:` of [^→]*?)?(?: → graph)?)"
)


@dataclass(frozen=True, slots=True, order=True)
class _Group:
    """What some holders belong to. ``least``: how many of them make a group."""

    path: str
    least: int = 2


def grouped(census: Census, models: Sequence[ModelFacts]) -> tuple[Holding, ...]:
    """Return the holders of ``census``, those joined that belong to one model, optimizer, cache or container."""
    roots = _roots(models)
    groups, rest = _split(census.holdings, lambda holding: _group(holding, roots) or _container(holding))
    for (_, group), held in groups.items():
        rest += held if len(held) < group.least else _joined(group.path, held, round(census.found * _OWN_ROW_OF_ALL))
    return tuple(rest)


def one_per_group(census: Census, models: Sequence[ModelFacts]) -> tuple[Holding, ...]:
    """Return the holders of ``census`` with exactly one for each model, optimizer and cache in each role.

    The paths do not depend on how many weights there are, so that two censuses can be compared.
    """
    roots = _roots(models)
    groups, rest = _split(census.holdings, lambda holding: _group(holding, roots))
    return (*rest, *(_join(group.path, held) for (_, group), held in groups.items()))


def within(census: Census, role: Role, models: Sequence[ModelFacts]) -> str | None:
    """Return the innermost module that has nearly all of ``role``, None where not nearly all is known to be of one.

    Of what a graph has saved it is the module that the graph tells; the name of its result tells none.
    """
    roots, held = _roots(models), list[_Part]()
    for holding in census.holdings:
        if holding.role is role:
            way, rest = _way(holding.path.removesuffix(".grad"), roots)
            is_direct = len(way) > 1 and not rest
            held += [_Part(way[:-1], holding.bytes)] if is_direct else _parts_saved(holding, roots)
    return "".join(_innermost(_sizes(held), _MOST * census.bytes_of(role))) or None


def saved_within(holding: Holding, models: Sequence[ModelFacts]) -> tuple[tuple[str, float], ...]:
    """Return the modules that a graph saved most of what is held in, each with its share, the largest first.

    It is the innermost one that has nearly all that is known to be of any, or two parts of that one which have as much.
    """
    parts = _parts_saved(holding, _roots(models))
    sizes = _sizes(parts)
    around = _innermost(sizes, _MOST * sum(part.bytes for part in parts))
    inside = {way: size for way, size in sizes.items() if way[:-1] == around}
    largest = Counter(inside).most_common(_FEW_PARTS)
    if not around:
        return ()
    told = largest if sum(size for _, size in largest) >= _MOST * sizes[around] else [(around, sizes[around])]
    return tuple(("".join(way), size / holding.bytes) for way, size in told)


class _Part(NamedTuple):
    """Bytes of one module, which stands at the end of a way: the model, then step by step."""

    way: tuple[str, ...]
    bytes: int


def _way(path: str, roots: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the steps of ``path`` from the model that it begins with, none where there is no such, and the rest."""
    root = next((one for one in roots if path == one or path.startswith((f"{one}.", f"{one}["))), None)
    if root is None:
        return (), path
    steps, at = [root], len(root)
    while (step := _STEP.match(path, at)) is not None:
        steps.append(step[0])
        at = step.end()
    return tuple(steps), path[at:]


def _parts_saved(holding: Holding, roots: Sequence[str]) -> list[_Part]:
    parts = (_Part(_way(module, roots)[0], size) for module, size in holding.saved_in)
    return [part for part in parts if part.way]


def _sizes(parts: Sequence[_Part]) -> Counter[tuple[str, ...]]:
    """Return the bytes of each module and of each that it stands in."""
    sizes: Counter[tuple[str, ...]] = Counter()
    for way, size in parts:
        for depth in range(1, len(way) + 1):
            sizes[way[:depth]] += size
    return sizes


def _innermost(sizes: Mapping[tuple[str, ...], int], least: float) -> tuple[str, ...]:
    """Return the way to the innermost module that has at least so many bytes, nothing where none has."""
    return max((way for way, size in sizes.items() if size >= least), key=len, default=())


def _roots(models: Sequence[ModelFacts]) -> list[str]:
    return sorted((model.path for model in models), key=len, reverse=True)


def _split(
    holdings: Sequence[Holding], group_of: Callable[[Holding], _Group | None]
) -> tuple[dict[tuple[Role, _Group], list[Holding]], list[Holding]]:
    """Return the holders by their role and group, and those of no group."""
    groups: dict[tuple[Role, _Group], list[Holding]] = {}
    rest: list[Holding] = []
    for holding in holdings:
        group = group_of(holding)
        if group is None:
            rest.append(holding)
        else:
            groups.setdefault((holding.role, group), []).append(holding)
    return groups, rest


def _group(holding: Holding, roots: Sequence[str]) -> _Group | None:
    """Return the model, the optimizer or the cache that a holder is a part of."""
    if holding.role in WEIGHTS:
        inside = (root for root in roots if holding.path.startswith((f"{root}.", f"{root}[")))
        path = next(inside, None)
    elif holding.role is Role.OPTIMIZER_STATE:
        match = _STATE.fullmatch(holding.path)
        path = f"{match['optimizer']}.state" if match else None
    else:
        item = _ITEM.fullmatch(holding.path) if holding.role is Role.KV_CACHE else None
        path = f"{item['before']}{item['root']}{item['after']}" if item else None
    return _Group(path) if path is not None else None


def _container(holding: Holding) -> _Group | None:
    """Return what a holder is one item of, by the name that its path begins with."""
    item = _ITEM.fullmatch(holding.path)
    if item is None or not item["way"]:
        return None
    items = "[…]" if item["way"].startswith("[") else ""
    return _Group(f"{item['before']}{item['root']}{items}{item['after']}", least=_FEW + 1)


def _joined(path: str, held: list[Holding], own_row_from: int) -> list[Holding]:
    """Return one holder for the group, and before it the one that outweighs all others of it and is not small."""
    first = max(held, key=lambda holding: holding.bytes)
    outweighs = first.bytes > _OWN_ROW_OF_GROUP * sum(holding.bytes for holding in held)
    if not outweighs or first.bytes <= own_row_from:
        return [_join(path, held)]
    others = [holding for holding in held if holding is not first]
    return [first, _join(f"{path}, the rest", others) if len(others) > 1 else others[0]]


def _join(path: str, held: list[Holding]) -> Holding:
    first = max(held, key=lambda holding: holding.bytes)
    saved_in: Counter[str] = Counter()
    for module, size in (part for holding in held for part in holding.saved_in):
        saved_in[module] += size
    return replace(
        first,
        path=path,
        bytes=sum(holding.bytes for holding in held),
        count=sum(holding.count for holding in held),
        dtype=first.dtype if len({holding.dtype for holding in held}) == 1 else None,
        shape=None,
        frees=_line_for_all([holding.frees for holding in held]),
        saved_in=tuple(saved_in.most_common()),
    )


def _line_for_all(lines: Sequence[str | None]) -> str | None:
    """Return the line that frees what each of ``lines`` frees a part of, None where there is none."""
    if len(set(lines)) == 1:
        return lines[0]
    if not all(line is not None and _DELETES.fullmatch(line) for line in lines):
        return None
    names = dict.fromkeys(name for line in lines if line for name in line.removeprefix("del ").split(", "))
    return f"del {', '.join(names)}" if len(names) <= _MOST_NAMES else None


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

    def blocks(self, title: str, *, folded: bool = False) -> Document:
        """Return what is shown of it."""
        told = (Line(text) for text in (self.accounted, *self.notes) if text)
        below = given(Line(self.more, "more") if self.more else None, *told)
        if not self.rows:
            return apart(*below)
        blocks = (Table("holders", tuple(map(_cells, self.rows))), *below)
        return (Fold(title, blocks),) if folded else (Head(title), *blocks)


def _cells(row: HolderRow) -> tuple[Inline, ...]:
    what = Text.assemble((row.path, "path"), "  " if row.detail else "", (row.detail, "detail"))
    if row.frees:
        what.append("\n").append("freed by ", "detail").append(row.frees, "freeing")
    return Text(row.size, "figure"), row.share, row.role, what


def worth_telling(host: HostMemory, beside: Sequence[HostHolding]) -> list[HostHolding]:
    """Return the names that lead to a part of this process that is worth a line."""
    rss = labels.known(host.rss)
    return [one for one in beside if rss is not None and one.bytes >= _WORTH_A_LINE * rss]


def consists_of(held: HostHolding) -> str:
    """Return what most of a holding is."""
    if held.array_bytes > held.bytes / 2:
        return labels.count(held.arrays, "NumPy array")
    return "text, bytes and other Python objects" if held.objects > 1 else "one Python object"


def holders(
    census: Census | None, models: Sequence[ModelFacts], *, top: int = TOP, beside: Sequence[HostHolding] = ()
) -> Holders:
    """Return the ``top`` largest holders of ``census``; above ``TOP`` the weights of models one by one.

    Args:
        beside: names that lead to memory that is no tensor's, listed among the others, without a share of the tensors.
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
