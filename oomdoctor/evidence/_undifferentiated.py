"""Code that runs a model with gradients on, and of which nothing is ever differentiated.

A loop or a statement counts only if the cells show that it takes no gradient itself, and that nothing which leaves it
(a name, a result, something it fills) reaches a ``backward`` or its like. The search goes from the failing line
outwards in, so that an evaluation within an epoch is found beside the training. It goes into a function that gives
nothing with a graph to whoever calls it; another one may be called with gradients wanted by cells that are not written
yet, and it is its call that counts. What is not understood counts as differentiated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from oomdoctor.program.definitions import Program, Scope, is_gradless, short, with_gradients
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.outflow import Outflow
from oomdoctor.program.training_loops import called_like_a_model

__all__ = ["undifferentiated"]

_CALLS: Final = frozenset(
    {"backward", "manual_backward", "zero_grad", "grad", "vjp", "jvp", "jacobian", "hessian", "jacrev", "jacfwd"}
    | {"value_and_grad", "grad_and_value", "requires_grad_", "retain_grad", "register_hook", "enable_grad"}
    | {"set_grad_enabled", "fit_one_cycle", "minimize", "register_full_backward_hook"}
)
_PLAIN: Final = frozenset({"eval", "exec", "globals", "locals"})
_METHODS: Final = frozenset({"step", "fit"})
_ATTRIBUTES: Final = frozenset({"grad", "requires_grad", "grad_fn", "is_leaf", "retains_grad"})
_WORDS: Final = re.compile(
    r"attribut|salien|advers|attack|fgsm|\bpgd|perturb|grad_?cam|captum|shap\b|penalty|lbfgs|influence"
    r"|\btrain_(on|step|batch|one)|training_step|optimi[sz]e\b",
    re.IGNORECASE,
)
_HOOKS: Final = re.compile(r"register_(?:module_)?forward_(?:pre_)?hook")
_SPLIT: Final = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)


def undifferentiated(
    program: Program, kinds: Mapping[str, str], line: int | None = None
) -> tuple[tuple[int, int, str], ...]:
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
    """One search; it knows what every function of the cells does."""

    def __init__(self, program: Program, kinds: Mapping[str, str], line: int | None) -> None:
        self._program, self._kinds, self._line = program, kinds, line
        self._seen: set[int] = set()
        self._forwards = [s for s in program.scopes if s.function and s.function.name.endswith(".forward")]
        self._trains = any(_is_marked(node) for scope in program.scopes for node in own_nodes(scope.body))
        self._outflow = Outflow(program, self._differentiates, trains=self._trains)

    def of_scope(self, scope: Scope) -> Iterator[tuple[int, int, str]]:
        """Yield the places of a scope and of the functions that it calls."""
        if id(scope) in self._seen or scope.disables_grad or self._is_of_module(scope):
            return
        self._seen.add(id(scope))
        if self._trains and self._keeps_state():
            return
        yield from self._of_block(scope, scope.body, ())

    def _of_block(
        self, scope: Scope, block: Sequence[ast.stmt], after: tuple[ast.stmt, ...]
    ) -> Iterator[tuple[int, int, str]]:
        """Yield the places of ``block``; ``after`` is what runs when it has run, enclosing loops included."""
        for at, node in enumerate(block):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or self._is_before(scope, node):
                continue
            if (isinstance(node, ast.With | ast.AsyncWith) and any(map(is_gradless, node.items))) or not self._runs(
                scope, [node]
            ):
                continue
            rest = (*block[at + 1 :], *after)
            if self._trains and self._is_for_its_effect(scope, node):
                continue
            if self._differentiates([node]) or self._outflow.escapes(scope, node, rest) or _suspends(node):
                yield from self._inside(scope, node, rest)
            elif not isinstance(node, _SPLIT) and not self._calls_model(scope, [node]):
                called = list(self._called([node]))
                inner = [place for one in called for place in self.of_scope(one)]
                yield from inner if inner and all(map(self._outflow.keeps_to_itself, called)) else [_place(scope, node)]
            else:
                yield _place(scope, node)

    def _is_for_its_effect(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether a model is run and its result dropped: what it is run for is not seen."""
        return (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and (self._calls_model(scope, [ast.Expr(ast.Call(func=node.value.func, args=[], keywords=[]))]))
        )

    def _inside(self, scope: Scope, node: ast.stmt, rest: tuple[ast.stmt, ...]) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, _SPLIT):
            after = (node, *rest) if isinstance(node, ast.For | ast.AsyncFor | ast.While) else rest
            if isinstance(node, ast.Try):
                after = (_what_follows(node), *rest)
            for block in _blocks(node):
                yield from self._of_block(scope, block, after)
        for called in self._called(part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)):
            yield from self.of_scope(called)

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
        if scope.function is None or not scope.function.in_class:
            return False
        owner = scope.function.name.rpartition(".")[0]
        return any(one.function is not None and one.function.name == f"{owner}.forward" for one in self._forwards)

    def _keeps_state(self) -> bool:
        """Whether a forward leaves something behind that other code reads: its graph may be part of a later loss."""
        nodes = [node for scope in self._program.scopes for node in own_nodes(scope.body)]
        if any(isinstance(node, ast.Call) and _HOOKS.search(ast.unparse(node.func)) for node in nodes):
            return True
        loaded = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        for scope in self._program.scopes:
            if not self._is_of_module(scope) or scope.function is None or scope.function.node.name == "__init__":
                continue
            own = [node for node in own_nodes(scope.body) if isinstance(node, ast.Attribute)]
            if any(isinstance(node.ctx, ast.Store) and call_name(node.value) == "self" for node in own) and any(
                node.attr in loaded for node in own if isinstance(node.ctx, ast.Store)
            ):
                return True
        return False

    def _runs(self, scope: Scope, body: Iterable[ast.AST], depth: int = 3) -> bool:
        """Whether a model is run, with gradients on, by ``body`` or by what it calls."""
        if self._calls_model(scope, body):
            return True
        return depth > 0 and any(
            self._runs(called, called.body, depth - 1) for called in self._called(body) if not called.disables_grad
        )

    def _calls_model(self, scope: Scope, body: Iterable[ast.AST]) -> bool:
        stands_for = dict(self._program.arguments.get(scope.function.name, ())) if scope.function else {}
        for node in with_gradients(body):
            if isinstance(node, ast.Call):
                text = call_name(node).removesuffix(".forward")
                kind = self._kinds.get(stands_for.get(text, text))
                if kind == "model" or (kind is None and called_like_a_model(text)):
                    return True
        return False

    def _called(self, body: Iterable[ast.AST]) -> Iterator[Scope]:
        """Yield the functions of the cells that ``body`` calls by name."""
        for node in with_gradients(body):
            if isinstance(node, ast.Call) and (found := self._program.function(_last(node))) is not None:
                yield found

    def _differentiates(self, body: Iterable[ast.AST]) -> bool:
        """Whether ``body`` takes a gradient, or anything that it calls does or may: any ``forward`` may be called."""
        waiting: list[ast.AST] = [*body, *(node for scope in self._forwards for node in scope.body)]
        called: set[str] = set()
        while waiting:
            nodes = [node for part in waiting for node in ast.walk(part)]
            if any(map(_is_marked, nodes)):
                return True
            more = {_last(node) for node in nodes if isinstance(node, ast.Call)} - called
            called |= more
            inner = [s for s in self._program.scopes if s.function and s.function.name.rpartition(".")[2] in more]
            waiting = [node for scope in inner for node in scope.body]
        return False


def _is_marked(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name, text = _last(node), ast.unparse(node.func)
        named = name in _CALLS or name in (_METHODS if isinstance(node.func, ast.Attribute) else _PLAIN)
        return named or _WORDS.search(text) is not None or any(map(_wants_gradient, node.keywords))
    return isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES


def _wants_gradient(keyword: ast.keyword) -> bool:
    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in {"requires_grad", "create_graph", "retain_graph"} and not off


def _suspends(node: ast.stmt) -> bool:
    """Whether it hands over to other code in between, which would run without gradients too."""
    return any(isinstance(part, ast.Yield | ast.YieldFrom | ast.Await | ast.AsyncFor) for part in ast.walk(node))


def _what_follows(node: ast.Try) -> ast.Try:
    """Return what may run behind the block of a ``try``."""
    return ast.Try(body=[ast.Pass()], handlers=node.handlers, orelse=node.orelse, finalbody=node.finalbody)


def _blocks(node: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield block
    yield from (handler.body for handler in getattr(node, "handlers", ()))


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _place(scope: Scope, node: ast.stmt) -> tuple[int, int, str]:
    return scope.cell, node.lineno, short(ast.unparse(node).split("\n", 1)[0])
