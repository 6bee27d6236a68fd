"""Whether a loader is gone through by plain loops alone, which take the first batch as soon as they begin.

``zip``, ``iter`` and libraries may begin with a loader and draw random numbers before they take a batch from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from oomdoctor.model.code import TrainingLoop
from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["looped", "steps_within"]

_WRAPPERS: Final = frozenset({"enumerate", "tqdm", "notebook_tqdm", "track", "progress_bar"})


def looped(program: Program, path: str) -> bool:
    """Return whether a loop goes through the loader, and nothing else in the cells begins with it."""
    found = [_uses(program, scope, path) for scope in program.scopes]
    return any(loops for loops, _ in found) and not any(others for _, others in found)


def steps_within(scopes: Iterable[Scope], loop: TrainingLoop, context: str, flag: str) -> bool:
    """Return whether a loop steps as a context of a library says, and by no count of its own.

    Args:
        context: how the name of what the loop enters ends.
        flag: what is asked before gradients are clipped: those of parts must not be before they are all there.
    """
    for scope in scopes:
        for node in own_nodes(scope.body) if scope.cell == loop.cell else ():
            if isinstance(node, ast.For) and node.lineno == loop.line:
                inner = list(own_nodes(node.body))
                items = [item.context_expr for one in inner if isinstance(one, ast.With) for item in one.items]
                tests = [one.test for one in inner if isinstance(one, ast.If)]
                counts = any(isinstance(part, ast.Mod) for test in tests for part in ast.walk(test))
                waits = "clip" not in loop.order or any(flag in ast.unparse(test) for test in tests)
                return waits and not counts and any(call_name(one).endswith(context) for one in items)
    return False


def _uses(program: Program, scope: Scope, path: str) -> tuple[bool, bool]:
    """Return whether loops of ``scope`` go through the loader, and whether anything else uses it as a whole."""
    given = program.arguments.get(scope.function.name, ()) if scope.function is not None else ()
    names = {path, *(name for name, text in given if text == path)}
    nodes = list(own_nodes(scope.body))
    plain: set[int] = set()
    loops = False
    for node in nodes:
        for iterated in _iterated(node):
            loops = loops or ast.unparse(iterated) in names
            plain.add(id(iterated))
        plain |= {id(one) for one in _harmless(program, node)}
    used = (node for node in nodes if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", None), ast.Load))
    return loops, any(id(node) not in plain and ast.unparse(node) in names for node in used)


def _iterated(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a loop or a comprehension goes through, without ``enumerate`` and ``tqdm``."""
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        inner = node.iter
        while isinstance(inner, ast.Call) and call_name(inner).rpartition(".")[2] in _WRAPPERS and inner.args:
            inner = inner.args[0]
        yield inner


def _harmless(program: Program, node: ast.AST) -> Iterator[ast.expr]:
    """Yield what is only asked for a part, or handed to a function of the cells, which is looked at itself."""
    if isinstance(node, ast.Attribute):
        yield node.value
    if not isinstance(node, ast.Call):
        return
    name = call_name(node)
    if name == "next" and node.args and isinstance(node.args[0], ast.Call) and call_name(node.args[0]) == "iter":
        yield from node.args[0].args
    if name == "len" or (name and program.function(name) is not None):
        yield from (*node.args, *(keyword.value for keyword in node.keywords))
