"""Code that runs a model with gradients on, and of which nothing is ever differentiated; and what it leaves behind.

A loop or a statement counts only if the cells show that it takes no gradient itself, and that nothing which leaves it
(a name, a result, something it fills) reaches a ``backward`` or its like. The search goes from the failing line
outwards in, so that an evaluation within an epoch is found beside the training. It goes into a function that gives
nothing with a graph to whoever calls it; another one may be called with gradients wanted by cells that are not written
yet, and it is its call that counts. What is not understood counts as differentiated.

The cells that were run cannot tell what a later one trains on. So each name that stays bound, each container of before
that is filled, and each result that a function gives is named, and the models that made them: one in evaluation mode
is hardly kept to be trained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.dataflow import Flow, Way
from oomdoctor.program.definitions import Program, Scope, short, with_gradients
from oomdoctor.program.differentiation import Differentiation, outer_names
from oomdoctor.program.names import blocks_of, call_name, own_nodes, root_of, stored, stored_in
from oomdoctor.program.training_loops import called_like_a_model

__all__ = ["ModelCalls", "Place", "outliving", "runs_model", "undifferentiated"]

_HOOKS: Final = re.compile(r"register_(?:module_)?forward_(?:pre_)?hook")
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_SPLIT: Final = (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Try)
_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Place = tuple[int, int, str]


class ModelCalls:
    """Which calls run a model.

    Args:
        program: the cells.
        kinds: ``model``, ``loss`` and so on for each path of the namespace that leads to one.
        by_parts: any method and any part of a model counts as the model.
    """

    def __init__(self, program: Program, kinds: Mapping[str, str], *, by_parts: bool = False) -> None:
        self._program, self._kinds = program, kinds
        self._paths = [path for path, kind in kinds.items() if kind == "model" and by_parts]

    def path(self, scope: Scope, call: ast.Call) -> str | None:
        """Return the path of the model that a call runs, as it is written where it leads to none; None without one."""
        text = ast.unparse(call.func)
        stands_for = self._program.given(scope)
        first, _, rest = text.partition(".")
        path = stands_for.get(text, f"{stands_for.get(first, first)}.{rest}" if rest else text)
        kind = self._kinds.get(path.removesuffix(".forward"))
        if kind is not None:
            return path.removesuffix(".forward") if kind == "model" else None
        within = next((one for one in self._paths if path.startswith(f"{one}.")), None)
        return within or (text if called_like_a_model(text) else None)

    def below(
        self, scope: Scope, body: Iterable[ast.AST], depth: int = 3, *, gradless: bool = False
    ) -> Iterator[tuple[Scope, str | None]]:
        """Yield the models that ``body`` runs, and the functions that it calls with None, and what these run.

        ``gradless``: also what it runs with gradients off.
        """
        for node in own_nodes(body) if gradless else with_gradients(body):
            if not isinstance(node, ast.Call):
                continue
            if (path := self.path(scope, node)) is not None:
                yield scope, path
            elif depth and (called := self._program.function(words.last_name(node))) is not None:
                yield called, None
                if gradless or not called.disables_grad:
                    yield from self.below(called, called.body, depth - 1, gradless=gradless)


def runs_model(program: Program, kinds: Mapping[str, str]) -> bool:
    """Tell whether the failing cell calls a model, or a function that it calls, or hands on to be called."""
    models = ModelCalls(program, kinds, by_parts=True)
    named = [
        function
        for scope in program.running
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Name) and (function := program.function(node.id)) is not None
    ]
    met = (path for scope in (*program.running, *named) for _, path in models.below(scope, scope.body, gradless=True))
    return any(path is not None for path in met)


def undifferentiated(program: Program, kinds: Mapping[str, str], line: int | None = None) -> tuple[Place, ...]:
    """Return ``(cell, line, source text)`` of each, of a loop its head.

    Args:
        program: the cells.
        kinds: ``model``, ``loss`` and so on for each path of the namespace that leads to one.
        line: of the failing cell, the one that was running; code of the same scope that lies before it is left out.
    """
    search = _Search(program, kinds, line)
    tops = [scope for scope in program.scopes if scope.cell == program.failing and scope.function is None]
    return tuple(dict.fromkeys(place for scope in tops for place in search.of_scope(scope)))


class _Search:
    """One search through what the failing cell runs."""

    def __init__(self, program: Program, kinds: Mapping[str, str], line: int | None) -> None:
        self._program, self._line = program, line
        self._models, self._gradients = ModelCalls(program, kinds), Differentiation(program)
        self._seen: set[int] = set()

    def of_scope(self, scope: Scope) -> Iterator[Place]:
        """Yield the places of a scope and of the functions that it calls."""
        if id(scope) in self._seen or scope.disables_grad or self._is_of_module(scope):
            return
        self._seen.add(id(scope))
        if not (self._gradients.trains and self._keeps_state()):
            yield from self._of_block(scope, scope.body, ())

    def _of_block(self, scope: Scope, block: Sequence[ast.stmt], after: tuple[ast.stmt, ...]) -> Iterator[Place]:
        """Yield the places of ``block``; ``after`` is what runs when it has run, enclosing loops included."""
        for at, node in enumerate(block):
            if isinstance(node, _DEFINITIONS) or self._is_before(scope, node):
                continue
            met = list(self._models.below(scope, [node]))
            if all(path is None for _, path in met) or (self._gradients.trains and self._is_for_effect(scope, node)):
                continue
            rest = (*block[at + 1 :], *after)
            if self._gradients.within([node]) or self._gradients.escapes(scope, node, rest) or _suspends(node):
                yield from self._inside(scope, node, rest)
            elif isinstance(node, _SPLIT) or any(where is scope and path for where, path in met):
                yield _place(scope, node)
            else:
                called = self._called([node])
                inner = [place for one in called for place in self.of_scope(one)]
                apart = inner and all(map(self._gradients.keeps_to_itself, called))
                yield from inner if apart else [_place(scope, node)]

    def _inside(self, scope: Scope, node: ast.stmt, rest: tuple[ast.stmt, ...]) -> Iterator[Place]:
        if isinstance(node, _SPLIT):
            after = (node, *rest) if isinstance(node, _LOOPS) else rest
            if isinstance(node, ast.Try):
                follows = ast.Try(
                    body=[ast.Pass()], handlers=node.handlers, orelse=node.orelse, finalbody=node.finalbody
                )
                after = (follows, *rest)
            for block in blocks_of(node):
                yield from self._of_block(scope, block, after)
        for called in self._called(part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)):
            yield from self.of_scope(called)

    def _is_for_effect(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether a model is run and its result dropped: what it is run for is not seen."""
        call = node.value if isinstance(node, ast.Expr) else None
        return isinstance(call, ast.Call) and self._models.path(scope, call) is not None

    def _called(self, body: Iterable[ast.AST]) -> list[Scope]:
        """Return the functions of the cells that ``body`` calls by name with gradients on."""
        names = [words.last_name(node) for node in with_gradients(body) if isinstance(node, ast.Call)]
        return [scope for name in names if (scope := self._program.function(name)) is not None]

    def _is_before(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether ``node`` was over when the failing line, which stands in the same scope, was run."""
        if self._line is None or scope.cell != self._program.failing:
            return False
        function = scope.function.node if scope.function is not None else None
        defined = [s.function.node for s in self._program.scopes if s.function and s.cell == scope.cell]
        around = [one for one in defined if one.lineno <= self._line <= (one.end_lineno or one.lineno)]
        here = function in around if function is not None else not around
        return here and (node.end_lineno or node.lineno) < self._line

    def _is_of_module(self, scope: Scope) -> bool:
        """Whether it is a method of a class that has a ``forward``: others call it, with gradients wanted or not."""
        return bool(scope.owner) and any(one.owner == scope.owner for one in self._gradients.forwards)

    def _keeps_state(self) -> bool:
        """Whether a forward leaves something behind that other code reads: its graph may be part of a later loss."""
        nodes = [node for scope in self._program.scopes for node in own_nodes(scope.body)]
        if any(isinstance(node, ast.Call) and _HOOKS.search(ast.unparse(node.func)) for node in nodes):
            return True
        loaded = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        methods = [one for one in self._program.scopes if self._is_of_module(one)]
        stored = {
            node.attr
            for one in methods
            if one.function is not None and one.function.node.name != "__init__"
            for node in own_nodes(one.body)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and call_name(node.value) == "self"
        }
        return bool(stored & loaded)


def _suspends(node: ast.stmt) -> bool:
    """Whether it hands over to other code in between, which would run without gradients too."""
    return any(isinstance(part, ast.Yield | ast.YieldFrom | ast.Await | ast.AsyncFor) for part in ast.walk(node))


def _place(scope: Scope, node: ast.stmt) -> Place:
    return scope.cell, node.lineno, short(ast.unparse(node).split("\n", 1)[0])


def outliving(
    program: Program, kinds: Mapping[str, str], places: Iterable[Place]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what keeps a graph when the failing cell has ended, as source text, and the models that are run.

    Args:
        program: the cells.
        kinds: ``model``, ``loss`` and so on for each path of the namespace that leads to one.
        places: ``(cell, line, source text)`` of the code that is never differentiated.
    """
    leavings = _Leavings(program, ModelCalls(program, kinds, by_parts=True))
    kept: dict[str, None] = {}
    for number, line, _ in places:
        for scope in (one for one in program.scopes if one.cell == number):
            nodes = (n for n in own_nodes(scope.body) if isinstance(n, ast.stmt) and not isinstance(n, _DEFINITIONS))
            if (node := next((one for one in nodes if one.lineno == line), None)) is not None:
                kept |= dict.fromkeys(leavings.of(scope, node))
    return tuple(kept), tuple(leavings.models)


class _Leavings:
    """What statements leave behind with a graph.

    Attributes:
        models: paths of the models that were met, and what is called like one and is none that is known.
    """

    def __init__(self, program: Program, models: ModelCalls) -> None:
        self._program, self._models, self._giving = program, models, set[str]()
        self.models: dict[str, None] = {}
        functions = [one for one in program.scopes if one.function is not None and not one.disables_grad]
        while more := {name for one in functions if (name := one.tail) not in self._giving and self._gives(one)}:
            self._giving |= more

    def of(self, scope: Scope, node: ast.stmt) -> Iterator[str]:
        """Yield what the statement, and what it calls, leaves behind."""
        below = list(self._models.below(scope, [node]))
        self.models |= {path: None for _, path in below if path is not None}
        for called in {id(one): one for one, path in below if path is None}.values():
            yield from self._stored_outside(called, self._way(called, called.body))
        way = self._way(scope, [node])
        if scope.function is not None:
            yield from self._stored_outside(scope, way)
            if _is_given(scope, way):
                yield f"{scope.function.name}(...)"
            return
        yield from sorted(way.now)
        is_shown = node is scope.body[-1] and scope.cell == self._program.failing
        if is_shown and isinstance(node, ast.Expr) and way.carries(node, node.value):
            yield "Out"

    def _way(self, scope: Scope, within: Sequence[ast.stmt]) -> Way:
        """Return the way of a graph through ``scope`` that a model makes ``within`` a part of it."""
        inside = set(map(id, with_gradients(within)))

        def makes(call: ast.Call) -> bool:
            known = self._models.path(scope, call) is not None or words.last_name(call) in self._giving
            return known and id(call) in inside

        return Flow(makes=makes, errs_to_yes=True).through(scope.body)

    def _gives(self, scope: Scope) -> bool:
        return _is_given(scope, self._way(scope, scope.body))

    def _stored_outside(self, scope: Scope, way: Way) -> Iterator[str]:
        """Yield what a function puts something with a graph into that is not its own."""
        local = stored(own_nodes(scope.body))
        outer = outer_names(scope)
        yield from sorted(way.ever & outer)
        for met, _ in way.met:
            for target, value in (pair for node in own_nodes([met]) for pair in stored_in(node)):
                if root_of(target) not in local - outer and way.carries(met, value):
                    yield ast.unparse(target)


def _is_given(scope: Scope, way: Way) -> bool:
    """Whether a function gives its caller something with a graph."""
    given = ((met, node) for met, _ in way.met for node in own_nodes([met]))
    return any(
        isinstance(node, ast.Return | ast.Yield) and node.value is not None and way.carries(met, node.value)
        for met, node in given
    )
