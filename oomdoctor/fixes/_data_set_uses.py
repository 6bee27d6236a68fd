"""What a notebook does with a data set after it was put on a device.

A name counts as data when all that happens to it can be accounted for: batches are cut from it, its size is asked, or
it goes into a ``TensorDataset`` that goes into loaders. One use of another kind, and nothing is known of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes._construction_sites import last_name
from oomdoctor.fixes._refusals import Unfit
from oomdoctor.model.session import Cell
from oomdoctor.program import rewriting
from oomdoctor.program.rewriting import within

_SPLITS: Final = frozenset({"random_split", "Subset"})
_SIZES: Final = m.OneOf(*(m.Name(name) for name in ("shape", "size", "dtype", "ndim", "dim", "numel", "nbytes")))
_BEFORE_COLLATE: Final = 6
"""Arguments of ``DataLoader`` before ``collate_fn``. Source: torch/utils/data/dataloader.py."""

Pages: TypeAlias = list[tuple[Cell, rewriting.ParsedCell]]


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """A node of a page, and what it stands in, innermost first."""

    page: int
    cell: Cell
    parsed: rewriting.ParsedCell
    node: cst.CSTNode
    above: tuple[cst.CSTNode, ...]

    @property
    def line(self) -> int:
        """The line that it begins on."""
        return self.parsed.lines_of(self.node)[0]

    @property
    def where(self) -> str:
        """Line and cell, for a sentence."""
        return f"line {self.line} of {self.cell}"

    @property
    def in_function(self) -> bool:
        """Whether it stands in a function or a class."""
        return any(isinstance(one, cst.FunctionDef | cst.ClassDef) for one in self.above)

    @property
    def call(self) -> Spot | None:
        """The call that it is an argument of."""
        is_given = isinstance(self.above[0], cst.Arg) and isinstance(self.above[1], cst.Call)
        return replace(self, node=self.above[1], above=self.above[2:]) if is_given else None

    @property
    def callee(self) -> str:
        """What that call calls, empty where there is none."""
        return "" if self.call is None else last_name(cst.ensure_type(self.call.node, cst.Call))

    @property
    def targets(self) -> list[cst.BaseExpression]:
        """What it is assigned to, taken apart; none where it is no whole value of one assignment."""
        match self.above[0]:
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Tuple(elements=parts))]):
                return [one.value for one in parts]
            case cst.Assign(targets=[cst.AssignTarget(target=target)]):
                return [target]
        return []

    @property
    def name(self) -> str | None:
        """The one name that it is bound to."""
        found = self.targets
        return found[0].value if len(found) == 1 and isinstance(found[0], cst.Name) else None


class Uses:
    """What is done with data on a device: subscripts that cut batches, loaders, and data sets that are kept."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.cut: list[Spot] = []
        self.loaders: list[Spot] = []
        self.sets: list[tuple[int, str]] = []

    def add(self, more: Uses) -> None:
        """Add what is done with other names; a loader or a data set that holds both counts once."""
        known = {one.node for one in self.loaders}
        self.cut += more.cut
        self.loaders += [one for one in more.loaders if one.node not in known]
        self.sets += [one for one in more.sets if one not in self.sets]

    def follow_placed(self, page: int, name: str | None, call: cst.Call) -> None:
        """Follow what ``call`` puts on a device: a name, or a part of a data set that is made at once."""
        placed = next(one for one in self._below(page, cst.Call) if one.node is call)
        if name is None and placed.call is not None:
            self._hand_over(placed.call)
        else:
            self._follow(str(name), placed)
        if not self.cut and not self.loaders:
            raise Unfit("nothing was found that takes batches from the data")

    def _below(self, page: int, kind: type[cst.CSTNode]) -> Iterator[Spot]:
        cell, parsed = self._pages[page]
        waiting: list[tuple[cst.CSTNode, tuple[cst.CSTNode, ...]]] = [(parsed.module, ())]
        while waiting:
            node, above = waiting.pop()
            if isinstance(node, kind):
                yield Spot(page, cell, parsed, node, above)
            waiting += [(child, (node, *above)) for child in reversed(node.children)]

    def _follow(self, name: str, since: Spot, *, is_set: bool = False) -> None:
        for page in range(since.page, len(self._pages)):
            for one in self._below(page, cst.Name):
                around, parent = one.above, one.above[0]
                if one.node.value != name or one.node in (getattr(parent, "attr", 0), getattr(parent, "keyword", 0)):  # type: ignore[attr-defined]
                    continue
                hides = [part.params for part in around if isinstance(part, cst.FunctionDef | cst.Lambda)]
                is_other = any(part.name.value == name for one in hides for part in within(one, cst.Param))
                if not is_other and (page > since.page or one.line > since.line):
                    self._of_set(one, name) if is_set else self._of_tensor(one, name)

    def _of_tensor(self, one: Spot, name: str) -> None:
        parent = one.above[0]
        if isinstance(parent, cst.Subscript) and parent.value is one.node:
            if isinstance(one.above[1], cst.AssignTarget | cst.AugAssign | cst.Del):
                raise Unfit(f"{one.where} writes to `{name}`")
            if not one.in_function and one.page < len(self._pages) - 1:
                raise Unfit(f"{one.where} takes a part of `{name}`, which is on the device already")
            self.cut.append(replace(one, node=parent, above=one.above[1:]))
        elif one.callee == "TensorDataset" and one.call is not None:
            self._hand_over(one.call)
        elif not m.matches(parent, m.Attribute(attr=_SIZES)) and one.callee != "len":
            raise Unfit(f"{one.where} uses `{name}` as a whole")

    def _of_set(self, one: Spot, name: str) -> None:
        call = one.call
        if call is not None and one.callee == "DataLoader" and call.node.args[0].value is one.node:  # type: ignore[attr-defined]
            self._load(call)
        elif call is not None and one.callee in _SPLITS:
            self._hand_over(call)
        elif one.callee != "len":
            raise Unfit(f"{one.where} uses `{name}` as a whole")

    def _hand_over(self, call: Spot) -> None:
        """Follow the data set that ``call`` makes into its loaders."""
        outer, makes = call.call, last_name(cst.ensure_type(call.node, cst.Call)) == "TensorDataset"
        if outer is not None and call.callee == "DataLoader":
            if makes and outer.name is not None:
                self.sets.append((outer.page, f"{outer.name}.dataset"))
            self._load(outer)
            return
        if not call.targets or call.in_function:
            raise Unfit(f"{call.where} hands the data to something that is not followed")
        for one in call.targets:
            if not isinstance(one, cst.Name):
                raise Unfit(f"{call.where} keeps a data set under no name of its own")
            self.sets += [(call.page, one.value)] if makes else []
            self._follow(one.value, call, is_set=True)

    def _load(self, call: Spot) -> None:
        if call.in_function and call.page < len(self._pages) - 1:
            raise Unfit(f"{call.where} makes loaders in a function, which are there already")
        self.loaders.append(call)

    def check(self) -> None:
        """Check that a batch is what it was."""
        for one in self.cut:
            name = one.name
            writes = name and re.search(rf"\b{name}(\[.*\])?\s*[-+*/@%&|^]+=|\b{name}\.\w+_\(", one.cell.source)
            if writes or m.matches(one.above[0], m.Attribute(attr=m.Name(m.MatchRegex(r".*_$")))):
                raise Unfit(f"{one.where} takes a batch that is written to, and the data with it")
        for one in self.loaders:
            args = cst.ensure_type(one.node, cst.Call).args
            options = {arg.keyword.value if arg.keyword is not None else arg.star for arg in args}
            if options & {"collate_fn", "*", "**"} or sum(arg.keyword is None for arg in args) > _BEFORE_COLLATE:
                raise Unfit(f"{one.where} puts batches together in a way of its own")
