"""Whether what is made of gathered tensors stays the same, bit for bit, when they were moved to host memory.

Every use of a container is followed: through joins, views, assignments, loops, and results of functions into the cells
that call them. Allowed is what gives the same on every device: joining, comparing, indexing, taking the largest,
turning to NumPy or to numbers, and counting what is true. A sum or a softmax rounds otherwise on the host, and a tensor
that stays on the device cannot be combined with one that was moved, unless it was gathered too: then it has to be moved
along. What is not understood is refused.

Limits: names are followed by their text; the mean of a comparison is exact for up to 2**24 entries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cells
from oomdoctor.program.magics import mask
from oomdoctor.program.names import FirstUse, first_uses

__all__ = ["Gather", "to_move"]

Owner: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | None

_JOINS: Final = frozenset({"cat", "concat", "concatenate", "stack", "vstack", "hstack"})
_VIEWS: Final = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "t",
        "T",
        "mT",
        "contiguous",
        "clone",
    }
    | {
        "detach",
        "long",
        "int",
        "float",
        "double",
        "bool",
        "half",
        "bfloat16",
        "cpu",
        "eq",
        "ne",
        "gt",
        "lt",
        "ge",
        "le",
    }
    | {
        "argmax",
        "argmin",
        "max",
        "min",
        "values",
        "indices",
        "expand",
        "repeat",
        "chunk",
        "split",
        "unbind",
        "abs",
        "neg",
    }
)
_ENDS: Final = frozenset(
    {"numpy", "tolist", "item", "size", "shape", "numel", "dim", "ndim", "dtype", "cuda", "to", "device", "any", "all"}
)
_TRUTHS: Final = frozenset({"sum", "mean", "count_nonzero", "nonzero"})
_LISTS: Final = frozenset({"append", "extend", "clear", "pop", "reverse"})
_HOST_CALLS: Final = frozenset({"len", "print", "str", "repr", "float", "int", "bool", "type", "isinstance"})
_HOST_MODULES: Final = frozenset({"np", "numpy", "plt", "pd", "sns"})
_WALKS: Final = frozenset({"zip", "enumerate", "list", "tuple", "reversed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A statement that puts ``value`` into the container ``name``, in the function or, None, at the top level."""

    cell: int
    line: int
    name: str
    owner: str | None


