"""The dataflow of statements: which names they read and bind, and which of them carry a value with its autograd graph.

A graph is followed through statements in the order in which they run, with the set of names that carry such a value. A
name that is surely bound to something else carries nothing any more. What may not happen lets go of nothing: branches,
loops that may run no time, what a jump or an error leaves out, and blocks of a ``with`` that may swallow an error. What
a call does to a graph is told by the vocabulary. Within one statement the order does not count. What assignments and
calls bind and fill is told as pairs: each target, with the expression that goes there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from oomdoctor.program import torch_functions
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import call_name, names_in, own_nodes, parameters_of, root_of, target_names, uses

_TRIES: Final = (ast.Try, ast.TryStar)


def loop_at(tree: ast.AST, line: int) -> Loop | None:
    """Return the loop that begins on ``line``."""
    return next((node for node in ast.walk(tree) if isinstance(node, Loop) and node.lineno == line), None)


def reads(node: ast.AST) -> set[str]:
    """Return the names that ``node`` reads anywhere within; ``x += 1`` and ``x[0] = 1`` read ``x``."""
    sums = {
        part.target.id
        for part in ast.walk(node)
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)
    }
    return sums | {name.id for name in uses(node) if isinstance(name.ctx, ast.Load)}


def bound(node: ast.AST) -> set[str]:
    """Return the names that ``node`` binds, a name whose items are set included."""
    items = (part for part in ast.walk(node) if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store))
    filled = {part.value.id for part in items if isinstance(part.value, ast.Name)}
    return filled | {name.id for name in uses(node) if not isinstance(name.ctx, ast.Load)}


def ancestors(tree: ast.AST, wanted: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes from ``tree`` down to ``wanted``, both included; empty if it is not there."""
    if tree is wanted:
        return (tree,)
    for child in ast.iter_child_nodes(tree):
        if path := ancestors(child, wanted):
            return (tree, *path)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How values with a graph go from what makes them into names.

    Attributes:
        makes: whether a call gives such a value, whatever it is given.
        stops: whether a call gives none, whatever it is given.
        drops: attributes that have none.
        of_graphs: a graph is followed, which code under ``no_grad`` does not make; else the values themselves.
        adds: returns names that carry it from a statement on, whatever they are bound to there.
    """

    makes: Callable[[ast.Call], bool] = lambda _: False
    stops: Callable[[ast.Call], bool] = torch_functions.cuts_graph
    drops: Collection[str] = torch_functions.PLAIN_ATTRIBUTES
    of_graphs: bool = True
    adds: Callable[[ast.AST], set[str]] = lambda _: set()

    def carries(self, value: ast.expr, names: set[str], *, gradless: bool = False) -> bool:
        """Whether ``value`` has a graph if ``names`` have one; ``gradless``: no new graph is made there."""

        def within(*parts: ast.AST) -> bool:
            return any(isinstance(part, ast.expr) and self.carries(part, names, gradless=gradless) for part in parts)

        match value:
            case ast.Name(id=name):
                return name in names
            case ast.Constant() | ast.JoinedStr() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return False
            case ast.Attribute(attr="grad") if self.of_graphs:
                return False
            case ast.Attribute(value=base, attr=attr):
                return (
                    attr not in self.drops
                    and not (attr == "indices" and torch_functions.has_index(base))
                    and within(base)
                )
            case ast.Subscript(value=base, slice=ast.Constant(value=1)) if torch_functions.has_index(base):
                return False
            case ast.Subscript(value=base):
                return within(base)
            case ast.Lambda():
                return bool((names_in(value.body) - parameters_of(value)) & names)
            case ast.IfExp():
                return within(value.body, value.orelse)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in value.generators:
                    names = names.union(*(found for found, given in bindings(part) if within(given)))
                return within(*([value.key, value.value] if isinstance(value, ast.DictComp) else [value.elt]))
            case ast.Call():
                if gradless or self.stops(value):
                    return False
                if self.makes(value):
                    return True
                return within(value.func, *value.args, *(keyword.value for keyword in value.keywords))
            case ast.BinOp() if gradless:
                return False
        return within(*ast.iter_child_nodes(value))

    def spread(self, body: Iterable[ast.AST], names: Collection[str], *, gradless: bool = False) -> set[str]:
        """Return ``names``, and those that ``body`` binds or fills from them, in any order."""
        pairs, found = [pair for node in own_nodes(body) for pair in bindings(node)], set(names)
        while more := {
            name
            for to, value in pairs
            if self.carries(value, found, gradless=gradless)
            for name in to
            if name and name not in found
        }:
            found |= more
        return found

    def through(self, body: Iterable[ast.stmt], names: Iterable[str] = ()) -> Way:
        """Return the way through ``body``, on which ``names`` carry a graph at the beginning."""
        way = Way(self, set(names))
        way.go(body)
        return way


class Way:
    """One way through statements: the names that carry a graph behind it (``now``), and anywhere (``ever``)."""

    def __init__(self, flow: Flow, names: set[str]) -> None:
        self.flow, self._gradless, self._jumped = flow, False, set[str]()
        self.now, self.ever = set(names), set(names)
        self._met: dict[int, tuple[ast.AST, set[str], bool]] = {}

    @property
    def met(self) -> Iterator[tuple[ast.AST, set[str]]]:
        """The statements and the heads of blocks, and the names that carry it there."""
        yield from ((node, names) for node, names, _ in self._met.values())

    def carries(self, statement: ast.AST, value: ast.expr) -> bool:
        """Whether ``value``, within a statement or a head that was met, has a graph there."""
        _, names, gradless = self._met.get(id(statement), (statement, set[str](), False))
        return self.flow.carries(value, names, gradless=gradless)

    def go(self, body: Iterable[ast.stmt]) -> None:
        """Go on through ``body``; a jump in it may lead to any place behind it."""
        for node in body:
            self.now = self._statement(node, self.now) | self._jumped

    def _block(self, body: Iterable[ast.stmt], names: set[str]) -> set[str]:
        for node in body:
            names = self._statement(node, names)
        return names

    def _has(self, value: ast.expr, names: set[str]) -> bool:
        return self.flow.carries(value, names, gradless=self._gradless)

    def _meet(self, node: ast.AST, names: set[str]) -> set[str]:
        found = self.flow.spread([node], names | self.flow.adds(node), gradless=self._gradless)
        before = self._met.get(id(node), (node, set(), False))[1]
        self._met[id(node)] = node, before | found, self._gradless
        self.ever |= found
        return found

    def _statement(self, node: ast.stmt, names: set[str]) -> set[str]:
        if isinstance(node, Loop):
            return self._loop(node, names)
        if isinstance(node, ast.If):
            names = self._meet(node.test, names)
            return self._block(node.body, names) | self._block(node.orelse, names)
        if isinstance(node, ast.With | ast.AsyncWith):
            return self._with(node, names)
        if isinstance(node, _TRIES):
            return self._try(node, names)
        found = self._meet(node, names)
        if isinstance(node, ast.Break | ast.Continue):
            self._jumped |= found
        if isinstance(node, ast.Delete):
            return found - set(target_names(*node.targets))
        return found - self._bound_otherwise(assigned(node), found)

    def _bound_otherwise(self, pairs: Iterable[tuple[ast.expr, ast.expr]], names: set[str]) -> set[str]:
        by_value = [(set(target_names(target)), self._has(value, names)) for target, value in pairs]
        bound = {name for found, has in by_value if not has for name in found}
        return bound - {name for found, has in by_value if has for name in found}

    def _loop(self, node: Loop, names: set[str]) -> set[str]:
        outside, self._jumped = self._jumped, set()
        head = set(names)
        entered: set[str] | None = None
        while head != entered:
            entered = head
            head = self._meet(node.test if isinstance(node, ast.While) else node.iter, head)
            inside = head
            if not isinstance(node, ast.While):
                got = {name for to, value in bindings(node) if self._has(value, head) for name in to}
                inside = (head - set(target_names(node.target))) | got
            head = head | self._block(node.body, inside) | self._jumped
        after = head | self._block(node.orelse, head)
        self._jumped = outside
        return after

    def _with(self, node: ast.With | ast.AsyncWith, names: set[str]) -> set[str]:
        outside = self._gradless
        for item in node.items:
            names = self._meet(item.context_expr, names)
            if item.optional_vars is not None and self._has(item.context_expr, names):
                names = names | set(names_set(item.optional_vars))
            called = call_name(item.context_expr).rpartition(".")[2]
            off = (self._gradless or called in torch_functions.GRADLESS) and called not in torch_functions.GRADFUL
            self._gradless = off and self.flow.of_graphs
        after = self._block(node.body, names)
        self._gradless = outside
        heads = {call_name(item.context_expr).rpartition(".")[2] for item in node.items}
        return after if heads <= torch_functions.LETS_ERRORS_THROUGH else after | self.ever

    def _try(self, node: ast.Try | ast.TryStar, names: set[str]) -> set[str]:
        after = self._block(node.orelse, self._block(node.body, names))
        for handler in node.handlers:
            after = after | self._block(handler.body, names | self.ever)
        self._block(node.finalbody, after | self.ever)
        return self._block(node.finalbody, after)


_NOTHING: Final = ast.Constant(None)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment, each with what it is bound to, taken apart as far as they can be."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _taken_apart(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value


def _taken_apart(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    if not parts or any(isinstance(one, ast.Starred) for one in (*parts, *values)):
        yield target, value
    elif len(parts) == len(values):
        for part, one in zip(parts, values, strict=True):
            yield from _taken_apart(part, one)
    elif len(parts) == 2 and torch_functions.has_index(value):
        yield parts[0], value
        yield parts[1], _NOTHING
    else:
        yield target, value


def _iterated(target: ast.expr, iterated: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match target, iterated:
        case ast.Tuple(elts=[first, second]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            yield first, _NOTHING
            yield from _iterated(second, inner)
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=given) if len(parts) == len(given):
            for part, inner in zip(parts, given, strict=True):
                yield from _iterated(part, inner)
        case _:
            yield target, iterated


def bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield the names that a node binds or fills, with what goes there."""
    match node:
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            for target, value in assigned(node):
                yield set(names_set(target)), value
        case ast.AugAssign(target=target, value=value):
            yield set(names_set(target)), value
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            target, value = node.target, node.iter
            yield from ((set(target_names(part)), given) for part, given in _iterated(target, value))
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield set(target_names(target)), value
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for name in names_in(ast.Module(body=node.body, type_ignores=[])) - parameters_of(node):
                yield {node.name}, ast.Name(name, ast.Load())
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if (
            method in torch_functions.FILLS or torch_functions.is_in_place(method)
        ):
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield {root_of(base)}, value


def names_set(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment to ``target`` binds or fills."""
    yield from target_names(target)
    for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
        if isinstance(part, ast.Subscript | ast.Attribute):
            yield root_of(part)


def stored_in(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes and items that a node sets and the containers that it fills, with what goes there."""
    match node:
        case ast.Call(func=ast.Attribute(value=base, attr=method)) if method in torch_functions.FILLS:
            yield from ((base, value) for value in (*node.args, *(keyword.value for keyword in node.keywords)))
        case ast.AugAssign(target=ast.Subscript() | ast.Attribute() as written, value=value):
            yield written, value
        case _:
            for target, value in assigned(node):
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                yield from ((part, value) for part in parts if isinstance(part, ast.Subscript | ast.Attribute))
