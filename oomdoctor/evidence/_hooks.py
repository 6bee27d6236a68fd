"""Hooks of modules that keep what passes through them: what is appended, or stored with its graph, stays on the device.

Only hooks whose function stands in a cell are judged, by its text; whether the hook was removed since is not seen.
"""

from __future__ import annotations

import ast
import re
from typing import Final

from oomdoctor.evidence._kept import ADDING, NO_TENSORS, NUMBERS, SMALL, off_device
from oomdoctor.program.definitions import Program, Scope, place, target_names
from oomdoctor.program.flow import Flow
from oomdoctor.program.ground import Ground
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["hooks"]

_HOOK: Final = re.compile(r"(^|\.)register_(module_)?(full_)?(forward|backward)(_pre)?_hook$")
_PASSING: Final = Flow(makes=lambda _: False, stops=SMALL, numbers=NUMBERS, drops=NO_TENSORS)


def hooks(program: Program, ground: Ground) -> str | None:
    """Return where a hook is registered whose function keeps what passes through it, on the device."""
    for scope in ground.basis:
        for node in own_nodes(scope.body):
            registers = isinstance(node, ast.Call) and _HOOK.search(ast.unparse(node.func))
            if registers and isinstance(node, ast.Call) and node.args and _keeps(program, node.args[0]):
                return place(scope, node)
    return None


def _keeps(program: Program, hook: ast.expr) -> bool:
    if isinstance(hook, ast.Lambda):
        return _adds(hook.body, {arg.arg for arg in hook.args.args})
    if isinstance(hook, ast.Call) and call_name(hook).rpartition(".")[2] == "partial" and hook.args:
        return _keeps(program, hook.args[0])
    name = call_name(hook).rpartition(".")[2]
    candidates = [s for s in program.scopes if s.function and s.function.name.rpartition(".")[2] == name]
    if isinstance(hook, ast.Call):  # a function that makes the hook
        candidates = [s for s in program.scopes if s.function and f"{name}.<locals>." in s.function.name]
    return any(_function_keeps(scope) for scope in candidates)


def _function_keeps(scope: Scope) -> bool:
    assert scope.function is not None
    given = {arg.arg for arg in scope.function.node.args.args}
    while True:
        more = {
            name
            for node in own_nodes(scope.body)
            if isinstance(node, ast.Assign) and _PASSING.carries(node.value, given) and not off_device(node.value)
            for target in node.targets
            for name in target_names(target)
        }
        if more <= given:
            break
        given |= more
    return any(_adds(node, given) for node in own_nodes(scope.body))


def _adds(node: ast.AST, given: set[str]) -> bool:
    """Whether a tensor among ``given`` is added to a collection, or stored with its graph."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDING and node.args:
        return _PASSING.carries(node.args[-1], given) and not off_device(node.args[-1])
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
        value = node.value
        return _PASSING.carries(value, given) and not off_device(value) and "detach" not in ast.unparse(value)
    return False