class _Unsure(Exception):
    """A use that is not known to be the same on the host."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """Statements that share their names: a function, or the top level of a cell."""

    cell: int
    owner: Owner
    nodes: list[ast.AST]
    parents: dict[ast.AST, ast.AST] = field(init=False)

    def __post_init__(self) -> None:
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @property
    def name(self) -> str | None:
        return self.owner.name if self.owner is not None else None


def to_move(cells: Cells, gather: Gather) -> tuple[Gather, ...] | Refused:
    """Return the gathers that have to be moved together, or why that would not keep what is made of them."""
    try:
        search = _Search(cells)
        return search.run(gather)
    except _Unsure as found:
        return Refused(str(found))


class _Search:
    def __init__(self, cells: Cells) -> None:
        self._units: list[_Unit] = []
        self._sources = {cell.number: cell.source for cell in cells.history}
        for cell in cells.history:
            self._read(cell.number, cell.source)
        self._moved: dict[tuple[int, str | None, str], list[Gather]] = {}
        self._seen: set[tuple[int, str]] = set()

    def _read(self, number: int, source: str) -> None:
        try:
            tree = ast.parse(mask(source).text)
        except (SyntaxError, ValueError):
            return
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = {one.name for one in functions}
        # A later definition of a function is the one that is meant.
        self._units = [unit for unit in self._units if unit.name not in names or unit.owner is None]
        self._units.append(_Unit(cell=number, owner=None, nodes=[n for part in tree.body for n in _own(part)]))
        self._units += [
            _Unit(cell=number, owner=one, nodes=[n for part in one.body for n in _own(part)]) for one in functions
        ]

    def run(self, gather: Gather) -> tuple[Gather, ...]:
        unit = next((u for u in self._units if u.cell == gather.cell and u.name == gather.owner), None)
        if unit is None:
            raise _Unsure(f"cell {gather.cell} could not be read")
        self._move(unit, gather.name)
        return tuple(dict.fromkeys(one for group in self._moved.values() for one in group))

    def _move(self, unit: _Unit, name: str) -> None:
        """Decide to move what is put into ``name``, and follow what is made of it."""
        key = (unit.cell, unit.name, name)
        if key in self._moved:
            return
        parameters = {arg.arg for arg in ast.walk(unit.owner.args) if isinstance(arg, ast.arg)} if unit.owner else set()
        if name in parameters or not any(_stored(node) == name for node in unit.nodes):
            raise _Unsure(f"`{name}` is made elsewhere than it is filled")
        self._moved[key] = [
            Gather(cell=unit.cell, line=node.lineno, name=name, owner=unit.name)  # type: ignore[attr-defined]
            for node in unit.nodes
            if _fills(node, name)
        ]
        written = next((node for node in unit.nodes if _fills(node, name) and _is_written(unit, node)), None)
        if written is not None:
            raise _Unsure(f"what is put into `{name}` is written to in place, which a copy would not see")
        if not self._moved[key]:
            raise _Unsure(f"`{name}` stays on the device and is combined with what was gathered")
        self._follow_name(unit, name, is_list=True)

    def _follow_name(self, unit: _Unit, name: str, *, is_list: bool = False, truth: bool = False) -> None:
        if (id(unit), name) in self._seen:
            return
        self._seen.add((id(unit), name))
        for other in self._where(unit, name):
            for node in other.nodes:
                if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                    self._follow(other, node, is_list=is_list, truth=truth)

    def _where(self, unit: _Unit, name: str) -> Iterator[_Unit]:
        """Yield where ``name`` means the same: its function, or the cells that read it before they bind it."""
        yield unit
        inner = [u for u in self._units if u.owner is not None and u is not unit and _mentions(u, name)]
        if unit.owner is not None:
            return
        if any(not any(_stored(node) == name for node in one.nodes) for one in inner):
            raise _Unsure(f"a function reads the global `{name}`")
        for other in self._units:
            apart = other.owner is None and other is not unit
            if apart and first_uses(self._sources[other.cell]).get(name) is FirstUse.READS:
                yield other

    def _follow(self, unit: _Unit, node: ast.expr, *, is_list: bool = False, truth: bool = False) -> None:
        """Follow the value of ``node``; ``truth``: it has zeros and ones alone."""
        above = unit.parents.get(node)
        match above:
            case None | ast.Expr() | ast.FormattedValue() | ast.JoinedStr() | ast.Delete() | ast.Assert():
                return
            case ast.Attribute(attr=name):
                self._follow_member(unit, above, name, is_list=is_list, truth=truth)
            case ast.Subscript() if above.value is node:
                self._follow(unit, above, truth=truth)
            case ast.Slice() | ast.Index() | ast.Starred():
                self._follow(unit, above, is_list=is_list, truth=truth)  # type: ignore[arg-type]
            case ast.keyword():
                raise self._unsure(unit, above.value)
            case ast.Call():
                self._follow_call(unit, above, node, is_list=is_list, truth=truth)
            case ast.Compare():
                for other in (above.left, *above.comparators):
                    self._beside(unit, other, node)
                self._follow(unit, above, truth=True)
            case ast.BinOp() | ast.BoolOp():
                for other in [above.left, above.right] if isinstance(above, ast.BinOp) else above.values:
                    self._beside(unit, other, node)
                plain = isinstance(above, ast.BoolOp) or isinstance(
                    above.op, ast.Add | ast.Sub | ast.Mult | ast.BitAnd | ast.BitOr | ast.BitXor
                )
                if not plain:
                    raise self._unsure(unit, above)
                self._follow(unit, above, truth=truth and not isinstance(getattr(above, "op", None), ast.Add | ast.Sub))
            case ast.UnaryOp():
                self._follow(unit, above, truth=truth)
            case ast.Assign(targets=targets):
                for target in targets:
                    self._bind(unit, target, above, truth=truth)
            case ast.AugAssign(target=ast.Name(id=name)) if _fills(above, name):
                return
            case ast.For(target=target) if above.iter is node:
                self._bind(unit, target, above, truth=truth)
            case ast.comprehension(target=target) if above.iter is node:
                self._bind(unit, target, above, truth=truth)
                self._follow(unit, unit.parents[above], truth=truth)  # type: ignore[arg-type]
            case ast.ListComp() | ast.GeneratorExp() | ast.List() | ast.Tuple():
                self._follow(unit, above, is_list=True, truth=truth)
            case ast.Return() if unit.owner is not None:
                self._follow_result(unit.owner.name)
            case ast.If() | ast.While():
                return
            case _:
                raise self._unsure(unit, above)

    def _follow_member(self, unit: _Unit, above: ast.Attribute, name: str, *, is_list: bool, truth: bool) -> None:
        call = unit.parents.get(above)
        called = isinstance(call, ast.Call) and call.func is above
        if name in _LISTS and called:
            return
        value: ast.expr = call if called and isinstance(call, ast.Call) else above
        if name in _ENDS or (is_list and name in {"index", "count"}):
            return
        if name in _TRUTHS and truth:
            return
        if name not in _VIEWS:
            raise self._unsure(unit, value)
        if called and isinstance(call, ast.Call):
            for argument in call.args:
                self._beside(unit, argument, above.value)
        self._follow(unit, value, truth=truth or name in {"eq", "ne", "gt", "lt", "ge", "le", "bool"})

    def _follow_call(self, unit: _Unit, call: ast.Call, node: ast.expr, *, is_list: bool, truth: bool) -> None:
        head, _, name = ast.unparse(call.func).rpartition(".")
        others = [one for one in call.args if one is not node]
        if name in _HOST_CALLS and not head:
            return
        if head.partition(".")[0] in _HOST_MODULES:
            return
        if head == "torch" and (
            name in _JOINS or name in {"argmax", "argmin", "max", "min", "eq", "squeeze", "flatten"}
        ):
            if any(keyword.arg not in {"dim", "axis", "keepdim"} for keyword in call.keywords):
                raise self._unsure(unit, call)
            for other in others:
                self._beside(unit, other, node)
            self._follow(unit, call, truth=truth or name == "eq")
        elif head == "torch" and name == "equal":
            for other in others:
                self._beside(unit, other, node)
        elif not head and name in _WALKS:
            self._follow(unit, call, is_list=True, truth=truth)
        elif not head and name == "sum" and truth:
            return
        elif name in {"append", "extend"} and isinstance(call.func, ast.Attribute):
            root = ast.unparse(call.func.value)
            if not root.isidentifier():
                raise self._unsure(unit, call)
            self._follow_name(unit, root, is_list=True, truth=truth)
        else:
            raise self._unsure(unit, call)

    def _follow_result(self, function: str) -> None:
        for unit in self._units:
            for node in unit.nodes:
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function:
                    self._follow(unit, node)

    def _bind(self, unit: _Unit, target: ast.AST, above: ast.AST, *, truth: bool) -> None:
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        if not names:
            raise self._unsure(unit, above)
        for name in names:
            self._follow_name(unit, name, is_list=True, truth=truth)

    def _beside(self, unit: _Unit, other: ast.expr, node: ast.expr) -> None:
        """Have what stands beside a moved tensor be a number, or be moved along."""
        if other is node:
            return
        names = {part.id for part in ast.walk(other) if isinstance(part, ast.Name)} - {"torch", "len", "np"}
        for name in names:
            if (id(unit), name) in self._seen or self._is_number(unit, name):
                continue
            self._move(unit, self._container(unit, name))

    def _is_number(self, unit: _Unit, name: str) -> bool:
        values = [n.value for n in unit.nodes if isinstance(n, ast.Assign) and _stored(n) == name]
        return bool(values) and all(isinstance(value, ast.Constant) for value in values)

    def _container(self, unit: _Unit, name: str) -> str:
        """Return the container that ``name`` is joined from, else ``name``."""
        for node in unit.nodes:
            match node:
                case ast.Assign(value=ast.Call(func=called, args=[first, *_])) if _stored(node) == name:
                    if ast.unparse(called).rpartition(".")[2] in _JOINS:
                        return ast.unparse(first)
        return name

    def _unsure(self, unit: _Unit, node: ast.AST) -> _Unsure:
        text = " ".join(ast.unparse(node).split())
        text = text if len(text) <= 60 else f"{text[:57]}..."
        return _Unsure(f"`{text}` in cell {unit.cell} may not give the same with tensors in host memory")


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and what is within it, lambdas included, functions defined there left out."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _own(child)


def _mentions(unit: _Unit, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in unit.nodes)


def _stored(node: ast.AST) -> str | None:
    """Return the one name that an assignment binds; of ``a, b = [], []`` none is told."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _is_written(unit: _Unit, fill: ast.AST) -> bool:
    """Whether a name that ``fill`` puts into a container is written to in place anywhere in the unit."""
    values = fill.value.args if isinstance(fill, ast.Expr) and isinstance(fill.value, ast.Call) else []
    names = {value.id for value in values if isinstance(value, ast.Name)}
    for node in unit.nodes:
        target: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            target = node.func.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node.value
        if isinstance(target, ast.Name) and target.id in names:
            return True
    return False


def _fills(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is a statement that puts something into ``name``."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr="append" | "extend"))):
            return found == name
        case ast.AugAssign(target=ast.Name(id=found), op=ast.Add(), value=ast.List()):
            return found == name
        case ast.Assign(targets=[ast.Name(id=found)], value=ast.ListComp()):
            return found == name
    return False
