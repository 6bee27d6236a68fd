"""Finds attention that writes out its scores: batch x heads x length x length numbers, which fused kernels never hold.

Told by what is done, not by names: a product, a softmax of it, and a product with that. A function that also calls the
fused kernel is taken to choose it. Models of transformers are asked for such attention by a setting.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from oomdoctor.model.site import Site
from oomdoctor.objects.kinds import name_of, plain_dict, submodules
from oomdoctor.objects.known import Objects
from oomdoctor.program.definitions import Program, Scope, site
from oomdoctor.program.ground import Ground, ground
from oomdoctor.program.names import call_name, own_nodes, target_names

__all__ = ["ASKED", "DROPS", "WRITTEN", "detect"]

WRITTEN: Final = "written out"
ASKED: Final = "asked for"
DROPS: Final = "drops weights"
"""Kinds of sites: a softmax of scores; a setting of a model, with the paths of the models that stand at it and can be
switched; and what drops weights of the attention before it, its text being a layer, ``model.layers[0].drop``, or a
setting, ``model.config.attention_dropout``, of a model in training mode."""

_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum", "baddbmm", "dot"})
_FUSED: Final = frozenset({"scaled_dot_product_attention", "flash_attn_func", "memory_efficient_attention"})
_SHAPES: Final = frozenset({"size", "dim", "shape", "sqrt"})
_HELD: Final = "_attn_implementation_internal"


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the softmax of scores, or the call that asks a model to write them out, and what drops weights."""
    under = ground(program)
    first = next(_written(under), None) or next(_asked(under, objects), None)
    if first is None:
        return ()
    drops = _dropout(under, objects)
    return (first,) if drops is None else (first, replace(first, kind=DROPS, text=drops, names=()))


def _written(under: Ground) -> Iterator[Site]:
    for scope in under.reach:
        names = {call_name(node).rpartition(".")[2] for node in own_nodes(scope.body) if isinstance(node, ast.Call)}
        if not names & _FUSED and (softmax := _softmax_of_scores(scope)) is not None:
            yield site(WRITTEN, scope, softmax)


def _asked(under: Ground, objects: Objects) -> Iterator[Site]:
    eager = [path for path, model in objects.modules if _can_be_switched(model)]
    for scope in under.basis:
        for node in own_nodes(scope.body):
            if (isinstance(node, ast.Call) and _asks_for_it(node)) or (isinstance(node, ast.Assign) and _sets_it(node)):
                yield site(ASKED, scope, node, eager)


def _can_be_switched(model: Any) -> bool:
    """Tell whether a model has a switch for its attention, stands at eager, and does not return the weights."""
    if not inspect.isfunction(inspect.getattr_static(type(model), "set_attn_implementation", None)):
        return False
    todo = [(plain_dict(part) or {}).get("config") for _, part in submodules(model, "")]
    found: dict[int, Mapping[str, Any]] = {}
    while todo:
        held = plain_dict(todo.pop())
        if held is not None and _HELD in held and id(held) not in found:
            found[id(held)] = held
            todo += held.values()
    returns = any(held.get("output_attentions") or held.get("_output_attentions") for held in found.values())
    return not returns and any(held[_HELD] == "eager" for held in found.values())


def _dropout(under: Ground, objects: Objects) -> str | None:
    """Return what drops weights of the attention, as far as it is known to."""
    parts = {path: part for name, root in objects.modules for path, part in submodules(root, name)}
    training = {path: held for path, part in parts.items() if (held := plain_dict(part) or {}).get("training") is True}
    for scope in under.reach:
        if scope.function is not None and _softmax_of_scores(scope) is not None:
            owner, layers = scope.owner, _dropping(scope)
            owners = [path for path in training if name_of(type(parts[path])) == owner]
            found = [f"{path}.{layer}" for path in owners for layer in layers]
            return next((path for path in found if _is_positive(training.get(path, {}).get("p"))), None)
    return next(filter(None, (_setting(path, held) for path, held in training.items())), None)


