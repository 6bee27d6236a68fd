"""Whether the graph behind a loss is used again after a ``backward`` that retains it.

The names that the loss is made from are followed backwards within one step: the body of the innermost loop around the
call, else of its function or cell. The graph is not used again if all of them that carry one are made anew in each
step, nothing differentiates later in the step, and none of them leaves it. Should a use stay unseen, torch raises
(``Trying to backward through the graph a second time``), and results do not silently change.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from oomdoctor.model.session import Cells
from oomdoctor.program.dataflow import ancestors, bound, exposed, reads
from oomdoctor.program.magics import mask

__all__ = ["Graphs"]

Unit: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef

_TAKES: Final = frozenset(
    {"backward", "manual_backward", "grad", "vjp", "jvp", "jacobian", "hessian", "jacrev", "jacfwd", "minimize", "fit"}
)
_MODEL: Final = re.compile(r"^(self\.)?(\w*model|\w*net|\w*encoder|\w*decoder|generator|discriminator|vae|net[A-Z])$")
_CUTS: Final = frozenset({"item", "detach", "numpy", "tolist", "argmax", "size", "backward"})
_NUMBERS: Final = frozenset({"float", "int", "len"})
"""Functions whose results have no graph; the method ``float`` of a tensor keeps it."""
_LEAVES: Final = re.compile(r"requires_grad|\bParameter\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A call of ``backward`` with what it stands in, the outermost first."""

    call: ast.Call
    path: tuple[ast.AST, ...]

    @property
    def unit(self) -> Unit:
        return next(one for one in reversed(self.path) if isinstance(one, Unit))

    @property
    def step(self) -> ast.For | ast.While | Unit:
        """The innermost loop or function around the call, whichever is nearer."""
        return next(one for one in reversed(self.path) if isinstance(one, ast.For | ast.While | Unit))


