"""A recurrent state that goes from one step into the next with its graph, which keeps the activations of all steps.

In a loop that trains, in a module that keeps the state itself, or in a loop of which nothing is differentiated. Other
loops are left alone: they may unroll the steps that a later loss is taken over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import Final

from oomdoctor.program.definitions import Loop, Program, Scope, Statement, place, statements, target_names
from oomdoctor.program.ground import Ground
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["carries_state"]

_DETACHES: Final = re.compile(r"detach|repackage|no_grad|\.data\b|init|zeros|reset")


def carries_state(
    program: Program, ground: Ground, idle: Collection[tuple[int, int, str]], *, trains: bool
) -> tuple[str | None, bool]:
    """Return the call that feeds a state back, not detached, and whether it is certain that nothing differentiates it.

    Args:
        program: the cells.
        ground: what of them the failing cell rests on.
        idle: what nothing is differentiated of, ``(cell, line, source text)``.
        trains: the failing cell runs a loop that trains.
    """
    for scope in program.running:
        for statement in statements(scope.body):
            differentiating = [loop for loop in statement.loops if _differentiates(loop)]
            if differentiating and _is_carried(statement, differentiating[-1]):
                return place(scope, statement.node), False
    if (kept := _kept_in_module(program, ground)) is not None:
        return kept, bool(idle) and not trains
    return _carried_idly(program, idle), True


def _carried_idly(program: Program, idle: Collection[tuple[int, int, str]]) -> str | None:
    for scope in program.running:
        lines = {line for number, line, _ in idle if number == scope.cell}
        around = [node for node in own_nodes(scope.body) if isinstance(node, ast.stmt) and node.lineno in lines]
        for statement in statements(scope.body):
            is_idle = any(node.lineno <= statement.node.lineno <= (node.end_lineno or 0) for node in around)
            if is_idle and statement.loops and _is_carried(statement, statement.loops[-1]):
                return place(scope, statement.node)
    return None


def _is_carried(statement: Statement, loop: Loop) -> bool:
    """Whether a statement feeds back a state with its graph, and ``loop`` does not bind it anew."""
    fed = _fed_back(statement.node)
    rebound = any(_rebinds(node, fed, statement.node) for node in own_nodes(loop.body))
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


def _rebinds(node: ast.AST, names: frozenset[str], feeding: ast.stmt) -> bool:
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
