"""Which holders belong together: weights of a model, their gradients, an optimizer's state, items of a container.

Two models read the same way whatever their depth. What outweighs the rest of its group stays by itself. Which modules
hold how much is told from the paths of weights, and from the graphs that saved something.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, NamedTuple

from oomdoctor.model.code import ModelFacts
from oomdoctor.model.memory import Census, Holding, Role

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
            held += _parts(holding, roots)
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


def by_module(census: Census, models: Sequence[ModelFacts]) -> dict[Role, Counter[tuple[str, ...]]]:
    """Return the bytes of each module and of each that it stands in; what is of none has its own name in its group.

    Each is given by the names on the way to it: ``("model", "model[0]")``. The whole role is ``()``.
    """
    roots, parts = _roots(models), defaultdict[Role, list[_Part]](list)
    for holding in census.holdings:
        found = _parts(holding, roots)
        whole, container = _group(holding, roots), _container(holding)
        names = [] if container is None else [container.path]
        rest = holding.bytes - sum(part.bytes for part in found)
        parts[holding.role] += (_Part(tuple(accumulate(part.way)), part.bytes) for part in found)
        parts[holding.role].append(_Part((whole.path,) if whole else (*names, holding.path), rest))
    return {role: +_sizes(of_role) for role, of_role in parts.items()}


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


def _parts(holding: Holding, roots: Sequence[str]) -> list[_Part]:
    """Return the modules that hold it: of a weight its own, of what a graph saved those that the graph tells."""
    way, rest = _way(holding.path.removesuffix(".grad"), roots)
    return [_Part(way[:-1], holding.bytes)] if len(way) > 1 and not rest else _parts_saved(holding, roots)


def _parts_saved(holding: Holding, roots: Sequence[str]) -> list[_Part]:
    parts = (_Part(_way(module, roots)[0], size) for module, size in holding.saved_in)
    return [part for part in parts if part.way]


def _sizes(parts: Sequence[_Part]) -> Counter[tuple[str, ...]]:
    sizes: Counter[tuple[str, ...]] = Counter()
    for way, size in parts:
        for depth in range(len(way) + 1):
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
