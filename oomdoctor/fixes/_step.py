"""Plans how the body of a training loop is taken apart: once before, for each part of the batch, once after.

The statements up to ``backward`` are sorted by what they depend on. Those that lead from the batch to the loss are
repeated for each part. Those that do not depend on the batch (zeroing
gradients) go before them; those that use their results (accounting) go after, and get the loss of the whole batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oomdoctor.fixes._samples import CannotSplit, LossForm, Samples, Shape, Value, called
from oomdoctor.fixes._step_results import Parts, gathered, numbers_used, to_hoist, unmoved, used_after
from oomdoctor.program.dataflow import Loop, ancestors, bound, own, reads
from oomdoctor.program.names import read_first

__all__ = ["Split", "Step", "plan"]

_WEIGHED: Final = {"rows": Value(shape=Shape.MEAN), "sum": Value(shape=Shape.SUM)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What is known of the names and objects that the loop uses."""

    batch: tuple[str, ...]
    models: Mapping[str, str]
    losses: Mapping[str, LossForm]
    optimizers: tuple[str, ...]
    masks_targets: bool = False
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The plan. Numbers are places in the body of the loop.

    Attributes:
        names: what is split, in the order of the loop's target.
        kind: ``tensors`` (each name is one), ``dict`` or ``list`` (one name holds several).
        key: source text of an entry that is taken of that one name, empty where none is by itself.
        before, inner, after: statements up to ``backward``, which is the last of ``inner``.
        loss: the name of the loss, None if ``backward`` is called on an expression.
        form: its reduction: mean or sum, over all or over the counted entries of a target.
        keeps_loss: the loss is used after the step.
        gathered: names whose parts are joined again because they are used after the step.
        summed: numbers that are used after the step, and whether each is a mean over the samples of its part.
    """

    names: tuple[str, ...]
    kind: str
    before: tuple[int, ...]
    inner: tuple[int, ...]
    after: tuple[int, ...]
    loss: str | None
    form: Value
    keeps_loss: bool
    gathered: tuple[str, ...]
    summed: tuple[tuple[str, bool], ...] = ()
    key: str = ""


def plan(tree: ast.Module, loop: Loop, split: Split, weigh: str = "") -> Step:
    """Return the plan for ``loop``, which stands in ``tree``.

    Args:
        weigh: what the loss is a mean or a sum over: ``counted``, ``sum`` or ``rows``; empty to read it.

    Raises:
        CannotSplit: the step cannot be taken apart with its meaning kept.
    """
    at, loss = _backward(loop)
    region = list(loop.body[: at + 1])
    _check_order(loop, at, split)
    names, unpacked = _unpacked(region, split.batch)
    if not names:
        raise CannotSplit("no name in the loop is known to hold the batch")
    hoisted = set(unpacked)
    while True:
        before, inner, after = _sorted(region, names, hoisted, split.models)
        more = to_hoist(tree, loop, at, (before, inner, after), names, loss)
        if not more:
            break
        hoisted |= more
    _check_after(loop.body, after, split)
    samples = Samples(
        names={},
        models=split.models,
        losses=split.losses,
        masks_targets=split.masks_targets or weigh == "counted",
        functions=split.functions,
    )
    kind = _kind([loop.body[place] for place in inner], names, split.functions)
    shape = Shape.ROWS if kind == "tensors" else Shape.BATCH
    samples.names.update({name: Value(shape=shape, entries=name) for name in names})
    _check_carried(loop.body, inner, names)
    for place in inner[:-1]:
        samples.follow(loop.body[place])
    form = _WEIGHED.get(weigh) or samples.value(loss)
    used = used_after(tree, loop, at, (before, after))
    summed = numbers_used(loop.body, inner, used, loss, samples)
    joined = gathered(loop.body, inner, used - dict(summed).keys(), names, loss, samples)
    name = loss.id if isinstance(loss, ast.Name) else None
    top_level = not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ancestors(tree, loop))
    return Step(
        names=tuple(n for n in names if any(n in reads(loop.body[i]) for i in inner)),
        kind=kind,
        before=before,
        inner=inner,
        after=after,
        loss=name,
        form=form,
        keeps_loss=name is not None and (name in used or top_level),
        gathered=joined,
        summed=summed,
        key="" if kind == "tensors" else _key([loop.body[place] for place in inner], names[0]),
    )


def _backward(loop: Loop) -> tuple[int, ast.expr]:
    """Return the place of the one ``backward`` and the expression that it is called on."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and _method(node) == "backward"]
    if any(isinstance(node, ast.FunctionDef) and any(c in ast.walk(node) for c in calls) for node in ast.walk(loop)):
        raise CannotSplit("the step is a closure that the optimizer calls")
    if not calls:
        raise CannotSplit("backward is called in a function that the loop calls, not by the loop itself")
    if len(calls) != 1:
        raise CannotSplit(f"the loop calls backward {len(calls)} times, not once")
    for at, node in enumerate(loop.body):
        if isinstance(node, ast.Expr) and node.value is calls[0]:
            return at, _loss_of(calls[0])
    raise CannotSplit("backward is not called by a statement of the loop itself")


def _loss_of(call: ast.Call) -> ast.expr:
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if called(receiver) in {"accelerator", "fabric", "self.accelerator", "self.fabric"} and len(call.args) == 1:
        return call.args[0]
    if call.args or call.keywords:
        raise CannotSplit("backward is called with arguments")
    if _method(receiver) == "scale" and isinstance(receiver, ast.Call) and len(receiver.args) == 1:
        return receiver.args[0]
    return receiver


