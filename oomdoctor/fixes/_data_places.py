"""Where a notebook puts a data set on a device, and everything that it goes on to do with it, as LibCST nodes.

A name counts as data when all that happens to it can be accounted for: batches are cut from it, its size is asked, or
it goes into a ``TensorDataset`` that goes into loaders. One use of another kind, and nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import libcst as cst

from oomdoctor.fixes._class_calls import last_name
from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting

__all__ = [
    "Page",
    "Uses",
    "bound",
    "handed_over",
    "is_label",
    "names",
    "pages_of",
    "placed",
    "read",
    "take_off",
    "uses",
]

_SIZES: Final = frozenset({"shape", "size", "dtype", "ndim", "dim", "numel", "nbytes"})
_FACTORIES: Final = frozenset({"tensor", "as_tensor", "zeros", "ones", "arange"})
"""What makes the same values on every device; random numbers are others."""
_SPLITS: Final = frozenset({"random_split", "Subset"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Page:
    """One cell, with the parent of each of its nodes."""

    cell: Cell
    parsed: rewriting.ParsedCell
    parents: dict[cst.CSTNode, cst.CSTNode] = field(repr=False)

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that ``node`` begins on."""
        return self.parsed.lines_of(node)[0]

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what ``node`` stands in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the outermost function or class that ``node`` stands in."""
        found = [one for one in self.above(node) if isinstance(one, cst.FunctionDef | cst.ClassDef)]
        return found[-1] if found else None

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the simple statement that ``node`` stands in, or the node itself in a header."""
        return next((one for one in self.above(node) if isinstance(one, cst.SimpleStatementLine)), node)


def read(cells: Cells) -> tuple[Page, ...]:
    """Return the cells that are Python; a cell that is run again stands for its earlier runs."""
    pages: dict[str, tuple[Cell, rewriting.ParsedCell]] = {}
    for cell in cells.history:
        parsed = rewriting.read(cell.source)
        if not isinstance(parsed, Refused):
            pages.pop(cell.source, None)
            pages[cell.source] = cell, parsed
    return pages_of(pages.values())


def pages_of(cells: Iterable[tuple[Cell, rewriting.ParsedCell]]) -> tuple[Page, ...]:
    """Return cells that were read already."""
    return tuple(Page(cell=cell, parsed=one, parents=dict(_parents(one.module))) for cell, one in cells)