def _dropping(scope: Scope) -> list[str]:
    """Return the attributes of ``self`` that are called with weights of attention and drop some, by their name."""
    softmaxes = list(_nodes(scope, _is_softmax))
    weights = _bound_to(scope, softmaxes)
    calls = [node for node in own_nodes(scope.body) if isinstance(node, ast.Call)]
    given = [ast.unparse(one.func) for one in calls if _mentions(_arguments(one), weights, softmaxes, through=False)]
    return [name.removeprefix("self.") for name in given if name.startswith("self.") and "drop" in name.lower()]


def _setting(path: str, held: Mapping[str, Any]) -> str | None:
    settings = plain_dict(held.get("config")) or {}
    named = [name for name, value in settings.items() if "drop" in name and "att" in name and _is_positive(value)]
    return f"{path}.config.{named[0]}" if named else None


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and value > 0  # type: ignore[operator]


def _asks_for_it(call: ast.Call) -> bool:
    given = [k.value for k in call.keywords if k.arg in {"attn_implementation", "_attn_implementation"}]
    if call_name(call).endswith("set_attn_implementation"):
        given += call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value == "eager" for value in given)


def _sets_it(node: ast.Assign) -> bool:
    named = "_attn_implementation" in ast.unparse(node.targets[0])
    return named and isinstance(node.value, ast.Constant) and node.value.value == "eager"


def _softmax_of_scores(scope: Scope) -> ast.expr | None:
    products = list(_nodes(scope, _is_product))
    scores = _bound_to(scope, products)
    softmaxes = [node for node in _nodes(scope, _is_softmax) if _mentions(_arguments(node), scores, products)]
    weights = _bound_to(scope, softmaxes)
    for product in products:
        factors = list(_factors(product))
        for softmax in softmaxes:
            if _mentions(factors, weights, [softmax]):
                return softmax
    return None


def _nodes(scope: Scope, holds: Callable[[ast.expr], bool]) -> Iterator[ast.expr]:
    return (node for node in own_nodes(scope.body) if isinstance(node, ast.expr) and holds(node))


def _is_product(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _PRODUCTS


def _is_softmax(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if isinstance(node.func, ast.Call):  # nn.Softmax(dim=-1)(scores)
        return call_name(node.func).rpartition(".")[2] == "Softmax"
    return name.rpartition(".")[2].lower() == "softmax" and not name.endswith("Softmax")


def _arguments(node: ast.expr) -> list[ast.expr]:
    assert isinstance(node, ast.Call)
    own = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    return [*own, *node.args]


def _factors(product: ast.expr) -> Iterator[ast.expr]:
    if isinstance(product, ast.BinOp):
        yield from (product.left, product.right)
    elif isinstance(product, ast.Call):
        yield from _arguments(product)


def _bound_to(scope: Scope, made: list[ast.expr]) -> set[str]:
    """Return the names that hold one of ``made``, scaled, masked or dropped out."""
    names: set[str] = set()
    while True:
        more = {
            name
            for node in own_nodes(scope.body)
            if isinstance(node, ast.Assign | ast.AugAssign) and _mentions([node.value], names, made, through=False)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for name in target_names(target)
        }
        if more <= names:
            return names
        names |= more


def _mentions(values: list[ast.expr], names: set[str], made: list[ast.expr], *, through: bool = True) -> bool:
    """Whether one of ``values`` is made of ``names`` or of ``made``; with ``through`` off, not by another product."""
    waiting: list[ast.AST] = list(values)
    while waiting:
        node = waiting.pop()
        if any(node is one for one in made) or (isinstance(node, ast.Name) and node.id in names):
            return True
        if isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in _SHAPES:
            continue
        if not through and isinstance(node, ast.expr) and (_is_product(node) or _is_softmax(node)):
            continue
        waiting += ast.iter_child_nodes(node)
    return False