def _method(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _check_order(loop: Loop, at: int, split: Split) -> None:
    steps = [
        place
        for place, node in enumerate(loop.body)
        for part in own(node)
        if isinstance(part, ast.Call) and _steps(part, split.optimizers)
    ]
    if not steps:
        raise CannotSplit("no optimizer is stepped in the loop")
    if min(steps) < at:
        raise CannotSplit("the optimizer is stepped before backward")


def _steps(call: ast.Call, optimizers: Sequence[str]) -> bool:
    if _method(call) != "step" or not isinstance(call.func, ast.Attribute):
        return False
    of = called(call.args[0]) if call.args else called(call.func.value)
    if called(call.func.value) in optimizers and call.args:
        raise CannotSplit("the optimizer is stepped with a closure")
    return of in optimizers


def _unpacked(region: list[ast.stmt], batch: tuple[str, ...]) -> tuple[tuple[str, ...], set[int]]:
    """Return the names that hold the tensors of the batch, and the statements that took them out of it."""
    if len(batch) != 1:
        return batch, set()
    out: list[str] = []
    places: set[int] = set()
    others = [node for node in region if batch[0] in reads(node)]
    for place, node in enumerate(region):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _takes_out(node, batch[0]):
            out += [name for name in _order(node.targets[0]) if name not in out]
            places.add(place)
    whole = places and len(places) == len(others) and batch[0] not in out
    return (tuple(out), places) if whole else (batch, set())


def _takes_out(node: ast.Assign, batch: str) -> bool:
    target, value = node.targets[0], node.value
    if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
        return all(_is_item(unmoved(part), batch) for part in value.elts)
    if isinstance(target, ast.Tuple):
        return isinstance(value, ast.Name) and value.id == batch
    return isinstance(target, ast.Name) and _is_item(unmoved(value), batch)


def _is_item(node: ast.expr, batch: str) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == batch
        and isinstance(node.slice, ast.Constant)
    )


def _order(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _sorted(region: list[ast.stmt], names: Sequence[str], hoisted: set[int], models: Iterable[str]) -> Parts:
    """Return the places of ``before``, ``inner`` and ``after``."""
    last = len(region) - 1
    needed, slice_ = reads(region[last]), {last}
    for place in range(last - 1, -1, -1):
        if bound(region[place]) & needed:
            slice_.add(place)
            needed |= reads(region[place])
    tainted, before, inner, after = set(names), list[int](), list[int](), list[int]()
    for place, node in enumerate(region):
        # What is made from the parameters (a penalty on weights) has a graph, which each backward needs anew.
        again = place in slice_ and bool(_roots(models) & reads(node)) and not _is_moved_itself(node)
        depends = (again or bool(reads(node) & tainted)) and place not in hoisted
        late = {name for other in inner + after for name in reads(region[other])} & bound(node)
        if depends:
            tainted |= bound(node)
            (inner if place in slice_ else after).append(place)
        elif late and place not in hoisted and place not in slice_:
            after.append(place)
        elif late and place not in hoisted:
            raise CannotSplit(f"`{', '.join(sorted(late))}` is bound anew in the middle of the step")
        else:
            before.append(place)
    return tuple(before), tuple(inner), tuple(after)


def _roots(texts: Iterable[str]) -> set[str]:
    return {text.partition(".")[0] for text in texts}


def _is_moved_itself(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(unmoved(node.value)) == ast.unparse(node.targets[0])


def _check_after(body: list[ast.stmt], after: Sequence[int], split: Split) -> None:
    for place in after:
        node = body[place]
        leaves = any(isinstance(part, ast.Continue | ast.Break | ast.Return | ast.Raise) for part in ast.walk(node))
        if leaves or not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.If):
            raise CannotSplit(f"line {node.lineno} decides between the batch and backward how the step goes on")
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and called(part.func) in split.models:
                raise CannotSplit(f"`{ast.unparse(part)}` on line {part.lineno} runs the model beside the loss")


def _kind(block: Sequence[ast.stmt], names: Sequence[str], functions: Mapping[str, ast.FunctionDef]) -> str:
    if len(names) != 1:
        return "tensors"
    (name,) = names
    for part in (part for node in block for part in ast.walk(node)):
        if isinstance(part, ast.Subscript) and called(part.value) == name and isinstance(part.slice, ast.Constant):
            return "dict" if isinstance(part.slice.value, str) else "list"
        if isinstance(part, ast.keyword) and part.arg is None and called(part.value) == name:
            return "dict"
        if isinstance(part, ast.Call) and called(part.func) in {f"{name}.items", f"{name}.pop"}:
            return "dict"
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Tuple) and called(part.value) == name:
            return "list"
        if isinstance(part, ast.Call) and (function := functions.get(called(part.func))) is not None:
            parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            given = [p for p, value in zip(parameters, part.args, strict=False) if called(value) == name]
            given += [keyword.arg for keyword in part.keywords if keyword.arg and called(keyword.value) == name]
            inner = {one: node for one, node in functions.items() if node is not function}
            found = _kind(function.body, given, inner) if given else "tensors"
            if found != "tensors":
                return found
    return "tensors"


def _key(block: Sequence[ast.stmt], name: str) -> str:
    """Return the first constant that ``name`` is subscripted with, empty where there is none."""
    parts = (part for node in block for part in ast.walk(node))
    taken = (part for part in parts if isinstance(part, ast.Subscript) and called(part.value) == name)
    return next((ast.unparse(one.slice) for one in taken if isinstance(one.slice, ast.Constant)), "")


def _check_carried(body: list[ast.stmt], inner: Sequence[int], names: Sequence[str]) -> None:
    written = {name for place in inner for name in bound(body[place])} - set(names)
    carried = read_first([body[place] for place in inner]) & written
    if carried:
        raise CannotSplit(f"`{', '.join(sorted(carried))}` is carried from one batch to the next")
