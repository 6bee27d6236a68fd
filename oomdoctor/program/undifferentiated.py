"""Code that runs a model with gradients on, and of which nothing is ever differentiated; and what it leaves behind.

A guess from the text, which errs towards differentiated; that a change keeps the results is for a trial to show. What a
trial cannot know is what a later cell will train on. So each name that stays bound, each container of before that is
filled, and each result that a function gives is named, and the models that made them: one in evaluation mode is hardly
kept to be trained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.definitions import Program, Scope, short, with_gradients
from oomdoctor.program.gradients import Graphs
from oomdoctor.program.names import blocks_of, call_name, own_nodes

_HOOKS: Final = re.compile(r"register_(?:module_)?forward_(?:pre_)?hook")
_SPLIT: Final = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)
_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Place = tuple[int, int, str]
"""Cell, line, and source text; of a loop its head."""


def undifferentiated(program: Program, kinds: Mapping[str, str], line: int | None = None) -> tuple[Place, ...]:
    """Return what runs a model with gradients on and of which nothing is differentiated, ``(cell, line, source text)``.

    The search goes from the failing line outwards in, so that an evaluation within an epoch is found beside the
    training. It goes into a function that gives nothing with a graph to whoever calls it; of another one it is the call
    that counts.

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
        self._program, self._line, self._graphs = program, line, Graphs(program, kinds)
        self._seen: set[int] = set()

    def of_scope(self, scope: Scope) -> Iterator[Place]:
        """Yield the places of a scope and of the functions that it calls."""
        if id(scope) in self._seen or scope.disables_grad or self._is_of_module(scope):
            return
        self._seen.add(id(scope))
        if not (self._graphs.trains and self._keeps_state()):
            yield from self._of_block(scope, scope.body)

    def _of_block(self, scope: Scope, block: Sequence[ast.stmt]) -> Iterator[Place]:
        graphs = self._graphs
        for node in block:
            if isinstance(node, _DEFINITIONS) or self._is_before(scope, node):
                continue
            met = list(graphs.models.below(scope, [node]))
            if all(path is None for _, path in met) or (graphs.trains and self._is_for_effect(scope, node)):
                continue
            called = self._called([node])
            if graphs.takes_gradient([node]) or _suspends(node) or graphs.escapes(scope, node):
                for inner in blocks_of(node):
                    yield from self._of_block(scope, inner)
                for one in self._called(part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)):
                    yield from self.of_scope(one)
            elif isinstance(node, _SPLIT) or any(where is scope and path for where, path in met):
                yield _place(scope, node)
            else:
                inside = [place for one in called for place in self.of_scope(one)]
                apart = inside and all(map(graphs.keeps_to_itself, called))
                yield from inside if apart else [_place(scope, node)]

    def _is_for_effect(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether a model is run and its result dropped: what it is run for is not seen."""
        call = node.value if isinstance(node, ast.Expr) else None
        return isinstance(call, ast.Call) and self._graphs.models.path(scope, call) is not None

    def _called(self, body: Iterable[ast.AST]) -> list[Scope]:
        """Return the functions of the cells that ``body`` calls by name with gradients on."""
        names = [words.last_name(node) for node in with_gradients(body) if isinstance(node, ast.Call)]
        return [scope for name in names if (scope := self._program.function(name)) is not None]

    def _is_before(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether ``node`` was over when the failing line, which stands in the same scope, was run."""
        if self._line is None or scope.cell != self._program.failing:
            return False
        function = scope.function if scope.function is not None else None
        defined = [s.function for s in self._program.scopes if s.function and s.cell == scope.cell]
        around = [one for one in defined if one.lineno <= self._line <= (one.end_lineno or one.lineno)]
        here = function in around if function is not None else not around
        return here and (node.end_lineno or node.lineno) < self._line

    def _is_of_module(self, scope: Scope) -> bool:
        """Whether it is a method of a class that has a ``forward``: others call it, with gradients wanted or not."""
        return bool(scope.owner) and any(one.owner == scope.owner for one in self._graphs.forwards)

    def _keeps_state(self) -> bool:
        """Whether a forward leaves something behind that other code reads: its graph may be part of a later loss."""
        nodes = [node for scope in self._program.scopes for node in own_nodes(scope.body)]
        if any(isinstance(node, ast.Call) and _HOOKS.search(ast.unparse(node.func)) for node in nodes):
            return True
        loaded = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        methods = [one for one in self._program.scopes if self._is_of_module(one) and one.tail != "__init__"]
        own = (node for one in methods for node in own_nodes(one.body) if isinstance(node, ast.Attribute))
        kept = {node.attr for node in own if isinstance(node.ctx, ast.Store) and call_name(node.value) == "self"}
        return bool(kept & loaded)


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
    graphs = Graphs(program, kinds, by_parts=True)
    kept, models = dict[str, None](), dict[str, None]()
    for number, line, _ in places:
        for scope in (one for one in program.scopes if one.cell == number):
            nodes = (n for n in own_nodes(scope.body) if isinstance(n, ast.stmt) and not isinstance(n, _DEFINITIONS))
            if (node := next((one for one in nodes if one.lineno == line), None)) is not None:
                kept |= dict.fromkeys(graphs.leavings(scope, node))
                models |= {path: None for _, path in graphs.models.below(scope, [node]) if path is not None}
    return tuple(kept), tuple(models)
