"""Which parts of a model to recompute: the cheapest that free enough, by what a dry run saw each of them keep.

Parts are calls of modules, and stretches of layers that a ``Sequential`` runs in turn. Small parts leave more inputs to
keep, large ones come back whole in the backward pass; so the model is cut at several sizes, and of each cut parts are
taken by the bytes that they free for their time. What no other choice beats in both bytes and time is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from oomdoctor.model.memory import ModuleMemory

_CUTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""A part keeps at most such a fraction of all that is kept."""
_MOST: Final = 8
"""Choices that are offered, each freeing about as much more than the one before."""
_GRADIENTS: Final = 2
"""Gradients as large as the largest output of a part that are there while it goes backwards."""

Model: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that may be recomputed.

    Attributes:
        model: its type and the bytes of its parameters; ``name``: as ``oomdoctor.recompute`` takes it.
        kept: bytes that it keeps now; ``output``: what of them remains, as others read it.
        largest: bytes of the largest output in it.
        cost: the share of its forward in the time of the run.
    """

    model: Model
    name: str
    kept: int
    output: int
    largest: int
    cost: float

    @property
    def freed(self) -> int:
        """Bytes that recomputing it frees until the backward pass comes to it."""
        return max(self.kept - self.output, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parts in their order, with the bytes that they take off the peak and the time that they add, as a share."""

    parts: tuple[Part, ...]
    saves: int
    cost: float


def choices(rows: Sequence[ModuleMemory]) -> tuple[Choice, ...]:
    """Return the parts worth recomputing of the modules that were called in this order, mildest first."""
    models = dict.fromkeys(row.model for row in rows)
    trees = [_Tree([row for row in rows if row.model == model]) for model in models]
    total = sum(row.own for row in rows)
    cuts = {tuple(part for tree in trees for part in tree.cut(total // count)) for count in _CUTS}
    found = sorted((one for cut in cuts for one in _taken(cut)), key=lambda one: (one.cost, -one.saves))
    best: list[Choice] = []
    for one in found:
        if one.saves > (best[-1].saves if best else 0):
            best.append(one)
    step = max((one.saves for one in best), default=0) / _MOST
    steps = [step * at for at in range(1, _MOST + 1)] if best else []
    return tuple(dict.fromkeys(next(one for one in best if one.saves >= least) for least in steps))


def _taken(cut: Sequence[Part]) -> Iterator[Choice]:
    """Yield growing choices of the parts of a cut, those first that free most for their time."""
    order = sorted((part for part in cut if part.freed), key=lambda part: part.cost / part.freed)
    for count in range(1, len(order) + 1):
        chosen = set(order[:count])
        parts = tuple(part for part in cut if part in chosen)
        yield Choice(parts=parts, saves=_saved(cut, chosen), cost=sum(part.cost for part in parts))


def _saved(cut: Sequence[Part], chosen: set[Part]) -> int:
    """Return by how much the peak is lower, at the end of the forward or while a part goes backwards."""
    return sum(part.freed for part in chosen) + _backward(cut, set()) - _backward(cut, chosen)


def _backward(cut: Sequence[Part], chosen: set[Part]) -> int:
    """Return by how much more the backward pass holds at most than the end of the forward, 0 where it never does."""
    gone, worst = 0, 0
    for part in reversed(cut):
        comes_back = part.freed if part in chosen else 0
        # What it gave out is gone with the part that read it.
        worst = max(worst, comes_back + _GRADIENTS * part.largest - part.output - gone)
        gone += part.output if part in chosen else part.kept
    return worst


class _Tree:
    """The modules of one model that were called."""

    def __init__(self, rows: Sequence[ModuleMemory]) -> None:
        self._rows = {row.path: row for row in rows}
        self._children: dict[str, list[str]] = {path: [] for path in self._rows}
        for path in self._rows:
            above = path
            while above:
                above = above.rpartition(".")[0]
                if above in self._children:
                    self._children[above].append(path)
                    break
        inner = {child for children in self._children.values() for child in children}
        self._kept = {path: sum(row.own for row in self._within(path)) for path in self._rows}
        self._outermost = [path for path in self._rows if path not in inner]

    def cut(self, limit: int) -> list[Part]:
        """Return the parts that keep at most ``limit`` bytes each, in the order of their calls."""
        return [part for path in self._outermost for part in self._of(path, limit)]

    def _of(self, path: str, limit: int) -> Iterator[Part]:
        if path and self._kept[path] <= limit:
            yield self._part([path], path)
        else:
            yield from self._below(path, limit)

    def _below(self, path: str, limit: int) -> Iterator[Part]:
        if self._rows[path].runs_in_turn:
            yield from self._stretches(path, limit)
            return
        for child in self._children[path]:
            yield from self._of(child, limit)

    def _stretches(self, path: str, limit: int) -> Iterator[Part]:
        begun: list[str] = []
        for child in self._children[path]:
            if begun and not self._rows[child].in_place and sum(self._kept[one] for one in [*begun, child]) > limit:
                yield from self._stretch(path, begun, limit)
                begun = []
            begun.append(child)
        yield from self._stretch(path, begun, limit)

    def _stretch(self, path: str, layers: list[str], limit: int) -> Iterator[Part]:
        if len(layers) > 1:
            first, last = (self._place(path, layer) for layer in (layers[0], layers[-1]))
            yield self._part(layers, f"{path}[{first}:{last + 1}]")
        elif layers:
            yield from self._of(layers[0], limit)

    def _place(self, path: str, layer: str) -> int:
        """Return at which place a layer stands in its ``Sequential``."""
        name = layer.rpartition(".")[2]
        return int(name) if name.isdigit() else self._children[path].index(layer)

    def _part(self, paths: list[str], name: str) -> Part:
        rows = [row for path in paths for row in self._within(path)]
        return Part(
            model=rows[0].model,
            name=name,
            kept=sum(row.own for row in rows),
            output=self._rows[paths[-1]].output,
            largest=max(row.output for row in rows),
            cost=sum(self._rows[path].cost for path in paths),
        )

    def _within(self, path: str) -> Iterator[ModuleMemory]:
        yield self._rows[path]
        for child in self._children[path]:
            yield from self._within(child)
