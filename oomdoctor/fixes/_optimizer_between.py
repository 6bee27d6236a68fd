"""What stands between a backward pass and its step, and may look at parameters that were stepped by then.

Told from the text of the cells: of a statement there, every call and every attribute has to be one that is known to
deal with losses and counts alone. Limits: loops of libraries, whose text is not looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomdoctor.objects.kinds import Kind, kind_of
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import blocks_of

__all__ = ["looks_at_parameters"]

_FUNCTIONS: Final = frozenset(
    {"print", "len", "float", "int", "str", "sum", "round", "max", "min", "abs", "range", "zip", "enumerate", "format"}
)
_ATTRIBUTES: Final = frozenset(
    {"item", "append", "extend", "detach", "cpu", "numpy", "tolist", "size", "mean", "sum", "max", "argmax", "eq"}
    | {"step", "zero_grad", "set_postfix", "set_description", "write", "format", "add_scalar", "shape", "dtype"}
    | {"device", "time", "perf_counter", "info"}
)
"""Methods and attributes that give no parameter: of losses and outputs, of lists, and of what shows them."""


def looks_at_parameters(source: str, namespace: Mapping[str, Any]) -> str | None:
    """Return the statement between a backward pass and the step after it that may, None where there is none."""
    tree = parsed(source)
    for node in _between(tree) if tree is not None else ():
        if not all(_is_harmless(part, namespace) for part in ast.walk(node)):
            return ast.unparse(node).split("\n", 1)[0]
    return None


def _between(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        for block in blocks_of(node):
            backward = [at for at, one in enumerate(block) if _calls(one, "backward")]
            steps = [at for at, one in enumerate(block) if _calls(one, "step")]
            if backward and steps:
                yield from (one for one in block[backward[0] + 1 : steps[-1]] if not _calls(one, "backward"))


def _calls(node: ast.AST, method: str) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == method
        for part in ast.walk(node)
    )


def _is_harmless(node: ast.AST, namespace: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in _FUNCTIONS
        if not isinstance(node.func, ast.Attribute):
            return False
        return node.func.attr != "step" or not (node.args or node.keywords)
    if isinstance(node, ast.Attribute):
        is_of_one = isinstance(node.value, ast.Name) and node.attr in ("step", "zero_grad")
        return node.attr in _ATTRIBUTES and (is_of_one or not _is_model(node.value, namespace))
    return True


def _is_model(node: ast.AST, namespace: Mapping[str, Any]) -> bool:
    """Whether it is a name of a model or of a parameter."""
    held = namespace.get(node.id) if isinstance(node, ast.Name) else None
    return kind_of(type(held)) is Kind.MODULE or type(held).__name__ == "Parameter"
