"""By what expression the cells name the device that a step runs on, so that a changed step goes with them to another.

``torch.autocast`` and ``GradScaler`` take the type of a device as text: ``device.type`` of a ``torch.device``, the
text itself where a string says it, ``torch.device(device).type`` where the cells do not show which of the two it is.

Source: ``torch.amp.autocast_mode.autocast`` refuses ``cuda:0``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from oomdoctor.program.dataflow import bound

__all__ = ["device_text"]


def device_text(loop: ast.AST, around: Iterable[ast.AST], trees: Iterable[ast.Module], kind: str) -> str:
    """Return the source text of the type of the device that ``loop`` moves its batches to, else ``kind`` in quotes.

    Args:
        loop: where the step stands.
        around: the functions that it stands in.
        trees: the cells, for what is said about the device at their top level.
        kind: ``cuda``, as it was found to be.
    """
    literal, trees = f'"{kind}"', list(trees)
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = set(_moved_to(loop)) or {name for tree in trees for name in _moved_to(tree) if "." not in name}
    if len(names) != 1:
        return literal
    (name,) = names
    root = name.partition(".")[0]
    parameters = {part.arg for one in functions for part in ast.walk(one.args) if isinstance(part, ast.arg)}
    top = {one for tree in trees for node in tree.body for one in bound(node)}
    if root not in parameters | top | {one for function in functions for one in bound(function)}:
        return literal
    if name.endswith(".device"):
        return f"{name}.type"
    values = list(_values([*functions, *trees], name)) if root not in parameters else []
    if values and all(map(_is_device, values)):
        return f"{name}.type"
    return name if values and all(map(_is_type, values)) else f"torch.device({name}).type"


def _moved_to(node: ast.AST) -> Iterator[str]:
    """Yield what ``.to`` is told by a name: dtypes and other tensors are told apart by how they are called."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "to":
            given = [*part.args[:1], *(one.value for one in part.keywords if one.arg == "device")]
            for one in given:
                if isinstance(one, ast.Name | ast.Attribute) and "dev" in ast.unparse(one).lower():
                    yield ast.unparse(one)


def _values(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.expr]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and any(ast.unparse(target) == name for target in part.targets):
                yield part.value


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_device(value.body) and _is_device(value.orelse)
    text = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return text in ("torch.device", "device") or (isinstance(value, ast.Attribute) and value.attr == "device")


def _is_type(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_type(value.body) and _is_type(value.orelse)
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and ":" not in value.value
