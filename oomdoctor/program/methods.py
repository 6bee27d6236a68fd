"""Changed methods of a class that an earlier cell defines, as statements that give them to the class that is there.

Running the definition again would make another class, which the live objects are none of. A method is given to the
class that there is, where nothing of it was needed to make the objects: ``__init__`` and what it calls have run.
Methods with ``super()`` or private names are compiled with the class that they stand in, so they are left alone.
"""

from __future__ import annotations

import re
from typing import Final

import libcst as cst

__all__ = ["MAKING", "given_to_class"]

_BOUND_TO_CLASS: Final = re.compile(r"\bsuper\b|\b__class__\b|(?<!\w)__[a-zA-Z]\w*(?<!__)\b")
MAKING: Final = re.compile(r"__(?!call__)\w+__|setup|reset_parameters|extra_repr")
"""Names of methods that run when an object is made, or may."""


def given_to_class(before: cst.Module, after: cst.Module, changed: cst.ClassDef, holder: str) -> str | None:
    """Return what gives the changed methods of a class to the live one, None where they cannot be given to it.

    Args:
        before: the cell, as it was.
        after: the cell, as it is to be.
        changed: a class at its top level.
        holder: a name that nothing has, for as long as the statements run.
    """
    found = [node for node in before.body if isinstance(node, cst.ClassDef) and node.name.value == changed.name.value]
    if len(found) != 1 or _header(before, found[0]) != _header(after, changed):
        return None
    pairs = list(zip(found[0].body.body, changed.body.body, strict=False))
    if len(found[0].body.body) != len(changed.body.body):
        return None
    methods = [new for old, new in pairs if before.code_for_node(old) != after.code_for_node(new)]
    made = "".join(before.code_for_node(node) for node in found[0].body.body if _is_making(node))
    name, given = changed.name.value, list[str]()
    for method in methods:
        if not isinstance(method, cst.FunctionDef) or method.decorators or _is_making(method):
            return None
        called = method.name.value
        if _BOUND_TO_CLASS.search(after.code_for_node(method)) or re.search(rf"\.{called}\b", made):
            return None
        given += [f"{name}.{called} = {holder}.{called}", f'{name}.{called}.__qualname__ = "{name}.{called}"']
    held = cst.ClassDef(name=cst.Name(holder), body=changed.body.with_changes(body=methods))
    return "\n".join([after.code_for_node(held), *given, f"del {holder}", ""])


def _header(module: cst.Module, node: cst.ClassDef) -> str:
    return module.code_for_node(node.with_changes(body=cst.SimpleStatementSuite([cst.Pass()]), leading_lines=()))


def _is_making(node: cst.CSTNode) -> bool:
    """Whether ``node`` is a method that runs when an object is made, or may."""
    return isinstance(node, cst.FunctionDef) and MAKING.fullmatch(node.name.value) is not None
