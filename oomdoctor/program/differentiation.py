"""What of a program is differentiated: told from the text alone, erring towards yes.

A value leaves a piece of code by a name that is read afterwards before it is bound anew, by the result of a function,
and by what it is stored in, other names of the same container included. Behind a statement names are followed in the
order in which the program runs; in other functions without regard to order.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.dataflow import Flow
from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.names import (
    names_filled,
    names_in,
    names_set,
    own_nodes,
    parameters_of,
    parts_of,
    read_first,
    root_of,
    stored,
    stored_in,
)

__all__ = ["Differentiation", "outer_names"]

_BY_TEXT: Final = frozenset({"eval", "exec", "globals", "locals"})
_STEPS: Final = frozenset({"step", "fit", "adapt"})
_SAID: Final = re.compile(
    r"attribut|salien|advers|attack|fgsm|\bpgd|perturb|grad_?cam|captum|shap\b|penalty|lbfgs|influence"
    r"|\btrain_(on|step|batch|one)|training_step|optimi[sz]e\b",
    re.IGNORECASE,
)
"""What functions are called that take a gradient themselves."""
_CLOCKS: Final = frozenset({"time", "perf_counter"})


class Differentiation:
    """What statements of one program differentiate, and whether what others make reaches that.

    Attributes:
        forwards: the methods called ``forward``: any of them may be run by whatever is called.
        trains: whether anything in the program takes a gradient.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.forwards = [s for s in program.scopes if s.function and s.function.name.endswith(".forward")]
        self._groups: dict[Scope, dict[str, set[str]]] = {}
        self.trains = any(_is_marked(node) for scope in program.scopes for node in own_nodes(scope.body))

    def within(self, body: Iterable[ast.AST]) -> bool:
        """Whether ``body`` takes a gradient, or anything that it calls does or may."""
        parts = [*body, *(node for scope in self.forwards for node in scope.body)]
        every = [*parts, *(node for scope in self.called(parts) for node in scope.body)]
        return any(_is_marked(node) for part in every for node in ast.walk(part))

    def called(self, body: Iterable[ast.AST]) -> list[Scope]:
        """Return the functions that ``body`` calls by name, and those that they call."""
        found: dict[int, Scope] = {}
        waiting = list(body)
        while waiting:
            calls = {words.last_name(node) for part in waiting for node in ast.walk(part) if isinstance(node, ast.Call)}
            more = [
                scope
                for scope in self._program.scopes
                if scope.function is not None and scope.tail in calls and id(scope) not in found
            ]
            found |= {id(scope): scope for scope in more}
            waiting = [node for scope in more for node in scope.body]
        return list(found.values())

    def escapes(self, scope: Scope, node: ast.stmt, rest: Sequence[ast.stmt]) -> bool:
        """Whether something made by ``node`` may be differentiated by ``rest``, which runs after it, or beyond."""
        if not self.trains:
            return False
        made, free = self._made([node])
        if made & outer_names(scope) or any(map(self._stores_outside, self.called([node]))):
            return True
        if self._is_stored([node], made | free, scope) or self._is_returned(scope, [node], made | free):
            return True
        return self.reaches_from(scope, _with_others(made, [node], self._alike(scope)), rest)

    def reaches_from(self, scope: Scope, names: set[str], rest: Sequence[ast.stmt]) -> bool:
        """Whether something of ``names`` may be differentiated by ``rest``, or beyond."""
        alike = self._alike(scope)
        flow = Flow(stops=_stops, errs_to_yes=True, spreads=lambda part, names: self._spread(part, names, alike))
        way = flow.through(rest, names)
        return any(self._leaves(scope, [met], names) for met, names in way.met) or (
            scope.function is None and self._is_read_by_cells(way.ever, scope)
        )

    def keeps_to_itself(self, scope: Scope) -> bool:
        """Whether nothing with a graph leaves a function, whoever calls it."""
        made, free = self._made(scope.body)
        stores = any(map(self._stores_outside, [scope, *self.called(scope.body)]))
        return not stores and not _gives(scope.body, made | (free - self._no_values))

    def _leaves(self, scope: Scope, body: Sequence[ast.AST], names: set[str], source: str = "", depth: int = 3) -> bool:
        """Whether ``body`` differentiates something of ``names``, or stores it, or gives it to one who does.

        ``source`` is a function whose results count like ``names``.
        """
        return (
            self._reaches(body, names, source)
            or self._is_stored(body, names, scope, source)
            or self._is_returned(scope, body, names, source, depth)
        )

    def _made(self, body: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
        """Return the names that ``body`` binds or fills with what may have a graph, and those that it does not bind."""
        nodes = list(own_nodes(body))
        free = {name for node in nodes for name in names_in(node)}
        free -= stored(nodes)
        return _flow().spread(body, (), free), free

    def _spread(self, node: ast.AST, names: set[str], alike: Mapping[str, set[str]]) -> set[str]:
        """Return ``names``, with the functions that read them as globals, and the other names of what is filled."""
        readers = {name for name, read in self._globals_read if read & names}
        return _with_others(_flow().spread([node], names | readers), [node], alike)

    @cached_property
    def _globals_read(self) -> list[tuple[str, set[str]]]:
        """The functions of the cells, with the names from outside that they, and what they call, read."""
        return [
            (name, set().union(*map(_free, [scope, *self.called(scope.body)])))
            for scope in self._program.scopes
            if (name := scope.tail)
        ]

    @cached_property
    def _no_values(self) -> set[str]:
        """The names of modules and of what they give, and Python's own."""
        nodes = [node for scope in self._program.scopes for node in own_nodes(scope.body)]
        found = [one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
        return {"torch", *vars(builtins), *(one.asname or one.name.partition(".")[0] for one in found)}

    def _alike(self, scope: Scope) -> dict[str, set[str]]:
        """Return the names, of the scope, that may stand for one container, or for it and its part."""
        if scope in self._groups:
            return self._groups[scope]
        scopes = [one for one in self._program.scopes if one.function is None] if scope.function is None else [scope]
        groups = self._groups[scope] = dict[str, set[str]]()
        for node in (node for one in scopes for node in own_nodes(one.body) if isinstance(node, ast.Assign)):
            names = {name for target in node.targets for name in names_set(target)} | set(parts_of(node.value))
            joined = names.union(*(groups.get(name, set()) for name in names))
            groups |= dict.fromkeys(joined, joined)
        return groups

    def _is_returned(
        self, scope: Scope, body: Sequence[ast.AST], names: set[str], source: str = "", depth: int = 3
    ) -> bool:
        """Whether ``body`` gives one who differentiates it something of ``names``."""
        if scope.function is None or not _gives(body, names, source):
            return False
        own = scope.tail
        if any(_passes_on(other, own) for other in self._program.scopes):
            return True
        callers = [other for other in self._program.scopes if _calls(other, own)]
        return any(depth == 0 or self._is_used(caller, own, depth) for caller in callers)

    def _is_used(self, caller: Scope, function: str, depth: int) -> bool:
        """Whether ``caller`` differentiates what ``function`` gave it."""
        got = _flow(function).spread(caller.body, ())
        return self._leaves(caller, caller.body, got, function, depth - 1) or (
            caller.function is None and self._is_read_by_cells(got, caller)
        )

    def _is_read_by_cells(self, names: set[str], apart: Scope) -> bool:
        """Whether another cell differentiates what one of the global ``names`` holds."""
        others = [scope for scope in self._program.scopes if scope.function is None and scope is not apart]
        return any((live := names & read_first(one.body)) and self._reaches(one.body, live) for one in others)

    def _reaches(self, body: Sequence[ast.AST], names: set[str], source: str = "") -> bool:
        """Whether anything made from ``names`` is part of a call that takes a gradient."""
        flow = _flow(source)
        names = flow.spread(body, names)
        for node in own_nodes(body):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    found = bool(names_in(node) & names) and self.within([node])
                case ast.Call():
                    found = self._takes(node, names, flow)
                case ast.Attribute(value=base, attr=attr):
                    found = attr in words.ASKS_GRADIENT and flow.carries(base, names)
                case _:
                    found = False
            if found:
                return True
        return False

    def _takes(self, call: ast.Call, names: set[str], flow: Flow) -> bool:
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        if words.last_name(call) in words.WANTS_GRADIENT | _STEPS:
            parts += [call.func.value] if isinstance(call.func, ast.Attribute) else []
        elif not self.within([call]):
            return False
        elif {name for one in self.called([call]) for name in _free(one)} & names:
            return True
        return any(flow.carries(part, names) for part in parts)

    def _stores_outside(self, scope: Scope) -> bool:
        made, free = self._made(scope.body)
        return bool(made & outer_names(scope)) or self._is_stored(scope.body, made | (free - self._no_values), scope)

    def _is_stored(self, body: Iterable[ast.AST], names: set[str], scope: Scope, source: str = "") -> bool:
        """Whether something that carries a graph goes into an attribute, or into a container that a caller has."""
        flow = _flow(source)
        stores = [to for node in own_nodes(body) for to, value in stored_in(node) if flow.carries(value, names)]
        local = stored(own_nodes(scope.body))
        return any(isinstance(to, ast.Attribute) for to in stores) or (
            scope.function is not None and any(root_of(to) not in local for to in stores)
        )


def _stops(call: ast.Call) -> bool:
    return words.cuts_graph(call) or words.last_name(call) in _CLOCKS


def _flow(source: str = "") -> Flow:
    return Flow(makes=lambda call: words.last_name(call) == source, stops=_stops, errs_to_yes=True)


def _is_marked(node: ast.AST) -> bool:
    """Whether a node takes a gradient, or is what is written where one is taken."""
    if isinstance(node, ast.Attribute):
        return node.attr in words.ASKS_GRADIENT
    if not isinstance(node, ast.Call):
        return False
    name, is_method = words.last_name(node), isinstance(node.func, ast.Attribute)
    named = name in words.WANTS_GRADIENT or name in (_STEPS - {"adapt"} if is_method else _BY_TEXT)
    return named or _SAID.search(ast.unparse(node.func)) is not None or any(map(_wants_gradient, node.keywords))


def _wants_gradient(keyword: ast.keyword) -> bool:
    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in {"requires_grad", "create_graph", "retain_graph"} and not off


def _with_others(names: set[str], body: Iterable[ast.AST], alike: Mapping[str, set[str]]) -> set[str]:
    """Return ``names``, and where ``body`` fills what one of them stands for, the other names of that."""
    filled = {root for node in own_nodes(body) for root in names_filled(node)} & names
    return names.union(*(alike.get(name, set()) for name in filled))


def _free(scope: Scope) -> set[str]:
    """Return the names from outside that a function reads."""
    return read_first(scope.body) - (parameters_of(scope.function.node) if scope.function is not None else set())


def _gives(body: Iterable[ast.AST], names: set[str], source: str = "") -> bool:
    given = [node.value for node in own_nodes(body) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return any(value is not None and _flow(source).carries(value, names) for value in given)


def outer_names(scope: Scope) -> set[str]:
    """Return the names that a function binds outside of itself."""
    return {
        name for part in own_nodes(scope.body) if isinstance(part, ast.Global | ast.Nonlocal) for name in part.names
    }


def _calls(scope: Scope, function: str) -> bool:
    return any(isinstance(node, ast.Call) and words.last_name(node) == function for node in own_nodes(scope.body))


def _passes_on(scope: Scope, name: str) -> bool:
    """Whether a function is mentioned other than to be called: what is handed it may differentiate its results."""
    nodes = list(own_nodes(scope.body))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return any(
        (node.id if isinstance(node, ast.Name) else node.attr) == name
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called and isinstance(node.ctx, ast.Load)
    )
