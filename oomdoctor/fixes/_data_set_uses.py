"""What a notebook does with a data set after it was put on a device, as LibCST nodes.

A name counts as data when all that happens to it can be accounted for: batches are cut from it, its size is asked, or
it goes into a ``TensorDataset`` that goes into loaders. One use of another kind, and nothing is known of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes._class_calls import last_name
from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.rewriting import within

__all__ = ["Page", "Uses", "pages_of"]

_SPLITS: Final = frozenset({"random_split", "Subset"})
_SIZES: Final = m.OneOf(*(m.Name(name) for name in ("shape", "size", "dtype", "ndim", "dim", "numel", "nbytes")))
_BEFORE_COLLATE: Final = 6
"""Arguments of ``DataLoader`` before ``collate_fn``. Source: torch/utils/data/dataloader.py."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A cell, and the parent of each of its nodes."""

    cell: Cell
    parsed: rewriting.ParsedCell
    parents: Mapping[cst.CSTNode, cst.CSTNode]

    def where(self, node: cst.CSTNode) -> str:
        """Return line and cell of ``node``, for a sentence."""
        return f"line {self.line(node)} of {self.cell}"

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that ``node`` begins on."""
        return self.parsed.lines_of(node)[0]

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what ``node`` stands in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield (node := parent)

    def is_in_function(self, node: cst.CSTNode) -> bool:
        """Whether ``node`` stands in a function or a class."""
        return any(isinstance(one, cst.FunctionDef | cst.ClassDef) for one in self.above(node))

    def call_around(self, node: cst.CSTNode) -> cst.Call | None:
        """Return the call that ``node`` is an argument of."""
        arg = self.parents[node]
        call = self.parents[arg] if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def bound(self, value: cst.CSTNode) -> list[cst.BaseExpression]:
        """Return what ``value`` is assigned to, taken apart; none where it is no whole value of one assignment."""
        assign = self.parents[value]
        if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
            return []
        target = assign.targets[0].target
        return [one.value for one in target.elements] if isinstance(target, cst.Tuple) else [target]

    def name_of(self, value: cst.CSTNode) -> str | None:
        """Return the name that ``value`` is bound to."""
        return one.value if len(found := self.bound(value)) == 1 and isinstance(one := found[0], cst.Name) else None

    def mentions(self, name: str) -> Iterator[cst.Name]:
        """Yield where the notebook's ``name`` is used: not as an attribute, a keyword or a parameter."""
        for node in within(self.parsed.module, cst.Name):
            parent = self.parents[node]
            if node.value != name or node in (getattr(parent, "attr", None), getattr(parent, "keyword", None)):
                continue
            around = (one.params for one in self.above(node) if isinstance(one, cst.FunctionDef | cst.Lambda))
            if not any(param.name.value == name for params in around for param in within(params, cst.Param)):
                yield node


def pages_of(cells: Cells) -> list[Page]:
    """Return the cells that can be read; one that is run again stands for its earlier runs."""
    last = {cell.source: cell for cell in cells.history}
    kept = [(cell, rewriting.read(cell.source)) for cell in cells.history if last[cell.source] is cell]
    return [
        Page(cell, parsed, dict(_parents(parsed.module))) for cell, parsed in kept if not isinstance(parsed, Refused)
    ]


