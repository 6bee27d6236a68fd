"""Which parts of a model to recompute: the cheapest that free enough, by what a dry run saw each of them keep.

Parts are calls of modules, and stretches of layers that a ``Sequential`` runs in turn. For each of some budgets,
dynamic programming over the calls in their order finds the parts with the least time of which the peak stays below:
what is kept at the end of the forward, and beside it in the backward pass what a part brings back whole, with its
gradients.

Source of the problem: Jain et al., "Checkmate", arXiv:1910.02653, there solved for single operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from oomdoctor.model.memory import ModuleMemory

_BUDGETS: Final = 16
"""Budgets that parts are chosen for, each as much below the one before."""
_FINEST: Final = 80
"""A budget below the last that any parts keep to is looked for down to this fraction of the peak."""
_GRAIN: Final = 64
"""Of what two choices keep so far, differences below this fraction of all that is kept do not count."""
_GRADIENTS: Final = 2
"""Gradients as large as the largest output of a part that are there while it goes backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that may be recomputed.

    Attributes:
        model: its type and the bytes of its parameters; ``name``: as ``oomdoctor.recompute`` takes it.
        kept: bytes that it keeps now; ``output``: what of them remains, as others read it.
        largest: bytes of the largest output in it; ``cost``: the share of its forward in the time of the run.
    """

    model: tuple[str, int]
    name: str
    kept: int
    output: int
    largest: int
    cost: float


class Choice(NamedTuple):
    """What was chosen of some calls: the bytes ``kept`` behind them, the time that it adds, and the most at a time."""

    kept: int = 0
    cost: float = 0.0
    peak: int = 0
    parts: tuple[Part, ...] = ()


def choices(rows: Sequence[ModuleMemory]) -> list[tuple[Choice, int]]:
    """Return what is worth recomputing of modules that were called in this order, with what it saves; mildest first."""
    models = dict.fromkeys(row.model for row in rows)
    trees = [_Tree([row for row in rows if row.model == model]) for model in models]
    whole = next(iter(_found(trees, None)), None)
    if whole is None:
        return []
    found: dict[tuple[Part, ...], Choice] = {}
    strongest: list[Choice] = []
    step, limit = whole.peak // (_BUDGETS + 1), whole.peak
    while step > whole.peak // _FINEST:
        if not (several := _found(trees, limit - step)):
            step //= 2  # the strongest lies between
            continue
        limit, strongest = limit - step, several
        found[several[0].parts] = several[0]
    # Where the peak cannot be lower, what is kept less leaves an allocator fewer holes.
    found |= {one.parts: one for one in strongest}
    return [(one, whole.peak - one.peak) for one in found.values()]


def _found(trees: Sequence[_Tree], limit: int | None) -> list[Choice]:
    """Return choices of which the peak is at most ``limit``, cheapest first; without one nothing is recomputed."""
    grain, found = max(sum(tree.total for tree in trees) // _GRAIN, 1), [Choice()]
    for tree in trees:
        search = _Search(tree, limit, grain)
        for path in tree.outermost:
            found = search.after(path, found)
    return sorted(found, key=lambda one: (one.cost, one.peak))


class _Search:
    """Follows the calls of a tree, and of the ways to come to the same call keeps those that no other one beats."""

    def __init__(self, tree: _Tree, limit: int | None, grain: int) -> None:
        self._tree, self._limit, self._grain = tree, limit, grain

    def after(self, path: str, states: list[Choice]) -> list[Choice]:
        """Return the states behind the call of a module, given those before it."""
        row, children = self._tree.rows[path], self._tree.children[path]
        again = self._again(self._tree.part([path], path), states) if path else []
        if not children:
            return self._best([*again, *self._keep(row.own, row.output, states)])
        inner = self._in_turn(path, states) if row.runs_in_turn else self._one_by_one(children, states)
        return self._best([*again, *self._keep(row.own, 0, inner)])

    def _one_by_one(self, children: Sequence[str], states: list[Choice]) -> list[Choice]:
        for child in children:
            states = self.after(child, states)
        return states

    def _in_turn(self, path: str, states: list[Choice]) -> list[Choice]:
        """Return the states behind layers that run in turn, of which every stretch may be recomputed as a whole."""
        children = self._tree.children[path]
        # What a layer writes into is not there any more for a part that would begin with it.
        inner = [at for at in range(1, len(children)) if not self._tree.rows[children[at]].in_place]
        borders = [0, *inner, len(children)]
        ends = {0: states}
        for before, end in pairwise(borders):
            found = self._one_by_one(children[before:end], ends[before])
            for begin in reversed(borders[: borders.index(end)]):
                if self._limit is None or (part := self._tree.stretch(path, begin, end)).kept > self._limit:
                    break
                if end - begin > 1:
                    found += self._again(part, ends[begin])
            ends[end] = self._best(found)
        return ends[len(children)]

    def _again(self, part: Part, states: list[Choice]) -> list[Choice]:
        if self._limit is None or part.kept <= part.output:
            return []
        backward = part.kept + _GRADIENTS * part.largest - part.output
        return [
            Choice(one.kept + part.output, one.cost + part.cost, max(one.peak, one.kept + backward), (*one.parts, part))
            for one in states
            if one.kept + backward <= self._limit
        ]

    def _keep(self, own: int, output: int, states: list[Choice]) -> list[Choice]:
        backward = own + (_GRADIENTS - 1) * output  # what it gave out is gone with the call that read it
        return [
            Choice(one.kept + own, one.cost, max(one.peak, one.kept + backward), one.parts)
            for one in states
            if self._limit is None or one.kept + backward <= self._limit
        ]

    def _best(self, states: list[Choice]) -> list[Choice]:
        """Return those that no other beats in both bytes and time; of those that keep about the same, the cheapest."""
        found: list[Choice] = []
        for one in sorted(states, key=lambda one: (one.kept, one.cost, one.peak)):
            if found and one.cost >= found[-1].cost:
                continue
            if found and one.kept // self._grain == found[-1].kept // self._grain:
                found.pop()
            found.append(one)
        return found


class _Tree:
    """The modules of one model that were called.

    Attributes:
        rows: of each module by its path; ``children``: paths of those called within it, in their order.
        outermost: those that no other one of them calls; ``total``: bytes that all keep.
    """

    def __init__(self, rows: Sequence[ModuleMemory]) -> None:
        self.rows = {row.path: row for row in rows}
        self.children: dict[str, list[str]] = {path: [] for path in self.rows}
        for path in filter(None, self.rows):
            names = path.split(".")[:-1]
            above = (".".join(names[:end]) for end in range(len(names), -1, -1))
            if (parent := next((one for one in above if one in self.children), None)) is not None:
                self.children[parent].append(path)
        inner = {child for children in self.children.values() for child in children}
        self.outermost = [path for path in self.rows if path not in inner]
        self.total = sum(row.own for row in rows)
        self._kept, self._largest = dict[str, int](), dict[str, int]()
        for path, children in reversed(self.children.items()):  # those within a module were called after it began
            self._kept[path] = self.rows[path].own + sum(self._kept[child] for child in children)
            self._largest[path] = max([self.rows[path].output, *(self._largest[child] for child in children)])
        self._stretches = dict[tuple[str, int, int], Part]()

    def part(self, paths: Sequence[str], name: str) -> Part:
        """Return the part that runs the modules of ``paths`` in turn."""
        return Part(
            model=self.rows[paths[0]].model,
            name=name,
            kept=sum(self._kept[path] for path in paths),
            output=self.rows[paths[-1]].output,
            largest=max(self._largest[path] for path in paths),
            cost=sum(self.rows[path].cost for path in paths),
        )

    def stretch(self, path: str, begin: int, end: int) -> Part:
        """Return the layers of a ``Sequential`` from one of its children up to another one."""
        key = (path, begin, end)
        if key not in self._stretches:
            layers = self.children[path][begin:end]
            names = (layers[0].rpartition(".")[2], layers[-1].rpartition(".")[2])
            first, last = map(int, names) if all(map(str.isdigit, names)) else (begin, end - 1)
            self._stretches[key] = self.part(layers, f"{path}[{first}:{last + 1}]")
        return self._stretches[key]
