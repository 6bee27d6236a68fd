"""What code that is never differentiated leaves behind with its graph, which a later cell may still differentiate.

The cells that were run cannot tell: the next one may train on what this one keeps. So each name that stays bound in the
notebook, each container of before that is filled, and each result that a function gives counts, and the models that
made them are named, as one in evaluation mode is hardly kept to be trained. Only what a call of a model gave counts,
and what is made from that; numbers and what was detached have no graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from oomdoctor.objects.kinds import Kind, items_of, kind_of, members_of, mro_of, name_of
from oomdoctor.objects.named import is_users
from oomdoctor.program.definitions import Program, Scope, with_gradients
from oomdoctor.program.flow import Flow
from oomdoctor.program.names import own_nodes
from oomdoctor.program.naming import bindings, names_bound, root_of, stored_in
from oomdoctor.program.passage import Passage
from oomdoctor.program.training_loops import called_like_a_model

__all__ = ["inputs_with_grad", "outliving", "runs_model"]

_STOPS: Final = frozenset(
    {"item", "detach", "numpy", "tolist", "argmax", "argmin", "argsort", "size", "numel", "dim"}
    | {"eq", "ne", "gt", "lt", "ge", "le", "int", "long", "bool"}
)
_NUMBERS: Final = frozenset({"float", "int", "len", "str", "bool", "round", "type", "isinstance", "range", "print"})
_DROPS: Final = frozenset({"shape", "device", "dtype", "grad", "data"})
_CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.TUPLE})
_LOOKED_AT: Final = 64


def outliving(
    program: Program, kinds: Mapping[str, str], places: Iterable[tuple[int, int, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what keeps a graph when the failing cell has ended, as source text, and the models that are run.

    Args:
        program: the cells.
        kinds: ``model``, ``loss`` and so on for each path of the namespace that leads to one.
        places: ``(cell, line, source text)`` of the code that is never differentiated.
    """
    search = _Search(program, kinds)
    kept: dict[str, None] = {}
    for number, line, _ in places:
        for scope, node in _statements_at(program, number, line):
            search.of_place(scope, node, kept)
    return tuple(kept), tuple(search.models)


