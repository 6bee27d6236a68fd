"""What a step leaves on the device for the next one, other than graphs in lists: outputs, graphs, gradients.

Each is given as ``In[3] line 7: statement``, the first that was found. Names that lead to no object of the namespace
are judged by custom (``model``, ``net``); what a library's function keeps is not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Final

from oomdoctor.program.definitions import Program, Scope, Statement, place, statements, target_names
from oomdoctor.program.flow import Flow
from oomdoctor.program.ground import Ground
from oomdoctor.program.names import call_name, own_nodes
from oomdoctor.program.training_loops import called_like_a_model

__all__ = [
    "ADDING",
    "NO_TENSORS",
    "NUMBERS",
    "SMALL",
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
