"""The lines that make a name hold more with each round of a loop: what a list, a dict, a frame or an array grows by.

Read from the text alone. Limits: what grows in a function of a library, or by an attribute of an object of the user's,
has no line here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from oomdoctor.program.magics import Loop, tree_of

_ADDS: Final = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "appendleft", "write"})
"""Methods of containers that make them longer."""


@lru_cache(maxsize=64)
def growing(source: str) -> dict[str, int]:
    """Return the first line in a loop that makes each name of a cell hold more, by the name.

    Those are ``name.append(...)`` and its like, ``name[key] = ...``, ``name += ...``, and ``name = join(name, ...)``.
    """
    found: dict[str, int] = {}
    for loop in ast.walk(tree_of(source)):
        if isinstance(loop, Loop):
            for statement in loop.body:
                for node in ast.walk(statement):
                    for name in _grown_by(node):
                        found[name] = min(found.get(name, node.lineno), node.lineno)  # type: ignore[attr-defined]
    return found


def _grown_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node of a loop's body makes hold more."""
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS:
            yield from _name(call.func.value)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        yield from _name(node.target)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield from _name(target.value)
            elif isinstance(target, ast.Name) and isinstance(node.value, ast.Call) and _passes(node.value, target.id):
                yield target.id


def _name(node: ast.expr) -> Iterator[str]:
    """Yield the name that an expression begins with: ``parts`` of ``parts[key].rows``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id


def _passes(call: ast.Call, name: str) -> bool:
    """Whether a call is given a name, in a list or a tuple too: ``np.concatenate([kept, part])``."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    inner = [item for one in given if isinstance(one, ast.List | ast.Tuple) for item in one.elts]
    return any(isinstance(one, ast.Name) and one.id == name for one in (*given, *inner))
