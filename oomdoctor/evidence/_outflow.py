"""What leaves a piece of code, and whether it reaches a gradient: told from the text alone, erring towards yes.

A value leaves by a name that is read afterwards before it is bound anew, by the result of a function, and by what it is
stored in. Names are followed without regard to the order of statements, so that a name which stands for two things is
taken for both. Numbers, comparisons, and what was detached or taken to NumPy have no graph and are let go.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from oomdoctor.evidence._program import Program, Scope, own_nodes, target_names
from oomdoctor.model.names import FirstUse, first_uses

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
_FILLS: Final = frozenset({"append", "extend", "insert", "appendleft", "add", "update", "setdefault", "put"})
_SHOWS: Final = frozenset({"print", "set_postfix", "set_description", "set_postfix_str", "log", "write", "add_scalar"})
"""What only shows what it is given."""
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
        live = made & _read_first(rest)
        onward = _from(rest, live) if live else set()
        if live and (self._reaches(rest, live) or self._is_returned(scope, rest, onward)):
            return True
        if live and self._is_stored(rest, onward, scope):
            return True
        return scope.function is None and self._is_read_by_cells(made | onward, scope)

    def leaves(self, scope: Scope) -> bool:
        """Whether something made by a function may be differentiated outside of it."""
        if not self._trains:
            return False
        made, free = _made(scope.body)
        if any(self._stores_outside(one) for one in (scope, *self._called(scope.body))):
            return True
        return self._is_returned(scope, scope.body, made | free)

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
                if _names(node) & names and self._differentiates([node]):
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
        return bool(made & _outer_names(scope)) or self._is_stored(scope.body, made | free, scope)

    def _takes(self, call: ast.Call, names: set[str], source: str) -> bool:
        last = ast.unparse(call.func).rpartition(".")[2]
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        if last in _TAKES:
            parts += [call.func.value] if isinstance(call.func, ast.Attribute) else []
            return any(_carries(part, names, source) for part in parts)
        inner = self._called([call])
        if not self._differentiates([call]):
            return False
        free = {name for one in inner for name in _read_first(one.body)}
        return bool(free & names) or any(_carries(part, names, source) for part in parts)

    def _is_stored(self, body: Iterable[ast.AST], names: set[str], scope: Scope, source: str = "") -> bool:
        """Whether something that carries a graph goes into an attribute, or into a container that a caller has."""
        nodes = list(own_nodes(body))
        local = {name for node in own_nodes(scope.body) for name in _bound(node)}
        for node in nodes:
            for target, value in _stores(node):
                outer = scope.function is not None and _root(target) not in local
                if (isinstance(target, ast.Attribute) or outer) and _carries(value, names, source):
                    return True
        return False


def _made(body: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that ``body`` binds or fills with what may have a graph, and those that it does not bind."""
    nodes = list(own_nodes(body))
    free = {name for node in nodes for name in _names(node)} - {name for node in nodes for name in _bound(node)}
    return _closed(nodes, set(), free, ""), free


def _from(body: Iterable[ast.AST], names: set[str], source: str = "") -> set[str]:
    """Return ``names`` and those that ``body`` makes from them, or from a call of ``source``."""
    return _closed(list(own_nodes(body)), names, set(), source)


def _closed(nodes: list[ast.AST], names: set[str], free: set[str], source: str) -> set[str]:
    found = set(names)
    while True:
        pairs = (pair for node in nodes for pair in _bindings(node))
        more = {name for targets, value in pairs if _carries(value, found | free, source) for name in targets}
        if more <= found:
            return found
        found |= more


def _gives(body: Iterable[ast.AST], names: set[str], source: str = "") -> bool:
    given = [node.value for node in own_nodes(body) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return any(value is not None and _carries(value, names, source) for value in given)


def _outer_names(scope: Scope) -> set[str]:
    """Return the names that a function binds outside of itself."""
    return {name for part in own_nodes(scope.body) if isinstance(part, _OUTER) for name in part.names}


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


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
        return bool((_names(value.body) - _parameters(value)) & names)
    if isinstance(value, ast.Compare | ast.Constant | ast.JoinedStr):
        return False
    inner = [part.iter if isinstance(part, ast.comprehension) else part for part in ast.iter_child_nodes(value)]
    return any(_carries(part, names, source) for part in inner if isinstance(part, ast.expr))


def _is_formatted(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant | ast.JoinedStr)


def _parameters(function: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}


def _bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield the names that a node binds or fills, with what goes there."""
    if isinstance(node, ast.Assign):
        yield {name for target in node.targets for name in _names_of(target)}, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield set(_names_of(node.target)), node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield set(target_names(node.target)), node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield set(target_names(node.optional_vars)), node.context_expr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for name in _names(ast.Module(body=node.body, type_ignores=[])) - _parameters(node):
            yield {node.name}, ast.Name(name, ast.Load())
    elif isinstance(node, ast.Match):
        yield {name for part in ast.walk(node) for name in _captured(part)}, node.subject
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield {_root(node.func.value)}, value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _fed(node.value)


def _is_in_place(method: str) -> bool:
    return method in _FILLS or (method.endswith("_") and not method.endswith("__"))


def _fed(call: ast.Call) -> Iterator[tuple[set[str], ast.expr]]:
    """Yield what a call that is made for its effect may keep an argument in: its object, and the other arguments."""
    if ast.unparse(call.func).rpartition(".")[2] in _SHOWS:
        return
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    for value in given:
        yield {_root(other) for other in (call.func, *given) if other is not value}, value


def _captured(node: ast.AST) -> Iterator[str]:
    name = node.rest if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
    if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping) and name is not None:
        yield name


def _names_of(target: ast.expr) -> Iterator[str]:
    yield from target_names(target)
    for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
        if isinstance(part, ast.Subscript | ast.Attribute):
            yield _root(part)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _stores(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the attributes and items that a node sets and the containers that it fills, with what goes there."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Subscript | ast.Attribute):
                    yield part, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield node.func.value, value


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _read_first(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read, or go on from, before they bind them."""
    text = ast.unparse(ast.Module(body=list(body), type_ignores=[]))
    return {name for name, use in first_uses(text).items() if use is not FirstUse.BINDS}


def _calls(scope: Scope, function: str) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function
        for node in own_nodes(scope.body)
    )
