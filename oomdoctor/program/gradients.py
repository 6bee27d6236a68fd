"""Autograd graphs of a program: which calls run a model, what keeps a graph, and what a gradient may be taken of.

One dataflow answers: a graph begins where a model is called, goes through the statements of a scope, and leaves it by a
result, by what is stored, or by a name that another cell reads. A guess from the text: a second name of a container,
what an unknown call keeps and what a function reads as a global are not followed. That a change keeps the results is
for a trial to show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from oomdoctor.program import torch_functions
from oomdoctor.program.dataflow import Flow, Way, assigned, names_set, stored_in
from oomdoctor.program.definitions import Program, Scope, with_gradients
from oomdoctor.program.names import free_names, names_in, own_nodes, parameters_of, read_first, root_of, stored
from oomdoctor.program.training_loops import called_like_a_model

_BY_TEXT: Final = frozenset({"eval", "exec", "globals", "locals"})
_STEPS: Final = frozenset({"step", "fit", "adapt"})
_SAID: Final = re.compile(
    r"attribut|salien|advers|attack|fgsm|\bpgd|perturb|grad_?cam|captum|shap\b|penalty|lbfgs|influence"
    r"|\btrain_(on|step|batch|one)|training_step|optimi[sz]e\b",
    re.IGNORECASE,
)
"""What functions are called that take a gradient themselves."""
_CLOCKS: Final = frozenset({"time", "perf_counter"})


class ModelCalls:
    """Which calls run a model.

    Args:
        kinds: ``model``, ``loss`` and so on for each path of the namespace that leads to one.
        by_parts: whether any method and any part of a model counts as the model.
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
            elif depth and (called := self._program.function(torch_functions.last_name(node))) is not None:
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


def _stops(call: ast.Call) -> bool:
    return torch_functions.cuts_graph(call) or torch_functions.last_name(call) in _CLOCKS


_PLAIN: Final = Flow(stops=_stops)


