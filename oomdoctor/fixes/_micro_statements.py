"""Statements of a training step: what each reads and binds, moves, counts or takes out of the batch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from oomdoctor.fixes._micro_values import called
from oomdoctor.fixes._refusals import Unfit
from oomdoctor.program import torch_functions
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.names import arguments_of, blocks_of
from oomdoctor.program.regions import backwards_in
from oomdoctor.program.torch_functions import Result
from oomdoctor.program.training_loops import is_given_loss

MOVES: Final = torch_functions.names_of(Result.MOVED, Result.CAST, Result.TRUNCATED, Result.SHAPED)
TO_DEVICE: Final = frozenset({"to", "cuda"})
_ROWS_OF: Final = MOVES | torch_functions.names_of(Result.DETACHED, Result.NUMBER, Result.NEW)


def units_of(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, those of a branch with ``backward`` one by one."""
    for node in body:
        if backwards_in(node) and not isinstance(node, ast.Expr):
            for block in blocks_of(node):
                yield from units_of(block)
        else:
            yield node


def behind_backward(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements of a branch that stand behind its backward pass."""
    for block in blocks_of(node) if backwards_in(node) else ():
        found = [bool(backwards_in(one)) for one in block]
        yield from block[found.index(True) + 1 :] if any(found) else ()
        for one in block:
            yield from behind_backward(one)


def loss_of(call: ast.Call) -> ast.expr:
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if is_given_loss(called(receiver)) and len(call.args) == 1 and not call.keywords:
        return call.args[0]
    if call.args or call.keywords:
        raise Unfit("backward is called with arguments")
    if isinstance(receiver, ast.Call) and torch_functions.last_name(receiver) == "scale" and len(receiver.args) == 1:
        return receiver.args[0]
    return receiver


def _parts(node: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the dotted attributes that a statement reads or sets."""
    return {
        called(part) for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, context)
    }


def reads_of(node: ast.stmt) -> set[str]:
    return reads(node) | _parts(node, ast.Load)


def binds_of(node: ast.stmt) -> set[str]:
    """Return what a statement binds, attributes among it, and the containers and tensors that it changes in place."""
    changed = {
        called(part.func.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and (part.func.attr in torch_functions.GATHERS - {"add"} or torch_functions.is_in_place(part.func.attr))
    }
    return (bound(node) | _parts(node, ast.Store) | changed) - {""}


def data_of(node: ast.stmt, indices: Collection[str]) -> Iterator[str]:
    """Yield the names that a statement hands on or computes with, not what it calls or takes attributes of by name.

    What is subscripted with ``indices``, names that hold positions of rows, stays whole.
    """
    apart = set[int]()
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and reads(part.slice) & {*indices}:
            apart |= {id(one) for one in ast.walk(part.value)}
        if isinstance(part, ast.Call):
            apart.add(id(part.func))
            of = part.func.value if isinstance(part.func, ast.Attribute) else part.func
            if not isinstance(part.func, ast.Attribute) or part.func.attr not in _ROWS_OF:
                apart.add(id(of))
        elif isinstance(part, ast.Attribute) and part.attr not in {"shape", "data"} and id(part) not in apart:
            apart.add(id(part.value))
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and id(part) not in apart:
            yield part.id


def is_literal(node: ast.stmt) -> bool:
    """Tell whether a statement binds a name to a number or an empty container."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Tuple) and not reads(value)


def unmoved(node: ast.expr, moves: frozenset[str] = TO_DEVICE) -> ast.expr:
    """Return what an expression moves, or itself."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in moves:
        node = node.func.value
    return node


def moves_only(node: ast.stmt, moves: frozenset[str]) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return all(isinstance(unmoved(value, moves), ast.Name) for value in values)


def only_counted(nodes: Iterable[ast.stmt], name: str) -> bool:
    """Whether statements ask ``name`` for its length alone, which a move to a device leaves as it is."""
    counts = {f"len({name})", f"{name}.size(0)", f"{name}.shape[0]"}
    return all(
        sum(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))
        == sum(ast.unparse(part) in counts for part in ast.walk(node) if isinstance(part, ast.expr))
        for node in nodes
    )


def makes_tensor(node: ast.stmt) -> bool:
    value = unmoved(node.value) if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.Call) and called(value.func).partition(".")[0] == "torch"


def selects(node: ast.stmt, indices: Collection[str]) -> bool:
    """Tell whether a statement takes entries by a mask, which is none of ``indices``: positions of rows."""
    value = node.value if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name) and value.slice.id not in indices


def counts_only(node: ast.stmt) -> bool:
    """Tell whether a statement binds a name to a size of a tensor."""
    value = node.value if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None
    match value:
        case ast.Call(func=ast.Name(id="len")) | ast.Call(func=ast.Attribute(attr="size")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
    return False


def takes_out(node: ast.Assign, batch: str) -> bool:
    match node.targets[0], node.value:
        case ast.Tuple(), ast.Tuple(elts=parts):
            return all(_is_item(unmoved(part), batch) for part in parts)
        case ast.Tuple(), value:
            return isinstance(value, ast.Name) and value.id == batch
        case ast.Name(), value:
            return _is_item(unmoved(value), batch)
    return False


def _is_item(node: ast.expr, batch: str) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant()):
            return name == batch
    return False


def kind_of_batch(block: Sequence[ast.stmt], names: Sequence[str], functions: Mapping[str, ast.FunctionDef]) -> str:
    for part, name in _uses(block, names[0], functions) if len(names) == 1 else ():
        match part:
            case ast.Subscript(value=of, slice=ast.Constant(value=key)) if called(of) == name:
                return "dict" if isinstance(key, str) else "list"
            case ast.keyword(arg=None, value=of) if called(of) == name:
                return "dict"
            case ast.Call(func=ast.Attribute(value=of, attr="items" | "pop")) if called(of) == name:
                return "dict"
            case ast.Assign(targets=[ast.Tuple(), *_], value=of) if called(of) == name:
                return "list"
    return "tensors"


def key_of(block: Sequence[ast.stmt], name: str, functions: Mapping[str, ast.FunctionDef]) -> str:
    """Return the first constant that ``name`` is subscripted with, empty where there is none."""
    for part, of in _uses(block, name, functions):
        match part:
            case ast.Subscript(value=value, slice=ast.Constant() as key) if called(value) == of:
                return ast.unparse(key)
    return ""


def _uses(
    block: Sequence[ast.stmt], name: str, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may use a name, and how it is called there: in functions that it is given to, by their parameter."""
    for part in (part for node in block for part in ast.walk(node)):
        yield part, name
        if not isinstance(part, ast.Call):
            continue
        owner, _, method = called(part.func).rpartition(".")
        function = functions.get(f"self.{method}" if owner and owner != name else method)
        if function is not None:
            given = [one for one, value in arguments_of(part, function).items() if called(value) == name]
            inner = {one: node for one, node in functions.items() if node is not function}
            yield from (use for one in given for use in _uses(function.body, one, inner))