def inputs_with_grad(namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of tensors that require a gradient and are no parameters, or of what has one in it."""
    found = []
    for name, value in namespace.items():
        kind = kind_of(type(value))
        items = items_of(value, kind, _LOOKED_AT) if kind in _CONTAINERS else (value,)
        if is_users(name) and any(map(_wants_grad, items)):
            found.append(name)
    return tuple(found)


def _wants_grad(value: Any) -> bool:
    if kind_of(type(value)) is not Kind.TENSOR:
        return False
    bases = {name_of(one): one for one in mro_of(type(value))}
    if "Parameter" in bases:
        return False
    # Past a class of the user's, which may answer itself.
    members = members_of(bases["TensorBase"])
    return bool(members["is_leaf"].__get__(value) and members["requires_grad"].__get__(value))


def runs_model(program: Program, kinds: Mapping[str, str]) -> bool:
    """Tell whether the failing cell calls a model, or a function that it calls, or hands on to be called."""
    search = _Search(program, kinds)
    for scope in program.running:
        search.meet_models(scope, scope.body)
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Name) and (named := program.function(node.id)) is not None:
                search.meet_models(named, named.body)
    return bool(search.models)


def _statements_at(program: Program, number: int, line: int) -> Iterator[tuple[Scope, ast.stmt]]:
    """Yield the statement that begins in a line, with its scope."""
    for scope in (one for one in program.scopes if one.cell == number):
        for node in own_nodes(scope.body):
            if isinstance(node, ast.stmt) and node.lineno == line and not isinstance(node, ast.FunctionDef):
                yield scope, node
                break


class _Search:
    """One search.

    Attributes:
        models: paths of the models that were met, and what is called like one and is none that is known.
    """

    def __init__(self, program: Program, kinds: Mapping[str, str]) -> None:
        self._program, self._kinds = program, kinds
        self._paths = [path for path, kind in kinds.items() if kind == "model"]
        self.models: dict[str, None] = {}
        self._giving = self._functions_that_give()

    def of_place(self, scope: Scope, node: ast.stmt, kept: dict[str, None]) -> None:
        """Add to ``kept`` what the statement, and what it calls, leaves behind."""
        called = self.meet_models(scope, (node,))
        names = self._closed(scope, (node,))
        for one in called:
            kept |= dict.fromkeys(self._stored_outside(one, self._closed(one, one.body)))
        if scope.function is None:
            kept |= dict.fromkeys(self._bound_at_end(scope, node, names))
            return
        kept |= dict.fromkeys(self._stored_outside(scope, names))
        if self._gives(scope, self._closed(scope, scope.body, names, within=(node,))):
            kept[f"{scope.function.name}(...)"] = None

    def _flow(self, scope: Scope | None) -> Flow:
        def makes(text: str) -> bool:
            return scope is not None and (
                self._model(scope, text) is not None or text.rpartition(".")[2] in self._giving
            )

        return Flow(makes=makes, stops=_STOPS, numbers=_NUMBERS, drops=_DROPS)

    def _model(self, scope: Scope, text: str) -> str | None:
        """Return the path of the model that a call of ``text`` runs, None where it runs none."""
        stands_for = dict(self._program.arguments.get(scope.function.name, ())) if scope.function else {}
        first, _, rest = text.partition(".")
        path = stands_for.get(text, f"{stands_for.get(first, first)}.{rest}" if rest else text)
        kind = self._kinds.get(path.removesuffix(".forward"))
        if kind is not None:
            return path.removesuffix(".forward") if kind == "model" else None
        within = next((one for one in self._paths if path.startswith(f"{one}.")), None)
        return within or (text if called_like_a_model(text) else None)

    def _functions_that_give(self) -> set[str]:
        """Return the last part of the names of the functions whose results may have a graph."""
        self._giving = set[str]()
        while True:
            more = {
                scope.function.name.rpartition(".")[2]
                for scope in self._program.scopes
                if scope.function and not scope.disables_grad and self._gives(scope, self._closed(scope, scope.body))
            }
            if more <= self._giving:
                return self._giving
            self._giving |= more

    def meet_models(self, scope: Scope, body: Iterable[ast.stmt], depth: int = 3) -> list[Scope]:
        """Note the models that ``body`` calls, and those that the functions do which it calls; return these."""
        met: list[Scope] = []
        for call in (node for node in own_nodes(body) if isinstance(node, ast.Call)):
            text = ast.unparse(call.func)
            if (path := self._model(scope, text)) is not None:
                self.models[path] = None
            elif depth and (called := self._program.function(text.rpartition(".")[2])) is not None:
                met += [called, *self.meet_models(called, called.body, depth - 1)]
        return met

    def _closed(
        self,
        scope: Scope,
        body: Sequence[ast.stmt],
        names: Iterable[str] = (),
        within: Sequence[ast.stmt] | None = None,
    ) -> set[str]:
        """Return ``names`` and those that ``body`` makes from them, or from what a model gives ``within`` it."""
        inside = set(map(id, with_gradients(body if within is None else within)))
        nodes = list(own_nodes(body))
        made, passed, found = self._flow(scope), self._flow(None), set(names)
        while True:
            more = {
                name
                for node in nodes
                for targets, value in bindings(node)
                if (made if id(node) in inside else passed).carries(value, found)
                for name in targets
            }
            if more <= found:
                return found
            found |= more

    def _gives(self, scope: Scope, names: set[str]) -> bool:
        flow = self._flow(scope)
        given = [node.value for node in own_nodes(scope.body) if isinstance(node, ast.Return | ast.Yield)]
        return any(value is not None and flow.carries(value, names) for value in given)

    def _stored_outside(self, scope: Scope, names: set[str]) -> Iterator[str]:
        """Yield what a function puts something with a graph into that is not its own."""
        local = {name for node in own_nodes(scope.body) for name in names_bound(node)}
        outer = {
            name for node in own_nodes(scope.body) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
        }
        yield from sorted(names & outer)
        flow = self._flow(scope)
        for target, value in (pair for node in own_nodes(scope.body) for pair in stored_in(node)):
            if root_of(target) not in local - outer and flow.carries(value, names):
                yield ast.unparse(target)

    def _bound_at_end(self, scope: Scope, node: ast.stmt, names: set[str]) -> Iterator[str]:
        """Yield the names that still hold something with a graph when the cell has run to its end."""
        flow = self._flow(None)
        around = next(index for index, one in enumerate(scope.body) if any(part is node for part in ast.walk(one)))
        passage = Passage(
            self._closed(scope, [scope.body[around]], names, within=[node]),
            lambda part, now: self._closed(scope, [_statement(part)], now, within=()),
            flow.carries,
        )
        passage.through(scope.body[around + 1 :])
        yield from sorted(passage.now)
        is_shown = node is scope.body[-1] and scope.cell == self._program.failing
        if is_shown and isinstance(node, ast.Expr) and self._flow(scope).carries(node.value, names):
            yield "Out"


def _statement(node: ast.AST) -> ast.stmt:
    return node if isinstance(node, ast.stmt) else ast.Expr(node)  # type: ignore[arg-type]
