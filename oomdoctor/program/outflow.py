"""What leaves a piece of code, and whether it reaches a gradient: told from the text alone, erring towards yes.

A value leaves by a name that is read afterwards before it is bound anew, by the result of a function, and by what it is
stored in, other names of the same container included. Behind a statement names are followed in the order in which the
program runs; within it, and in other functions, without regard to order, so that a name which stands for two things is
taken for both. Numbers, comparisons, and what was detached or taken to NumPy have no graph and are let go.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.names import FirstUse, first_uses, own_nodes
from oomdoctor.program.naming import (
    bindings,
    names_bound,
    names_filled,
    names_in,
    names_set,
    parameters_of,
    parts_of,
    root_of,
    stored_in,
)
from oomdoctor.program.passage import Passage

__all__ = ["Outflow"]

_NUMBERS: Final = frozenset(
    {"float", "int", "len", "str", "bool", "round", "type", "isinstance", "range", "print", "format"}
)
"""Functions whose results have no graph. The methods of these names keep it: ``logits.float()``."""
_STOPS: Final = frozenset(
    {"item", "detach", "numpy", "tolist", "argmax", "argmin", "size", "numel", "dim", "time"}
    | {"eq", "ne", "gt", "lt", "ge", "le"}
)
"""Methods whose results have none."""
_DROPS: Final = frozenset({"shape", "data", "device", "dtype", "dataset", "__name__"})
_TAKES: Final = frozenset(
    {"backward", "manual_backward", "grad", "vjp", "jvp", "jacobian", "hessian", "jacrev", "jacfwd", "minimize"}
    | {"requires_grad_", "retain_grad", "register_hook", "step", "adapt", "fit"}
)
_ASKS: Final = frozenset({"grad", "requires_grad", "grad_fn", "is_leaf", "retains_grad"})
_OUTER: Final = (ast.Global, ast.Nonlocal)


class Outflow:
    """The ways out of pieces of one program.

    Args:
        program: the cells.
        differentiates: whether statements take a gradient, directly or in what they call.
        trains: whether anything in the program takes one.
    """

    def __init__(self, program: Program, differentiates: Callable[[Iterable[ast.AST]], bool], *, trains: bool) -> None:
        self._program, self._differentiates, self._trains = program, differentiates, trains

    def escapes(self, scope: Scope, node: ast.stmt, rest: Sequence[ast.stmt]) -> bool:
        """Whether something made by ``node`` may be differentiated by ``rest``, which runs after it, or beyond."""
        if not self._trains:
            return False
        made, free = _made([node])
        if self._is_stored([node], made | free, scope) or self._is_returned(scope, [node], made | free):
            return True
        if any(self._stores_outside(called) for called in self._called([node])):
            return True
        if made & _outer_names(scope):
            return True
        alike = self._alike(scope)
        passage = Passage(_with_others(made, [node], alike), lambda n, names: self._spread(n, names, alike), _carries)
        passage.through(rest)
        for met, names in passage.met:
            if self._reaches([met], names) or self._is_returned(scope, [met], names):
                return True
            if self._is_stored([met], names, scope):
                return True
        return scope.function is None and self._is_read_by_cells(passage.ever, scope)

    def _spread(self, node: ast.AST, names: set[str], alike: Mapping[str, set[str]]) -> set[str]:
        """Return ``names``, with those that ``node`` makes from them, and the functions that read them as globals."""
        found = names | {name for name, read in self._globals_read if read & names}
        return _with_others(_from([node], found), [node], alike)

    @cached_property
    def _globals_read(self) -> list[tuple[str, set[str]]]:
        """The functions of the cells, with the names from outside that they, and what they call, read."""
        functions = [scope for scope in self._program.scopes if scope.function is not None]
        free = {id(scope): _free(scope) for scope in functions}
        return [
            (scope.function.name.rpartition(".")[2], set().union(*(free[id(s)] for s in self._with_called(scope))))
            for scope in functions
            if scope.function is not None
        ]

    @cached_property
    def _no_values(self) -> set[str]:
        """The names of modules and of what they give, and Python's own."""
        nodes = [node for scope in self._program.scopes for node in own_nodes(scope.body)]
        found = [one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
        return {"torch", *vars(builtins), *(one.asname or one.name.partition(".")[0] for one in found)}

    def _with_called(self, scope: Scope) -> list[Scope]:
        return [scope, *(one for one in self._called(scope.body) if one is not scope)]

    def _alike(self, scope: Scope) -> dict[str, set[str]]:
        """Return the names, of the scope, that may stand for one container, or for it and its part."""
        scopes = [one for one in self._program.scopes if one.function is None] if scope.function is None else [scope]
        groups: dict[str, set[str]] = {}
        for node in (node for one in scopes for node in own_nodes(one.body) if isinstance(node, ast.Assign)):
            names = {name for target in node.targets for name in names_set(target)} | set(parts_of(node.value))
            joined = names.union(*(groups.get(name, set()) for name in names))
            groups |= dict.fromkeys(joined, joined)
        return groups

    def leaves(self, scope: Scope) -> bool:
        """Whether something made by a function may be differentiated outside of it."""
        if not self._trains:
            return False
        made, free = _made(scope.body)
        if any(self._stores_outside(one) for one in (scope, *self._called(scope.body))):
            return True
        return self._is_returned(scope, scope.body, made | free)

    def keeps_to_itself(self, scope: Scope) -> bool:
        """Whether nothing with a graph leaves a function, whoever calls it."""
        made, free = _made(scope.body)
        if _gives(scope.body, made | (free - self._no_values)):
            return False
        return not any(map(self._stores_outside, self._with_called(scope)))

    def _is_returned(
        self, scope: Scope, body: Iterable[ast.stmt], names: set[str], source: str = "", depth: int = 3
    ) -> bool:
        """Whether ``body`` gives one who differentiates it something of ``names``, or of what ``source`` gave it."""
        if scope.function is None or not _gives(body, names, source):
            return False
        own = scope.function.name.rpartition(".")[2]
        if self._is_passed_on(own):
            return True
        callers = [other for other in self._program.scopes if _calls(other, own)]
        return any(depth == 0 or self._is_used(caller, own, depth) for caller in callers)

    def _is_passed_on(self, name: str) -> bool:
        """Whether a function is mentioned other than to be called: what is handed it may differentiate its results."""
        for scope in self._program.scopes:
            nodes = list(own_nodes(scope.body))
            called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
                if named == name and id(node) not in called and isinstance(getattr(node, "ctx", None), ast.Load):
                    return True
        return False

    def _is_used(self, caller: Scope, function: str, depth: int) -> bool:
        """Whether ``caller`` differentiates what ``function`` gave it."""
        got = _from(caller.body, set(), function)
        if self._reaches(caller.body, got, function) or self._is_stored(caller.body, got, caller, function):
            return True
        if caller.function is not None:
            return self._is_returned(caller, caller.body, got, function, depth - 1)
        return self._is_read_by_cells(got, caller)

    def _is_read_by_cells(self, names: set[str], apart: Scope) -> bool:
        """Whether another cell differentiates what one of the global ``names`` holds."""
        others = [scope for scope in self._program.scopes if scope.function is None and scope is not apart]
        return any((live := names & _read_first(one.body)) and self._reaches(one.body, live) for one in others)

    def _reaches(self, body: Sequence[ast.stmt], names: set[str], source: str = "") -> bool:
        """Whether anything made from ``names`` is part of a call that takes a gradient."""
        names = _from(body, names, source)
        for node in own_nodes(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                if names_in(node) & names and self._differentiates([node]):
                    return True
            elif isinstance(node, ast.Call):
                if self._takes(node, names, source):
                    return True
            elif isinstance(node, ast.Attribute) and node.attr in _ASKS and _carries(node.value, names, source):
                return True
        return False

    def _called(self, body: Iterable[ast.AST]) -> list[Scope]:
        """Return the functions that ``body`` calls by name, and those that they call."""
        found: list[Scope] = []
        waiting = list(body)
        while waiting:
            nodes = [node for part in waiting for node in ast.walk(part)]
            names = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
            functions = [s for s in self._program.scopes if s.function and s.function.name.rpartition(".")[2] in names]
            more = [scope for scope in functions if not any(scope is one for one in found)]
            found += more
            waiting = [node for scope in more for node in scope.body]
        return found

    def _stores_outside(self, scope: Scope) -> bool:
        made, free = _made(scope.body)
        return bool(made & _outer_names(scope)) or self._is_stored(scope.body, made | (free - self._no_values), scope)

    def _takes(self, call: ast.Call, names: set[str], source: str) -> bool:
        last = ast.unparse(call.func).rpartition(".")[2]
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        if last in _TAKES:
            parts += [call.func.value] if isinstance(call.func, ast.Attribute) else []
            return any(_carries(part, names, source) for part in parts)
        inner = self._called([call])
        if not self._differentiates([call]):
            return False
        free = {name for one in inner for name in _free(one)}
        return bool(free & names) or any(_carries(part, names, source) for part in parts)

    def _is_stored(self, body: Iterable[ast.AST], names: set[str], scope: Scope, source: str = "") -> bool:
        """Whether something that carries a graph goes into an attribute, or into a container that a caller has."""
        stores = [pair for node in own_nodes(body) for pair in stored_in(node) if _carries(pair[1], names, source)]
        if not stores:
            return False
        if any(isinstance(target, ast.Attribute) for target, _ in stores):
            return True
        local = {name for node in own_nodes(scope.body) for name in names_bound(node)}
        return scope.function is not None and any(root_of(target) not in local for target, _ in stores)


def _made(body: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that ``body`` binds or fills with what may have a graph, and those that it does not bind."""
    nodes = list(own_nodes(body))
    free = {name for node in nodes for name in names_in(node)} - {name for node in nodes for name in names_bound(node)}
    return _closed(nodes, set(), free, ""), free


def _from(body: Iterable[ast.AST], names: set[str], source: str = "") -> set[str]:
    """Return ``names`` and those that ``body`` makes from them, or from a call of ``source``."""
    return _closed(list(own_nodes(body)), names, set(), source)


def _closed(nodes: list[ast.AST], names: set[str], free: set[str], source: str) -> set[str]:
    found = set(names)
    while True:
        pairs = (pair for node in nodes for pair in bindings(node))
        more = {name for targets, value in pairs if _carries(value, found | free, source) for name in targets}
        if more <= found:
            return found
        found |= more


def _with_others(names: set[str], body: Iterable[ast.AST], alike: Mapping[str, set[str]]) -> set[str]:
    """Return ``names``, and where ``body`` fills what one of them stands for, the other names of that."""
    filled = {root for node in own_nodes(body) for root in names_filled(node)} & names
    return names.union(*(alike.get(name, set()) for name in filled))


def _free(scope: Scope) -> set[str]:
    """Return the names from outside that a function reads."""
    own = parameters_of(scope.function.node) if scope.function is not None else set()
    return _read_first(scope.body) - own


def _gives(body: Iterable[ast.AST], names: set[str], source: str = "") -> bool:
    given = [node.value for node in own_nodes(body) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return any(value is not None and _carries(value, names, source) for value in given)


def _outer_names(scope: Scope) -> set[str]:
    """Return the names that a function binds outside of itself."""
    return {name for part in own_nodes(scope.body) if isinstance(part, _OUTER) for name in part.names}


def _carries(value: ast.expr, names: set[str], source: str = "") -> bool:
    if isinstance(value, ast.Call):
        last = ast.unparse(value.func).rpartition(".")[2]
        is_method = isinstance(value.func, ast.Attribute)
        if last in (_STOPS if is_method else _NUMBERS) or _is_formatted(value.func):
            return False
        if last == source:
            return True
        parts = [*value.args, *(keyword.value for keyword in value.keywords), value.func]
        return any(_carries(part, names, source) for part in parts)
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.Attribute):
        return value.attr not in _DROPS and _carries(value.value, names, source)
    if isinstance(value, ast.Lambda):
        return bool((names_in(value.body) - parameters_of(value)) & names)
    if isinstance(value, ast.Compare | ast.Constant | ast.JoinedStr):
        return False
    if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        for part in value.generators:
            names = names | set(names_set(part.target)) if _carries(part.iter, names, source) else names
        items = (value.key, value.value) if isinstance(value, ast.DictComp) else (value.elt,)
        return any(_carries(item, names, source) for item in items)
    return any(_carries(part, names, source) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))


def _is_formatted(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant | ast.JoinedStr)


def _read_first(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read, or go on from, before they bind them."""
    text = ast.unparse(ast.Module(body=list(body), type_ignores=[]))
    return {name for name, use in first_uses(text).items() if use is not FirstUse.BINDS}


def _calls(scope: Scope, function: str) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function
        for node in own_nodes(scope.body)
    )
