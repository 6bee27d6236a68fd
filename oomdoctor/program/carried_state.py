"""A recurrent state that goes from one step into the next with its graph, which keeps the activations of all steps.

In a loop that trains, in a module that keeps the state itself, or in a loop of which nothing is differentiated. Other
loops are left alone: they may unroll the steps that a later loss is taken over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from oomdoctor.program import words
from oomdoctor.program.definitions import Loop, Program, Scope, Statement, statements
from oomdoctor.program.ground import ground
from oomdoctor.program.names import call_name, own_nodes, target_names

__all__ = ["Carried", "carried_state"]

_ANEW: Final = re.compile(r"detach|repackage|no_grad|\.data\b|init|zeros|reset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A statement that feeds a state back, not detached.

    Attributes:
        names: of the state.
        is_idle: it is certain that nothing differentiates it.
    """

    scope: Scope
    node: ast.Assign
    names: tuple[str, ...]
    is_idle: bool


def carried_state(program: Program, idle: Callable[[], Collection[tuple[int, int]]], *, trains: bool) -> Carried | None:
    """Return the first state that is carried over steps.

    Args:
        program: the cells.
        idle: gives ``(cell, line)`` of what nothing is differentiated of.
        trains: the failing cell runs a loop that trains.
    """
    every = [(scope, one) for scope in program.running for one in statements(scope.body) if one.loops]
    for scope, one in every:
        differentiating = [loop for loop in one.loops if _differentiates(loop)]
        if differentiating and isinstance(one.node, ast.Assign) and _is_carried(one, differentiating[-1]):
            return Carried(scope=scope, node=one.node, names=_fed_back(one.node), is_idle=False)
    for scope in ground(program).reach:
        if (kept := _kept_in_module(program, scope)) is not None:
            return Carried(scope=scope, node=kept, names=_fed_back(kept), is_idle=not trains and bool(idle()))
    for scope, one in every:
        if not isinstance(one.node, ast.Assign) or not _is_carried(one, one.loops[-1]):
            continue
        lines = {line for number, line in idle() if number == scope.cell}
        around = [node for node in own_nodes(scope.body) if isinstance(node, ast.stmt) and node.lineno in lines]
        if any(node.lineno <= one.node.lineno <= (node.end_lineno or 0) for node in around):
            return Carried(scope=scope, node=one.node, names=_fed_back(one.node), is_idle=True)
    return None


def _is_carried(statement: Statement, loop: Loop) -> bool:
    """Whether a statement feeds back a state with its graph, and ``loop`` does not bind it anew."""
    fed = _fed_back(statement.node)
    rebound = any(_rebinds(node, set(fed), statement.node) for node in own_nodes(loop.body))
    return bool(fed) and not statement.is_gradless and not rebound


def _differentiates(loop: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop))


def _fed_back(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a call of several arguments is given and gives back."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return ()
    given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
    if len(given) < 2 or _ANEW.search(ast.unparse(node.value)):
        return ()
    fed = {name for value in given[1:] for name in _texts(value)}
    return tuple(dict.fromkeys(name for target in node.targets for name in _texts(target) if name in fed))


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the plain names and attributes of ``self`` that a target or an argument is, or is a tuple of."""
    if isinstance(node, ast.Tuple | ast.List):
        for part in node.elts:
            yield from _texts(part)
    elif isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and call_name(node).startswith("self.")):
        yield ast.unparse(node)


def _rebinds(node: ast.AST, names: set[str], feeding: ast.stmt) -> bool:
    """Whether a statement other than ``feeding`` cuts the state from its past, or may."""
    match node:
        case ast.Call(func=ast.Attribute(value=base, attr="detach_")):
            return ast.unparse(base) in names
        case ast.For(target=target):
            return bool(names & set(target_names(target)))
        case ast.Assign(targets=targets) if node is not feeding:
            return bool(names & {text for one in targets for text in _texts(one)}) and not _fed_back(node)
        case ast.AnnAssign(target=target):
            return bool(names & set(_texts(target)))
    return False


def _kept_in_module(program: Program, scope: Scope) -> ast.Assign | None:
    """Return the statement of a method that feeds an attribute back which nothing binds anew."""
    if scope.function is None or not scope.function.in_class or scope.function.node.name == "__init__":
        return None
    for node in own_nodes(scope.body):
        fed = {name.removeprefix("self.") for name in _fed_back(node) if name.startswith("self.")}
        if fed and isinstance(node, ast.Assign) and not _is_let_go(program, scope, fed, node):
            return node
    return None


def _is_let_go(program: Program, scope: Scope, attributes: set[str], feeding: ast.Assign) -> bool:
    """Whether any method of the class but ``__init__``, or code outside of classes, binds the attribute anew."""
    assert scope.function is not None
    owner = scope.function.name.rpartition(".")[0]
    for other in program.scopes:
        method = other.function
        if method is not None and (
            method.node.name == "__init__" or method.in_class != (method.name.rpartition(".")[0] == owner)
        ):
            continue
        for node in own_nodes(other.body):
            if node is feeding or not isinstance(node, ast.Assign | ast.Call):
                continue
            cut = [part for target in getattr(node, "targets", ()) for part in _leaves(target)]
            if (
                isinstance(node, ast.Call)
                and words.last_name(node) == "detach_"
                and isinstance(node.func, ast.Attribute)
            ):
                cut = [node.func.value]
            if any(isinstance(part, ast.Attribute) and part.attr in attributes for part in cut):
                return True
    return False


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _leaves(part)
    else:
        yield target