def _parents(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for child in node.children:
        yield child, node
        yield from _parents(child)


def placed(statement: cst.CSTNode) -> Iterator[tuple[str, cst.Call]]:
    """Yield each name that an assignment binds to something put on a device, with the call that puts it there."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    for small in statement.body:
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            target, value = small.targets[0].target, small.value
            pairs: list[tuple[cst.BaseExpression, cst.BaseExpression]] = [(target, value)]
            if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
                pairs = [(a.value, b.value) for a, b in zip(target.elements, value.elements, strict=False)]
            for name, made in pairs:
                if isinstance(name, cst.Name) and isinstance(made, cst.Call) and take_off(made) is not None:
                    yield name.value, made


def take_off(call: cst.Call) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return ``call`` without the device that it puts its result on, and the device; None where it names none."""
    if not isinstance(call.func, cst.Attribute):
        return None
    name = call.func.attr.value
    if name == "cuda" and not call.args:
        return call.func.value, cst.SimpleString('"cuda"')
    if name == "to" and len(call.args) == 1 and call.args[0].keyword is None:
        device = call.args[0].value
        return (call.func.value, device) if _is_device(device) else None
    given = [arg for arg in call.args if arg.keyword is not None and arg.keyword.value == "device"]
    if name in _FACTORIES and len(given) == 1 and _is_device(given[0].value):
        rest = [arg for arg in call.args if arg is not given[0]]
        if rest and given[0] is call.args[-1]:
            rest[-1] = rest[-1].with_changes(comma=given[0].comma)
        return call.with_changes(args=rest), given[0].value
    return None


def _is_device(node: cst.BaseExpression) -> bool:
    """Whether it is the text of a device, or a name that custom gives to one."""
    if isinstance(node, cst.SimpleString):
        return str(node.evaluated_value).startswith(("cuda", "mps", "xpu"))
    return isinstance(node, cst.Name) and "dev" in node.value.lower()


@dataclass(slots=True, kw_only=True)
class Uses:
    """What happens to some names after they were put on a device.

    Attributes:
        cut: subscripts that cut batches, with their page.
        loaders: calls of ``DataLoader``.
        sets: calls of ``TensorDataset`` that are kept, with the expression for the data set.
    """

    cut: list[tuple[Page, cst.Subscript]] = field(default_factory=list)
    loaders: list[tuple[Page, cst.Call]] = field(default_factory=list)
    sets: list[tuple[Page, cst.Call, str]] = field(default_factory=list)

    def add(self, more: Uses) -> None:
        """Add what happens to other names; a loader or a data set that holds both counts once."""
        self.cut += more.cut
        self.loaders += [one for one in more.loaders if one not in self.loaders]
        self.sets += [one for one in more.sets if one not in self.sets]


def uses(
    pages: tuple[Page, ...], name: str, since: tuple[Page, int], found: Uses, *, is_set: bool = False
) -> str | None:
    """Add what happens to ``name`` to ``found``; return what cannot be accounted for, None if all can.

    Args:
        since: page and line of the placing; what comes before is not affected.
        is_set: the name is that of a data set, not of a tensor.
    """
    home, line = since
    started = False
    for page in pages:
        started = started or page is home
        for node in names(page.parsed.module) if started else ():
            if node.value != name or (page is home and page.line(node) <= line) or is_label(page, node):
                continue
            if _is_local(page, node, name):
                continue
            if (why := _use(pages, page, node, since, found, is_set)) is not None:
                return why
    return None


def _use(
    pages: tuple[Page, ...], page: Page, node: cst.Name, since: tuple[Page, int], found: Uses, is_set: bool
) -> str | None:
    parent = page.parents[node]
    where = f"line {page.line(node)} of {page.cell}"
    is_reached = page.function(node) is not None or page is pages[-1]
    if isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value in _SIZES and not is_set:
        return None
    if isinstance(parent, cst.Subscript) and parent.value is node and not is_set:
        if isinstance(page.parents[parent], cst.AssignTarget | cst.AugAssign | cst.Del):
            return f"{where} writes to `{node.value}`"
        if not is_reached:
            return f"{where} takes a part of `{node.value}`, which is on the device already"
        found.cut.append((page, parent))
        return None
    call = page.parents[parent] if isinstance(parent, cst.Arg) else None
    callee = last_name(call) if isinstance(call, cst.Call) else ""
    if callee == "len":
        return None
    if isinstance(call, cst.Call) and callee == "DataLoader" and is_set and call.args[0] is parent:
        return _loaded(pages, page, call, found)
    if isinstance(call, cst.Call) and ((callee == "TensorDataset" and not is_set) or (callee in _SPLITS and is_set)):
        return handed_over(pages, page, call, since, found)
    return f"{where} uses `{node.value}` as a whole"


def handed_over(
    pages: tuple[Page, ...], page: Page, call: cst.Call, since: tuple[Page, int], found: Uses
) -> str | None:
    """Follow the data set that ``call`` makes into its loaders."""
    outer = page.parents[page.parents[call]] if isinstance(page.parents[call], cst.Arg) else None
    makes = last_name(call) == "TensorDataset"
    if isinstance(outer, cst.Call) and last_name(outer) == "DataLoader" and outer.args[0].value is call:
        if makes and (name := bound(page, outer)) is not None:
            found.sets.append((page, call, f"{name}.dataset"))
        return _loaded(pages, page, outer, found)
    assign = page.parents[call]
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1 or page.function(call) is not None:
        return f"line {page.line(call)} of {page.cell} hands the data to something that is not followed"
    target = assign.targets[0].target
    targets = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
    for one in targets:
        if not isinstance(one, cst.Name):
            return f"line {page.line(call)} of {page.cell} keeps a data set under no name of its own"
        if makes:
            found.sets.append((page, call, one.value))
        if (why := uses(pages, one.value, (page, page.line(call)), found, is_set=True)) is not None:
            return why
    return None


def _loaded(pages: tuple[Page, ...], page: Page, call: cst.Call, found: Uses) -> str | None:
    if page.function(call) is not None and page is not pages[-1]:
        return f"line {page.line(call)} of {page.cell} makes loaders in a function, which are there already"
    found.loaders.append((page, call))
    return None


def bound(page: Page, value: cst.CSTNode) -> str | None:
    """Return the name that ``value`` is bound to."""
    assign = page.parents[value]
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    return target.value if isinstance(target, cst.Name) else None


def names(node: cst.CSTNode) -> Iterator[cst.Name]:
    """Yield every name within ``node``."""
    for child in node.children:
        if isinstance(child, cst.Name):
            yield child
        yield from names(child)


def is_label(page: Page, node: cst.Name) -> bool:
    """Whether the name stands for an attribute or the keyword of an argument."""
    parent = page.parents[node]
    return (isinstance(parent, cst.Attribute) and parent.attr is node) or (
        isinstance(parent, cst.Arg) and parent.keyword is node
    )


def _is_local(page: Page, node: cst.Name, name: str) -> bool:
    """Whether ``name`` is a parameter of a function around ``node``."""
    for one in page.above(node):
        if isinstance(one, cst.FunctionDef | cst.Lambda):
            params = one.params
            every = [*params.posonly_params, *params.params, *params.kwonly_params]
            if any(param.name.value == name for param in every):
                return True
    return False