class Graphs:
    """The graphs that models make in one program, and the gradients that are taken of them.

    Any of ``forwards``, the methods called ``forward``, may be run by whatever is called. ``trains`` tells whether
    anything in the program takes a gradient.
    """

    def __init__(self, program: Program, kinds: Mapping[str, str], *, by_parts: bool = False) -> None:
        self._program, self.models = program, ModelCalls(program, kinds, by_parts=by_parts)
        self.forwards = [s for s in program.scopes if s.name.endswith(".forward")]
        self.trains = any(_is_marked(node) for scope in program.scopes for node in own_nodes(scope.body))
        self._giving = set[str]()
        functions = [one for one in program.scopes if one.function is not None and not one.disables_grad]
        while more := {
            one.tail for one in functions if one.tail not in self._giving and _gives(self.way(one, one.body))
        }:
            self._giving |= more

    def way(self, scope: Scope, within: Iterable[ast.AST]) -> Way:
        """Return the way of the graphs through ``scope`` that models make ``within`` a part of it."""
        inside = set(map(id, with_gradients(within)))

        def makes(call: ast.Call) -> bool:
            known = self.models.path(scope, call) is not None or torch_functions.last_name(call) in self._giving
            return known and id(call) in inside

        return Flow(makes=makes, stops=_stops).through(scope.body)

    def takes_gradient(self, body: Iterable[ast.AST]) -> bool:
        """Whether ``body`` takes a gradient, or anything that it calls does or may."""
        parts = [*body, *(node for scope in self.forwards for node in scope.body)]
        every = [*parts, *(node for scope in self.called(parts) for node in scope.body)]
        return any(_is_marked(node) for part in every for node in ast.walk(part))

    def called(self, body: Iterable[ast.AST]) -> list[Scope]:
        """Return the functions that ``body`` calls by name, and those that they call."""
        found: list[Scope] = []
        waiting = list(body)
        while waiting:
            calls = {
                torch_functions.last_name(node)
                for part in waiting
                for node in ast.walk(part)
                if isinstance(node, ast.Call)
            }
            more = [one for one in self._program.scopes if one.tail and one.tail in calls and one not in found]
            found += more
            waiting = [node for scope in more for node in scope.body]
        return found

    def leavings(self, scope: Scope, node: ast.stmt) -> Iterator[str]:
        """Yield what a statement, and what it calls, leaves behind with a graph, as source text."""
        for called in dict.fromkeys(one for one, path in self.models.below(scope, [node]) if path is None):
            yield from _stored_outside(called, self.way(called, called.body))
        way = self.way(scope, [node])
        if scope.function is not None:
            yield from _stored_outside(scope, way)
            if _gives(way):
                yield f"{scope.name}(...)"
            return
        yield from sorted(way.now)
        is_shown = node is scope.body[-1] and scope.cell == self._program.failing
        if is_shown and isinstance(node, ast.Expr) and way.carries(node, node.value):
            yield "Out"

    def keeps_to_itself(self, scope: Scope) -> bool:
        """Whether nothing with a graph leaves a function, whoever calls it."""
        return not self._stores([scope, *self.called(scope.body)]) and not _gives(self.way(scope, scope.body))

    def _stores(self, functions: Iterable[Scope]) -> bool:
        return any(any(_stored_outside(one, self.way(one, one.body))) for one in functions)

    def escapes(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether a gradient may be taken of something that ``node`` makes, or that what it calls stores."""
        if not self.trains:
            return False
        way = self.way(scope, [node])
        return self._stores(self.called([node])) or self._is_differentiated(scope, way)

    def is_trained_through(self, scope: Scope, name: str, fill: ast.stmt) -> bool:
        """Whether a gradient may be taken through what a statement puts into the container or the sum of a name.

        It may be, later, where another name stays bound to something made of it, and where a caller has it.
        """
        ways = [(scope, replace(_PLAIN, adds=lambda node: {name} if node is fill else set()).through(scope.body))]
        if scope.function is not None and name in parameters_of(scope.function):
            return True
        nodes = list(own_nodes(scope.body))
        if scope.function is None or name not in stored(nodes) - _outer(nodes):
            others = [one for one in self._program.scopes if one is not scope and name in read_first(one.body)]
            ways += [(one, _PLAIN.through(one.body, {name})) for one in others]
        left = any(_is_bound(way, way.now - {name}) for one, way in ways if one.function is None)
        return left or any(self._is_differentiated(one, way, name) for one, way in ways)

    def _is_differentiated(self, scope: Scope, way: Way, kept: str = "", *, elsewhere: bool = True) -> bool:
        """Whether a gradient may be taken of what carries a graph, in the scope or by whom it reaches.

        ``kept``: the name of a container that is looked at itself.
        """
        takes = (self._takes(node, names, way) for met, names in way.met for node in own_nodes([met]))
        if any(takes) or any(_stored_outside(scope, way, apart=kept)):
            return True
        if scope.function is not None:
            return _gives(way)
        others = [one for one in self._program.scopes if one.function is None and one is not scope and elsewhere]
        return any(
            self._is_differentiated(one, _PLAIN.through(one.body, live), kept, elsewhere=False)
            for one in others
            if (live := way.ever & read_first(one.body))
        )

    def _takes(self, node: ast.AST, names: set[str], way: Way) -> bool:
        """Whether a node takes a gradient of one of ``names``, or hands it to who does."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                return bool(names_in(node) & names) and self.takes_gradient([node])
            case ast.Attribute(value=base, attr=attr):
                return attr in torch_functions.ASKS_GRADIENT and way.flow.carries(base, names)
            case ast.Call():
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
                if torch_functions.last_name(node) in torch_functions.WANTS_GRADIENT | _STEPS:
                    parts += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                elif not self.takes_gradient([node]):
                    return False
                elif {name for one in self.called([node]) if one.function for name in free_names(one.function)} & names:
                    return True
                return any(way.flow.carries(part, names) for part in parts)
        return False


@lru_cache(maxsize=4)
def _graphs(program: Program, kinds: frozenset[tuple[str, str]], by_parts: bool) -> Graphs:
    return Graphs(program, dict(kinds), by_parts=by_parts)


def graphs_of(program: Program, kinds: Mapping[str, str], *, by_parts: bool = False) -> Graphs:
    """Return the graphs that models make in a program, found once."""
    return _graphs(program, frozenset(kinds.items()), by_parts)


def _is_marked(node: ast.AST) -> bool:
    """Whether a node takes a gradient, or is what is written where one is taken."""
    if isinstance(node, ast.Attribute):
        return node.attr in torch_functions.ASKS_GRADIENT
    if not isinstance(node, ast.Call):
        return False
    name, is_method = torch_functions.last_name(node), isinstance(node.func, ast.Attribute)
    named = name in torch_functions.WANTS_GRADIENT or name in (_STEPS - {"adapt"} if is_method else _BY_TEXT)
    return named or _SAID.search(ast.unparse(node.func)) is not None or any(map(_wants_gradient, node.keywords))


def _wants_gradient(keyword: ast.keyword) -> bool:
    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in {"requires_grad", "create_graph", "retain_graph"} and not off


def _gives(way: Way) -> bool:
    given = ((met, node) for met, _ in way.met for node in own_nodes([met]))
    return any(
        isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
        and node.value is not None
        and way.carries(met, node.value)
        for met, node in given
    )


def _is_bound(way: Way, names: set[str]) -> bool:
    """Whether a statement gives something with a graph to one of ``names``, or puts it into what that stands for."""
    nodes = ((met, node) for met, _ in way.met if isinstance(met, ast.stmt) for node in own_nodes([met]))
    pairs = ((met, to, value) for met, node in nodes for to, value in (*assigned(node), *stored_in(node)))
    return any({*names_set(to), root_of(to)} & names and way.carries(met, value) for met, to, value in pairs)


def _outer(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def _stored_outside(scope: Scope, way: Way, apart: str = "") -> Iterator[str]:
    """Yield what a scope puts something with a graph into that is not its own: attributes, and what a caller has."""
    nodes = list(own_nodes(scope.body))
    outer = _outer(nodes)
    local = stored(nodes) - outer if scope.function is not None else None
    yield from sorted(way.ever & outer - {apart})
    for met, _ in way.met:
        for target, value in (pair for node in own_nodes([met]) for pair in stored_in(node)):
            root = root_of(target)
            is_outside = isinstance(target, ast.Attribute) or (local is not None and root not in local)
            if is_outside and root != apart and way.carries(met, value):
                yield ast.unparse(target)
