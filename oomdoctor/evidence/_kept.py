"""What a step leaves on the device for the next one, other than graphs in lists: outputs, states, graphs, gradients.

Each is given as ``In[3] line 7: statement``, the first that was found. Names that lead to no object of the namespace
are judged by custom (``model``, ``net``); what a library's function keeps is not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from oomdoctor.evidence._flow import Flow
from oomdoctor.evidence._ground import Ground
from oomdoctor.evidence._loops import called_like_a_model
from oomdoctor.evidence._program import (
    Program,
    Scope,
    Statement,
    call_name,
    own_nodes,
    place,
    statements,
    target_names,
)

__all__ = [
    "ADDING",
    "NO_TENSORS",
    "NUMBERS",
    "SMALL",
    "carries_state",
    "gathers_predictions",
    "keeps_gradients",
    "off_device",
    "retain_graph",
]

SMALL: Final = frozenset(
    {"item", "cpu", "numpy", "tolist", "size", "numel", "dim", "argmax", "mean", "sum", "max", "min", "topk", "norm"}
    | {"eq", "ne", "gt", "lt", "ge", "le", "backward", "step", "save", "savefig", "imshow", "print", "log", "update"}
)
NUMBERS: Final = frozenset({"float", "int", "len", "str", "bool", "round", "type", "isinstance"})
NO_TENSORS: Final = frozenset({"shape", "device", "dtype", "grad", "loss"})
_JUDGES: Final = re.compile(r"loss|criterion|entropy|mse|nll|accura|metric|score|correct", re.IGNORECASE)
ADDING: Final = frozenset({"append", "extend", "insert", "appendleft", "add"})
_DETACHES: Final = re.compile(r"detach|repackage|no_grad|\.data\b|init|zeros|reset")
_OFF_DEVICE: Final = re.compile(r"\.(cpu|numpy|item|tolist|shape|size|mean|std|norm|sum|abs\(\)\.max)\b|to\('cpu'")


def retain_graph(ground: Ground) -> str | None:
    """Return the ``backward`` that keeps its graph. ``create_graph=True`` implies that."""
    return _first_call(ground, "backward", lambda call: _is_true(call, {"retain_graph", "create_graph"}, at=1))


def keeps_gradients(ground: Ground) -> str | None:
    """Return the ``zero_grad`` that fills gradients with zeros and does not free them."""
    return _first_call(ground, "zero_grad", lambda call: _is_false(call, "set_to_none"))


def _first_call(ground: Ground, method: str, holds: Callable[[ast.Call], bool]) -> str | None:
    for scope in ground.reach:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == method and holds(node):
                return place(scope, node)
    return None


def _is_true(call: ast.Call, names: set[str], at: int) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg in names] + call.args[at : at + 1]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def _is_false(call: ast.Call, name: str) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == name] + call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def gathers_predictions(program: Program, kinds: Mapping[str, str]) -> str | None:
    """Return the statement of a loop that collects what a model put out, without taking it off the device."""
    for scope in program.running:
        flow = _outputs(program, scope, kinds)
        names = flow.names(scope) | _loop_names(scope, flow)
        for statement in statements(scope.body):
            kept = _collected(statement.node) if statement.loops else _comprehended(statement.node)
            if kept is None or not flow.carries(kept[1], names) or off_device(kept[1]):
                continue
            if not statement.loops or not _is_of_one_step(statement, kept[0]):
                return place(scope, statement.node)
    return None


def _outputs(program: Program, scope: Scope, kinds: Mapping[str, str]) -> Flow:
    """Return how outputs of models go through ``scope``."""
    stands_for = dict(program.arguments.get(scope.function.name, ())) if scope.function else {}

    def makes(text: str, depth: int = 1) -> bool:
        kind = kinds.get(stands_for.get(text, text))
        if kind is not None:
            return kind == "model"
        base, _, method = text.rpartition(".")
        if method in {"generate", "forward", "predict"}:
            return makes(base, depth) if base else False
        called = program.function(text) if depth and "." not in text else None
        if called is not None:
            return _returns_output(program, called, kinds)
        return called_like_a_model(text)

    return Flow(makes=lambda text: makes(text), stops=_Stops(), numbers=NUMBERS, drops=NO_TENSORS)


class _Stops:
    """The calls after which it is no longer the output: what makes it small, takes it to the host, or judges it."""

    def __contains__(self, method: object) -> bool:
        return method in SMALL or (isinstance(method, str) and _JUDGES.search(method) is not None)


def _returns_output(program: Program, called: Scope, kinds: Mapping[str, str]) -> bool:
    stands_for = dict(program.arguments.get(called.function.name, ())) if called.function else {}

    def makes(text: str) -> bool:
        kind = kinds.get(stands_for.get(text, text))
        return kind == "model" if kind is not None else called_like_a_model(text)

    flow = Flow(makes=makes, stops=_Stops(), numbers=NUMBERS, drops=NO_TENSORS)
    names = flow.names(called)
    returned = [n.value for n in own_nodes(called.body) if isinstance(n, ast.Return) and n.value is not None]
    return any(flow.carries(value, names) and not off_device(value) for value in returned)


def _loop_names(scope: Scope, flow: Flow) -> set[str]:
    """Return the names of loops over what a model put out."""
    names = flow.names(scope)
    return {
        name
        for node in own_nodes(scope.body)
        if isinstance(node, ast.For) and flow.carries(node.iter, names)
        for name in target_names(node.target)
    }


def off_device(value: ast.expr) -> bool:
    """Whether a value is made small or taken to the host on its way."""
    return _OFF_DEVICE.search(ast.unparse(value)) is not None


def _collected(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the collection, by its first name, and what is put into it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        name, _, method = ast.unparse(node.value.func).rpartition(".")
        if name and method in ADDING:
            return _base(name), node.value.args[-1]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.List):
        return _base(ast.unparse(node.target)), node.value
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        target, joined = ast.unparse(node.targets[0]), call_name(node.value).rpartition(".")[2]
        parts = (
            node.value.args[0].elts if node.value.args and isinstance(node.value.args[0], ast.Tuple | ast.List) else []
        )
        if joined in {"cat", "concat", "vstack", "hstack"} and any(ast.unparse(part) == target for part in parts):
            return target, ast.Tuple(elts=[part for part in parts if ast.unparse(part) != target], ctx=ast.Load())
    stored = node.targets[0] if isinstance(node, ast.Assign) else None
    if (
        isinstance(node, ast.Assign)
        and isinstance(stored, ast.Subscript)
        and not isinstance(stored.slice, ast.Constant)
    ):
        return _base(ast.unparse(stored)), node.value
    return None


def _base(text: str) -> str:
    return re.split(r"[.\[(]", text, maxsplit=1)[0]


def _comprehended(node: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.ListComp):
        return "", node.value.elt
    return None


def _is_of_one_step(statement: Statement, name: str) -> bool:
    """Whether the collection starts anew within the innermost loop, or within a loop that differentiates it."""
    for loop in statement.loops:
        bound = any(name in _bound(node) for node in own_nodes(loop.body) if node is not statement.node)
        trains = any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in own_nodes(loop.body))
        if bound and (loop is statement.loops[-1] or trains):
            return True
    return False


def _bound(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    return ()


def carries_state(program: Program, ground: Ground, idle: Collection[tuple[int, int, str]]) -> str | None:
    """Return the call that feeds a recurrent state back across the steps of a loop, not detached.

    Or across the calls of a module, where the module keeps the state in an attribute that nothing detaches or resets.

    Args:
        program: the cells.
        ground: what of them the failing cell rests on.
        idle: what is certain to be differentiated by nothing. Of loops that do not train, those in it count: others may
            unroll the steps that a later loss is taken over.
    """
    for scope in program.running:
        for statement in statements(scope.body):
            trains = [loop for loop in statement.loops if _differentiates(loop)]
            if trains and _is_carried(program, statement, trains[-1]):
                return place(scope, statement.node)
    return _kept_in_module(program, ground) or _carried_idly(program, idle)


def carries_idly(program: Program, ground: Ground, idle: Collection[tuple[int, int, str]]) -> bool:
    """Whether nothing differentiates the state that ``carries_state`` names."""
    carried = carries_state(program, ground, idle)
    if carried is not None and carried == carries_state(program, ground, ()):  # it trains, or a module keeps it
        return False
    return carried is not None


def _carried_idly(program: Program, idle: Collection[tuple[int, int, str]]) -> str | None:
    for scope in program.running:
        lines = {line for number, line, _ in idle if number == scope.cell}
        around = [node for node in own_nodes(scope.body) if isinstance(node, ast.stmt) and node.lineno in lines]
        if scope.function is not None and scope.function.node.lineno in lines:
            around.append(scope.function.node)
        for statement in statements(scope.body):
            is_idle = any(node.lineno <= statement.node.lineno <= (node.end_lineno or 0) for node in around)
            if is_idle and statement.loops and _is_carried(program, statement, statement.loops[-1]):
                return place(scope, statement.node)
    return None


def _is_carried(program: Program, statement: Statement, loop: Loop) -> bool:
    """Whether a statement feeds back a state with its graph, and ``loop`` does not bind it anew."""
    fed = _fed_back(statement.node)
    rebound = any(_rebinds(program, node, fed, statement.node) for node in own_nodes(loop.body))
    return bool(fed) and not statement.is_gradless and not rebound


def _differentiates(loop: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop))


def _fed_back(node: ast.AST) -> frozenset[str]:
    """Return the names that a call of several arguments is given and gives back."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return frozenset()
    given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
    if len(given) < 2 or _DETACHES.search(ast.unparse(node.value)):
        return frozenset()
    names = {name for target in node.targets for name in _texts(target)}
    states = {name for value in given[1:] for name in _texts(value)}
    return frozenset(names & states)


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the plain names and attributes of ``self`` that a target or an argument is, or is a tuple of."""
    if isinstance(node, ast.Tuple | ast.List):
        for one in node.elts:
            yield from _texts(one)
    elif isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and call_name(node).startswith("self.")):
        yield ast.unparse(node)


def _rebinds(program: Program, node: ast.AST, names: frozenset[str], feeding: ast.stmt) -> bool:
    """Whether a statement other than ``feeding`` cuts the state from its past, or may."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach_":
        return ast.unparse(node.func.value) in names
    if isinstance(node, ast.For):
        return bool(names & set(target_names(node.target)))
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node is feeding:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return bool(names & {text for target in targets for text in _texts(target)}) and not _fed_back(node)


