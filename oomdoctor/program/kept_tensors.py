"""What a step leaves on the device for the next one, and code that keeps a graph of which nothing is differentiated.

Histories with graphs, outputs, and what hooks keep. Names that lead to no object of the namespace are judged by custom
(``model``, ``net``); what a library's function keeps is not seen. A history counts only where no gradient is seen to be
taken through it. One that is returned or stored is left out, as is a sum of losses whose graph ``backward`` has freed.

All of it is a guess from the text; that a change keeps the results is for a trial to show. What a trial cannot know is
what a later cell will train on. So each name that stays bound, each container of before that is filled, and each result
that a function gives is named, and the models that made them: one in evaluation mode is hardly kept to be trained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from oomdoctor.program import torch_functions
from oomdoctor.program.dataflow import Flow
from oomdoctor.program.definitions import Program, Scope, Statement, site, statements, with_gradients
from oomdoctor.program.dependencies import Ground
from oomdoctor.program.gradients import Graphs, graphs_of
from oomdoctor.program.magics import Definition, Loop
from oomdoctor.program.names import blocks_of, call_name, names_in, own_nodes, root_of
from oomdoctor.program.training_loops import called_like_a_model

_FILLING: Final = frozenset({"append", "appendleft", "add"})
_JUDGES: Final = re.compile(r"loss|criterion|entropy|mse|nll|accura|metric|score|correct", re.IGNORECASE)
_HOOK: Final = re.compile(r"^register_(module_)?(full_)?(forward|backward)(_pre)?_hook$")
_OFF_DEVICE: Final = (torch_functions.SMALL - torch_functions.INDEXED) | {"shape"}
_NO_OUTPUTS: Final = (torch_functions.PLAIN_ATTRIBUTES - {"data"}) | {"loss"}
_OWNING: Final = frozenset({"generate", "forward", "predict"})
"""Methods of a model that give its outputs."""


def history_appends(program: Program, kinds: Mapping[str, str]) -> list[tuple[Scope, ast.stmt, str]]:
    """Return the statements of loops that keep a graph in a history of which no gradient is taken, with its name."""
    graphs = graphs_of(program, kinds)
    found = [(scope, *pair) for scope in program.running for pair in _appends(graphs, scope)]
    return sorted(found, key=lambda pair: (pair[0].cell, pair[1].lineno))


def _appends(graphs: Graphs, scope: Scope) -> Iterator[tuple[ast.stmt, str]]:
    if scope.disables_grad:
        return
    way, backed = graphs.way(scope, scope.body), _backed(scope)
    for statement in statements(scope.body):
        node, kept = statement.node, _kept(statement.node)
        if not statement.loops or statement.is_gradless or kept is None or not way.carries(node, kept[1]):
            continue
        is_freed = not isinstance(node, ast.Expr) and names_in(kept[1]) & backed
        if kept[0].isidentifier() and not is_freed and not graphs.is_trained_through(scope, kept[0], node):
            yield node, kept[0]


def _kept(node: ast.stmt) -> tuple[str, ast.expr] | None:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method) as called, args=[value])) if method in _FILLING:
            return call_name(called.value), value
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            return ast.unparse(target), value
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=value)):
            return (ast.unparse(target), value) if ast.unparse(target) == ast.unparse(left) else None
    return None


def _backed(scope: Scope) -> set[str]:
    """Return the names that ``backward`` is called on themselves: their graph is freed by it."""
    calls = [node for node in own_nodes(scope.body) if isinstance(node, ast.Call)]
    backward = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "backward"]
    return {name for one in backward for part in (one.func, *one.args) for name in names_in(part)}


def gathers_predictions(program: Program, kinds: Mapping[str, str]) -> tuple[Scope, ast.stmt] | None:
    """Return the statement of a loop that collects what a model put out, without taking it off the device."""
    for scope in program.running:
        way = _outputs(program, scope, kinds).through(scope.body)
        for statement in statements(scope.body):
            kept = _collected(statement.node) if statement.loops else _comprehended(statement.node)
            if kept is None or not way.carries(statement.node, kept[1]) or _off_device(kept[1]):
                continue
            if not statement.loops or not _is_of_one_step(statement, kept[0]):
                return scope, statement.node
    return None


def _outputs(program: Program, scope: Scope, kinds: Mapping[str, str], depth: int = 1) -> Flow:
    """Return how outputs of models go through ``scope``: by what keeps them on the device, with a graph or without."""
    stands_for = program.given(scope)

    def makes(call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        base, _, method = text.rpartition(".")
        text = base if base and method in _OWNING else text
        kind = kinds.get(stands_for.get(text, text))
        called = program.function(text) if kind is None and depth and "." not in text else None
        if called is not None:
            return _returns_output(called, _outputs(program, called, kinds, depth - 1))
        return kind == "model" if kind is not None else called_like_a_model(text)

    return Flow(makes=makes, stops=_is_small, drops=_NO_OUTPUTS, of_graphs=False)


def _is_small(call: ast.Call) -> bool:
    """Whether what a call gives is no output any more: it is made small, taken to the host, or judged."""
    name = torch_functions.last_name(call)
    plain = isinstance(call.func, ast.Name) and name in torch_functions.PLAIN_FUNCTIONS
    return plain or name in torch_functions.SMALL or _JUDGES.search(name) is not None


def _returns_output(called: Scope, flow: Flow) -> bool:
    way = flow.through(called.body)
    given = [node for node, _ in way.met if isinstance(node, ast.Return) and node.value is not None]
    return any(way.carries(node, node.value) and not _off_device(node.value) for node in given if node.value)


def _off_device(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return ".to('cpu'" in text or any(
        isinstance(node, ast.Attribute) and node.attr in _OFF_DEVICE for node in ast.walk(value)
    )


def _collected(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the collection, by its first name, and what is put into it."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr=method), args=[*_, value])) if (
            method in torch_functions.GATHERS
        ):
            return root_of(base), value
        case ast.AugAssign(target=target, op=ast.Add(), value=ast.List() as value):
            return root_of(target), value
        case ast.Assign(targets=[target, *_], value=ast.Call(args=[ast.Tuple() | ast.List() as joined, *_]) as call):
            others = [part for part in joined.elts if ast.unparse(part) != ast.unparse(target)]
            if torch_functions.last_name(call) in torch_functions.JOINS and len(others) < len(joined.elts):
                return ast.unparse(target), ast.Tuple(elts=others, ctx=ast.Load())
        case ast.Assign(targets=[ast.Subscript(slice=at) as stored, *_], value=value) if not isinstance(
            at, ast.Constant
        ):
            return root_of(stored), value
    return None


def _comprehended(node: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.ListComp):
        return "", node.value
    return None


def _is_of_one_step(statement: Statement, name: str) -> bool:
    """Whether the collection starts anew within the innermost loop, or within a loop that differentiates it."""

    def is_bound(loop: Loop) -> bool:
        others = [n for n in own_nodes(loop.body) if isinstance(n, ast.Assign) and n is not statement.node]
        return any(isinstance(target, ast.Name) and target.id == name for one in others for target in one.targets)

    def trains(loop: Loop) -> bool:
        return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in own_nodes(loop.body))

    return any(is_bound(loop) and (loop is statement.loops[-1] or trains(loop)) for loop in statement.loops)


def hooks(program: Program, ground: Ground) -> str | None:
    """Return where a hook of modules is registered whose function keeps what passes through it, on the device.

    Only hooks whose function stands in a cell are judged, by its text; whether one was removed since is not seen.
    """
    calls = ((scope, node) for scope in ground.basis for node in own_nodes(scope.body) if isinstance(node, ast.Call))
    registering = (one for one in calls if one[1].args and _HOOK.match(torch_functions.last_name(one[1])))
    return next(
        (str(site("hook", scope, call)) for scope, call in registering if _is_keeping(program, call.args[0])), None
    )


def _is_keeping(program: Program, hook: ast.expr) -> bool:
    if isinstance(hook, ast.Lambda):
        return _adds([ast.Expr(hook.body)], {arg.arg for arg in hook.args.args})
    name = call_name(hook).rpartition(".")[2]
    if isinstance(hook, ast.Call) and name == "partial" and hook.args:
        return _is_keeping(program, hook.args[0])
    if isinstance(hook, ast.Call):  # a function that makes the hook
        candidates = [one.function for one in program.scopes if f"{name}.<locals>." in one.name]
    else:
        candidates = [one.function for one in program.scopes if one.tail == name]
    return any(_adds(one.body, {arg.arg for arg in one.args.args}) for one in candidates if one is not None)


def _adds(body: list[ast.stmt], given: set[str]) -> bool:
    """Whether a tensor among ``given`` is added to a collection, or stored with its graph."""
    way = Flow(stops=_is_small, drops=_NO_OUTPUTS, of_graphs=False).through(body, given)
    for met, _ in way.met:
        match met:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method), args=[*_, value])) if (
                method in torch_functions.GATHERS
            ):
                is_kept = True
            case ast.Assign(targets=[ast.Subscript() | ast.Attribute(), *_], value=value):
                is_kept = "detach" not in ast.unparse(value)
            case _:
                continue
        if is_kept and way.carries(met, value) and not _off_device(value):
            return True
    return False


_HOOKS: Final = re.compile(r"register_(?:module_)?forward_(?:pre_)?hook")
_SPLIT: TypeAlias = Loop | ast.If | ast.With | ast.AsyncWith | ast.Try

Place: TypeAlias = tuple[Scope, ast.stmt]


def undifferentiated(program: Program, kinds: Mapping[str, str]) -> tuple[Place, ...]:
    """Return what runs a model with gradients on and of which nothing is differentiated.

    The search goes from the cell inwards, so that an evaluation within an epoch is found beside the training. It goes
    into a function that gives nothing with a graph to whoever calls it; of another one it is the call that counts.
    """
    search = _Search(program, kinds)
    tops = [scope for scope in program.scopes if scope.cell == program.failing and scope.function is None]
    return tuple(dict.fromkeys(place for scope in tops for place in search.of_scope(scope)))


class _Search:
    def __init__(self, program: Program, kinds: Mapping[str, str]) -> None:
        self._program, self._graphs = program, graphs_of(program, kinds)
        self._seen: set[int] = set()

    def of_scope(self, scope: Scope) -> Iterator[Place]:
        if id(scope) in self._seen or scope.disables_grad or self._is_of_module(scope):
            return
        self._seen.add(id(scope))
        if not (self._graphs.trains and self._keeps_state()):
            yield from self._of_block(scope, scope.body)

    def _of_block(self, scope: Scope, block: Sequence[ast.stmt]) -> Iterator[Place]:
        graphs = self._graphs
        for node in block:
            if isinstance(node, Definition):
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
                yield scope, node
            else:
                inside = [place for one in called for place in self.of_scope(one)]
                apart = inside and all(map(graphs.keeps_to_itself, called))
                yield from inside if apart else [(scope, node)]

    def _is_for_effect(self, scope: Scope, node: ast.stmt) -> bool:
        """Whether a model is run and its result dropped: what it is run for is not seen."""
        call = node.value if isinstance(node, ast.Expr) else None
        return isinstance(call, ast.Call) and self._graphs.models.path(scope, call) is not None

    def _called(self, body: Iterable[ast.AST]) -> list[Scope]:
        names = [torch_functions.last_name(node) for node in with_gradients(body) if isinstance(node, ast.Call)]
        return [scope for name in names if (scope := self._program.function(name)) is not None]

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
    return any(isinstance(part, ast.Yield | ast.YieldFrom | ast.Await | ast.AsyncFor) for part in ast.walk(node))


def outliving(
    program: Program, kinds: Mapping[str, str], places: Iterable[Place]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what keeps a graph of ``places`` when the failing cell has ended, as source text, and the models run."""
    graphs, places = graphs_of(program, kinds, by_parts=True), [*places]
    kept = dict.fromkeys(text for place in places for text in graphs.leavings(*place))
    met = (path for scope, node in places for _, path in graphs.models.below(scope, [node]) if path is not None)
    return tuple(kept), tuple(dict.fromkeys(met))