def _parents(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for child in node.children:
        yield child, node
        yield from _parents(child)


class Uses:
    """What is done with data after it was put on a device.

    Attributes:
        cut: subscripts that cut batches, with their page.
        loaders: calls of ``DataLoader``.
        sets: the expressions for data sets that are kept.
    """

    def __init__(self, pages: list[Page]) -> None:
        self._pages = pages
        self.cut: list[tuple[Page, cst.Subscript]] = []
        self.loaders: list[tuple[Page, cst.Call]] = []
        self.sets: list[tuple[Page, str]] = []

    def add(self, more: Uses) -> None:
        """Add what is done with other names; a loader or a data set that holds both counts once."""
        self.cut += more.cut
        self.loaders += [one for one in more.loaders if one not in self.loaders]
        self.sets += [one for one in more.sets if one not in self.sets]

    def follow(self, name: str, since: tuple[Page, int], *, is_set: bool = False) -> str | None:
        """Add what is done with a name after a line; return what cannot be accounted for, None if all can."""
        home, line = since
        for page in self._pages[self._pages.index(home) :]:
            for node in page.mentions(name):
                if page is not home or page.line(node) > line:
                    why = self._of_set(page, node, since) if is_set else self._of_tensor(page, node, since)
                    if why is not None:
                        return why
        return None

    def _of_tensor(self, page: Page, node: cst.Name, since: tuple[Page, int]) -> str | None:
        parent, call = page.parents[node], page.call_around(node)
        if m.matches(parent, m.Attribute(attr=_SIZES)) or (call is not None and last_name(call) == "len"):
            return None
        if isinstance(parent, cst.Subscript) and parent.value is node:
            if isinstance(page.parents[parent], cst.AssignTarget | cst.AugAssign | cst.Del):
                return f"{page.where(node)} writes to `{node.value}`"
            if not page.is_in_function(node) and page is not self._pages[-1]:
                return f"{page.where(node)} takes a part of `{node.value}`, which is on the device already"
            self.cut.append((page, parent))
            return None
        if call is not None and last_name(call) == "TensorDataset":
            return self.hand_over(page, call, since)
        return f"{page.where(node)} uses `{node.value}` as a whole"

    def _of_set(self, page: Page, node: cst.Name, since: tuple[Page, int]) -> str | None:
        call = page.call_around(node)
        callee = "" if call is None else last_name(call)
        if call is None or (callee == "DataLoader" and call.args[0].value is not node):
            return f"{page.where(node)} uses `{node.value}` as a whole"
        if callee == "DataLoader":
            return self._load(page, call)
        if callee in _SPLITS:
            return self.hand_over(page, call, since)
        return None if callee == "len" else f"{page.where(node)} uses `{node.value}` as a whole"

    def hand_over(self, page: Page, call: cst.Call, since: tuple[Page, int]) -> str | None:
        """Follow the data set that ``call`` makes into its loaders."""
        outer, makes = page.call_around(call), last_name(call) == "TensorDataset"
        if outer is not None and last_name(outer) == "DataLoader" and outer.args[0].value is call:
            if makes and (name := page.name_of(outer)) is not None:
                self.sets.append((page, f"{name}.dataset"))
            return self._load(page, outer)
        targets = page.bound(call)
        if not targets or page.is_in_function(call):
            return f"{page.where(call)} hands the data to something that is not followed"
        for one in targets:
            if not isinstance(one, cst.Name):
                return f"{page.where(call)} keeps a data set under no name of its own"
            self.sets += [(page, one.value)] if makes else []
            if (why := self.follow(one.value, (page, page.line(call)), is_set=True)) is not None:
                return why
        return None

    def _load(self, page: Page, call: cst.Call) -> str | None:
        if page.is_in_function(call) and page is not self._pages[-1]:
            return f"{page.where(call)} makes loaders in a function, which are there already"
        self.loaders.append((page, call))
        return None

    def unfit(self) -> str | None:
        """Return why a batch would not be what it was, None if it would."""
        for page, part in self.cut:
            index, text, name = page.parsed.code(part.slice[0].slice), page.cell.source, page.name_of(part)
            bound = (
                rf"^[ \t]*(?:for\s+)?{re.escape(index)}\b(?:\s+in\s|\s*=(?!=)).*$" if index.isidentifier() else "(?!)"
            )
            if re.search(r"\bdevice\b|\.cuda\(", "\n".join([index, *re.findall(bound, text, re.MULTILINE)])):
                return f"{page.where(part)} takes batches by an index that is on the device"
            writes = name and re.search(rf"\b{name}(\[.*\])?\s*[-+*/@%&|^]+=|\b{name}\.\w+_\(", text)
            if writes or m.matches(page.parents[part], m.Attribute(attr=m.Name(m.MatchRegex(r".*_$")))):
                return f"{page.where(part)} takes a batch that is written to, and the data with it"
        for page, call in self.loaders:
            options = {arg.keyword.value if arg.keyword is not None else arg.star for arg in call.args}
            if options & {"collate_fn", "*", "**"} or sum(arg.keyword is None for arg in call.args) > _BEFORE_COLLATE:
                return f"{page.where(call)} puts batches together in a way of its own"
        return None
