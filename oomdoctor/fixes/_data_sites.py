"""Finds where a whole data set is put on the device, outside of any loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from oomdoctor.model.site import Site
from oomdoctor.objects.known import Objects
from oomdoctor.program.definitions import Program, Scope, site, statements
from oomdoctor.program.ground import Ground, ground
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["detect"]

_WHOLE: Final = re.compile(r"(^|_)(dataset|data|graph)(_|$)", re.IGNORECASE)
_FACTORIES: Final = re.compile(r"^torch\.(tensor|as_tensor|randn|rand|randint|zeros|ones|empty|load|arange|full)$")
_DATASETS: Final = frozenset({"TensorDataset", "DataLoader", "Subset", "random_split", "StackDataset"})


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the statement that puts a whole data set on the device, outside of any loop.

    What is put there counts as a data set if batches are cut from it, if it is handed to a ``Dataset``, or if it is
    called one.
    """
    del objects
    under = ground(program)
    for scope in under.basis:
        for statement in statements(scope.body):
            if statement.loops:
                continue
            for name, value in _placed(statement.node):
                if _WHOLE.search(name) or _is_data_set(under, name):
                    return (site("placed", scope, value, (name,)),)
            if _hands_over(statement.node):
                return (site("handed over", scope, statement.node),)
    return ()


def _placed(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is bound to something that is put on a device as a whole."""
    if not isinstance(node, ast.Assign):
        return
    pairs = [(target, node.value) for target in node.targets]
    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
    for target, value in pairs:
        if isinstance(target, ast.Name | ast.Attribute) and _puts_on_device(value):
            yield ast.unparse(target), value


def _puts_on_device(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if _FACTORIES.match(call_name(value)):
        return any(keyword.arg == "device" and _is_device(keyword.value) for keyword in value.keywords)
    if value.func.attr == "cuda":
        return True
    if value.func.attr == "to":
        return any(
            _is_device(part) for part in [*value.args[:1], *(k.value for k in value.keywords if k.arg == "device")]
        )
    return _puts_on_device(value.func.value)  # moved, and then cast or shaped


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str | int) and value.value not in {"cpu", "meta"}
    text = ast.unparse(value)
    return re.search(r"device|cuda|^dev$|^gpu", text, re.IGNORECASE) is not None and "'cpu'" not in text


def _is_data_set(ground: Ground, name: str) -> bool:
    """Whether batches are cut from ``name`` by an index that varies, or it is handed to a ``Dataset``."""
    for scope in ground.basis:
        for node in own_nodes(scope.body):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name and isinstance(node.ctx, ast.Load):
                inside = list(ast.walk(node.slice))
                if any(isinstance(part, ast.Name) for part in inside) and _in_loop_or_function(scope, node):
                    return True
            if _is_handed_over(node, name):
                return True
    return False


def _is_handed_over(node: ast.AST, name: str) -> bool:
    makes = isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in _DATASETS
    return makes and isinstance(node, ast.Call) and name in map(ast.unparse, node.args)


def _in_loop_or_function(scope: Scope, node: ast.AST) -> bool:
    if scope.function is not None:
        return True
    loops = (n for n in own_nodes(scope.body) if isinstance(n, ast.For | ast.While))
    return any(node is inner for loop in loops for inner in ast.walk(loop))


def _hands_over(node: ast.stmt) -> bool:
    """Whether a data set is made of what is moved on the way."""
    return any(
        isinstance(call, ast.Call)
        and call_name(call).rpartition(".")[2] == "TensorDataset"
        and any(map(_puts_on_device, call.args))
        for call in ast.walk(node)
    )