class Graphs:
    """The cells, with what their names are bound to.

    Args:
        cells: the cells that were run.
        known: names of models, losses and optimizers: they carry no graph themselves.
        models: those of them that make one when they are called.
    """

    def __init__(self, cells: Cells, known: Iterable[str], models: Iterable[str]) -> None:
        self._known = frozenset(known) | frozenset(dir(builtins))
        self._models = frozenset(models)
        self._trees = {cell.number: tree for cell in cells.history if (tree := _parsed(cell.source)) is not None}
        nodes = [node for tree in self._trees.values() for node in ast.walk(tree)]
        self._functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._bindings: dict[str, list[ast.expr]] = {}
        for node in nodes:
            for names, value in _bindings(node):
                for name in names:
                    self._bindings.setdefault(name, []).append(value)

    def retained(self, number: int) -> Iterator[ast.Call]:
        """Yield the calls of ``backward`` in a cell that retain the graph for no other reason than to retain it."""
        for node in ast.walk(self._trees.get(number) or ast.Module(body=[], type_ignores=[])):
            if isinstance(node, ast.Call) and _last(node) == "backward":
                keywords = {one.arg: one.value for one in node.keywords}
                value = keywords.get("retain_graph")
                if isinstance(value, ast.Constant) and value.value is True:
                    yield node

    def why_used(self, number: int, call: ast.Call) -> str:
        """Return why the graph may be used again, empty if it is not."""
        if any(one.arg == "create_graph" and not _is_false(one.value) for one in call.keywords):
            return "the gradients are differentiated themselves (create_graph)"
        site = _Site(call=call, path=ancestors(self._trees[number], call))
        later = list(_later(site.path, site.step))
        if any(self._takes(node) for node in later):
            return "another gradient is taken after it in the same step"
        body: Sequence[ast.stmt] = site.step.body
        at = next((i for i, node in enumerate(body) if call in ast.walk(node)), len(body) - 1)
        needed = _needed(body[: at + 1], call)
        made = {name for node in body[: at + 1] for name in bound(node)} | _targets(site.step)
        again = needed & (exposed(body) - _targets(site.step))
        for name in sorted(needed):
            if name in made and name not in again:
                continue
            if name in made or self._carries_name(name, site.unit):
                return f"`{name}` comes from outside of the step, with a graph that may be used again"
        return self._why_left(site, needed & made, later)

    def _why_left(self, site: _Site, names: set[str], later: list[ast.stmt]) -> str:
        """Return which of ``names`` leaves the step with its graph and may be differentiated there."""
        names = {name for name in names if any(self._carries(v, site.unit) for v in self._bindings.get(name, ()))}
        for node in (part for stmt in site.step.body for part in ast.walk(stmt)):
            if isinstance(node, ast.Return) and node.value is not None and _uncut(node.value) & names:
                return f"`{ast.unparse(node)}` gives the graph to a caller"
            kept_on = isinstance(node, ast.Assign) and any(isinstance(one, ast.Attribute) for one in node.targets)
            value = node.value if kept_on and isinstance(node, ast.Assign) else None
            if value is not None and (_uncut(value) & names or self._carries(value, site.unit)):
                return f"`{ast.unparse(node)}` keeps the graph beyond the step"
        kept = {root for node in site.step.body for root, value in _fillings(node) if _uncut(value) & names}
        beyond = [*later, *_later(site.path, site.unit)]
        for node in beyond:
            if self._takes(node) and reads(node) & (names | kept):
                return "a gradient is taken after the loop of what the loop made"
        others = [tree for tree in self._trees.values() if isinstance(site.unit, ast.Module) and tree is not site.unit]
        for tree in others:
            live = exposed(tree.body) & (names | kept)
            if any(self._takes(node) and reads(node) & live for node in tree.body):
                return "another cell takes a gradient of it"
        return ""

    def _takes(self, node: ast.AST, depth: int = 3) -> bool:
        """Whether a gradient is taken by ``node`` or by a function of the cells that it calls."""
        names = {_last(part) for part in ast.walk(node) if isinstance(part, ast.Call)}
        if names & _TAKES:
            return True
        inner = [self._functions[name] for name in names if name in self._functions]
        return depth > 0 and any(self._takes(one, depth - 1) for one in inner)

    def _carries_name(self, name: str, unit: Unit, seen: frozenset[tuple[str, bool]] = frozenset()) -> bool:
        is_parameter = not isinstance(unit, ast.Module) and name in _parameters(unit)
        key = (name, is_parameter)
        if name in self._known or key in seen:
            return False
        if is_parameter and not isinstance(unit, ast.Module):
            return self._carries_argument(name, unit, seen | {key})
        return any(self._carries(value, unit, seen | {key}) for value in self._bindings.get(name, ()))

    def _carries_argument(
        self, name: str, unit: ast.FunctionDef | ast.AsyncFunctionDef, seen: frozenset[tuple[str, bool]]
    ) -> bool:
        """Whether a caller may pass something with a graph for the parameter ``name``."""
        uses = [node for node in ast.walk(unit) if isinstance(node, ast.Name) and node.id == name]
        called = [node.func for node in ast.walk(unit) if isinstance(node, ast.Call)]
        if all(any(use is one or use in ast.walk(one) for one in called) for use in uses):
            return False  # a model or a loss: it is called, or a method of it is
        at = _parameters(unit).index(name)
        for call in [one for one in self._calls if _last(one) == unit.name]:
            given = [one.value for one in call.keywords if one.arg == name] or call.args[at : at + 1]
            top = ast.Module(body=[], type_ignores=[])
            if any(self._carries(value, top, seen) for value in given):
                return True
        return False

    def _carries(self, value: ast.expr, unit: Unit, seen: frozenset[tuple[str, bool]] = frozenset()) -> bool:
        """Whether ``value`` may have a graph behind it."""
        if isinstance(value, ast.Call):
            text, last = ast.unparse(value.func), _last(value)
            if _cuts(value):
                return False
            if text in self._models or _MODEL.match(text) or text.partition(".")[0] in self._models:
                return True
            if last in self._functions:
                return self._makes(self._functions[last])
        if isinstance(value, ast.Call | ast.BinOp):
            leaves = (v for name in reads(value) for v in self._bindings.get(name, ()))
            if not isinstance(value, ast.Call) and any(_LEAVES.search(ast.unparse(leaf)) for leaf in leaves):
                return True
        return any(self._carries_name(name, unit, seen) for name in _uncut(value)) or any(
            self._carries(part, unit, seen) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)
        )

    def _makes(self, function: ast.FunctionDef) -> bool:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        texts = [ast.unparse(call.func) for call in calls]
        return any(text in self._models or _MODEL.match(text) for text in texts)


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(mask(source).text)
    except (SyntaxError, ValueError):
        return None


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _needed(body: Sequence[ast.stmt], call: ast.Call) -> set[str]:
    """Return the names that the loss is made from, by the statements that lead to it."""
    needed = reads(call)
    for node in reversed(body):
        for part in [one for one in ast.walk(node) if isinstance(one, ast.stmt)][::-1]:
            plain = isinstance(part, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For | ast.With)
            filled = {root for root, _ in _fillings(part)} if isinstance(part, ast.Expr) else set()
            if (plain and bound(part) & needed) or filled & needed:
                needed |= reads(part)
    return needed


def _later(path: tuple[ast.AST, ...], step: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of ``step`` that come after the last of ``path``."""
    inside = path[path.index(step) :]
    for outer, inner in pairwise(inside):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(outer, name, None)
            if isinstance(block, list) and inner in block:
                yield from block[block.index(inner) + 1 :]


def _targets(step: ast.AST) -> set[str]:
    return bound(step.target) if isinstance(step, ast.For) else set()


def _parameters(unit: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [arg.arg for arg in (*unit.args.posonlyargs, *unit.args.args, *unit.args.kwonlyargs)]
    return names[1:] if names[:1] == ["self"] else names


def _uncut(value: ast.AST) -> set[str]:
    """Return the names that ``value`` reads and does not turn into numbers or detach."""
    if isinstance(value, ast.Call) and _cuts(value):
        return set()
    if isinstance(value, ast.Name):
        return {value.id}
    return {name for part in ast.iter_child_nodes(value) for name in _uncut(part)}


def _cuts(call: ast.Call) -> bool:
    return _last(call) in (_NUMBERS if isinstance(call.func, ast.Name) else _CUTS)


def _fillings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of containers and sums that ``node`` adds to, with what goes there."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" | "add"), args=[value]):
                yield name, value
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                yield name, value


def _bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield {name for target in targets for name in bound(target)}, value
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield bound(target), value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield bound(target), value