def _kept_in_module(program: Program, ground: Ground) -> str | None:
    for scope in ground.reach:
        if scope.function is None or not scope.function.in_class or scope.function.node.name == "__init__":
            continue
        for node in own_nodes(scope.body):
            fed = {name for name in _fed_back(node) if name.startswith("self.")}
            if fed and isinstance(node, ast.Assign) and not _let_go(program, scope, fed, node):
                return place(scope, node)
    return None


def _let_go(program: Program, scope: Scope, names: set[str], feeding: ast.Assign) -> bool:
    """Whether any method of the class but ``__init__`` binds the attribute anew."""
    assert scope.function is not None
    owner = scope.function.name.rpartition(".")[0]
    methods = [s for s in program.scopes if s.function and s.function.name.rpartition(".")[0] == owner]
    everywhere = [s for s in program.scopes if s.function is None or not s.function.in_class]
    cut = {name.removeprefix("self.") for name in names}
    for other in (*methods, *everywhere):
        if other.function is not None and other.function.node.name == "__init__":
            continue
        for node in own_nodes(other.body):
            if isinstance(node, ast.Assign) and node is not feeding:
                texts = [ast.unparse(part) for target in node.targets for part in _leaves(target)]
                if any(text.rpartition(".")[2] in cut and "." in text for text in texts):
                    return True
            if isinstance(node, ast.Call) and call_name(node).endswith(tuple(f".{name}.detach_" for name in cut)):
                return True
    return False


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _leaves(one)
    else:
        yield target
