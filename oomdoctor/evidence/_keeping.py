"""Places where a loop keeps a tensor together with the autograd graph that made it.

A name carries a graph if it was made from a call of a model or a loss and not detached. A place counts only if nothing
can differentiate what is kept there: its list or sum starts out empty, and all that any cell does with it is to fill,
measure or print it, or to read plain numbers from it. One that is returned, handed on, or given a second name is left
out, as is a sum of losses whose graph ``backward`` has freed. What later cells will do is not known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final

from oomdoctor.program.definitions import Program, Scope, statements, target_names
from oomdoctor.program.flow import Flow
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["history_appends"]

_DETACHING: Final = frozenset(
    {"item", "detach", "numpy", "tolist", "argmax", "size", "numel", "dim", "eq", "ne", "gt", "lt", "ge", "le"}
)
_PLAIN: Final = frozenset({"float", "int", "len", "str", "print", "round", "range", "isinstance", "type", "bool"})
_PLAIN_ATTRIBUTES: Final = frozenset({"shape", "data", "device", "dtype", "grad"})
_READERS: Final = frozenset({"len", "print", "float", "int", "bool"})
_NUMBERS: Final = frozenset({"item", "tolist", "detach"})
_FILLING: Final = frozenset({"append", "appendleft", "add"})
_SHAPING: Final = frozenset({"mean", "sum", "min", "max", "cpu", "float", "double"})
_JOINING: Final = frozenset({"sum", "torch.stack", "torch.cat", "torch.sum", "torch.mean"})
_BY_TEXT: Final = frozenset({"globals", "locals", "vars", "eval", "exec"})
_EMPTY: Final = frozenset({"list", "set", "deque", "collections.deque"})
_ZERO: Final = frozenset({"torch.zeros", "torch.tensor"})


def history_appends(program: Program, kinds: Mapping[str, str]) -> tuple[tuple[int, int, str], ...]:
    """Return ``(cell, line, source text)`` of each, for what the failing cell runs."""
    found = {place for scope in program.running for place in _places(program, scope, kinds)}
    return tuple(sorted(found))


def _places(program: Program, scope: Scope, kinds: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    if scope.disables_grad:
        return
    arguments = dict(program.arguments.get(scope.function.name, ())) if scope.function else {}
    paths = {path for path, kind in kinds.items() if kind in {"model", "loss"}}
    sources = paths | {name for name, path in arguments.items() if path in paths}
    flow = Flow(makes=sources.__contains__, stops=_DETACHING, numbers=_PLAIN, drops=_PLAIN_ATTRIBUTES)
    carrying = flow.names(scope)
    backed = _backed(scope)
    for statement in statements(scope.body):
        node, kept = statement.node, _kept(statement.node)
        if not statement.loops or statement.is_gradless or kept is None or not flow.carries(kept[1], carrying):
            continue
        is_sum = isinstance(node, ast.AugAssign | ast.Assign)
        if (is_sum and _names(kept[1]) & backed) or not _stays_undifferentiated(program, scope, kept[0], is_sum=is_sum):
            continue
        yield scope.cell, node.lineno, ast.unparse(node)


def _kept(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the container or sum, and what is put into it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) == 1:
        name, _, method = call_name(node.value).rpartition(".")
        if name and method in _FILLING:
            return name, node.value.args[0]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return ast.unparse(node.target), node.value
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
        target = ast.unparse(node.targets[0])
        if target == ast.unparse(node.value.left):
            return target, node.value.right
    return None


def _backed(scope: Scope) -> set[str]:
    """Return the names that ``backward`` is called on themselves: their graph is freed by it."""
    return {
        name
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        for name in _names(node.func.value) | {name for arg in node.args for name in _names(arg)}
    }


def _names(value: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _stays_undifferentiated(program: Program, scope: Scope, name: str, *, is_sum: bool) -> bool:
    """Whether the cells show that nothing kept under ``name`` reaches a gradient. What is not understood counts as no.

    A local name that is a global one too is refused, so that a name alone says which of them is meant.
    """
    if not name.isidentifier():
        return False
    tops: list[ast.AST] = [node for top in program.scopes if top.function is None for node in top.body]
    nodes = _meaning(tops, name)
    if scope.function is not None and _is_local(scope.function.node, name):
        if any(_mentions(node, name) for node in nodes):
            return False
        nodes = list(ast.walk(scope.function.node))
    elif scope.function is not None and "<locals>" in scope.function.name:
        return False
    if any(re.search(rf"\b{name}\b", text) for cell in program.masked.values() for _, text in cell.hidden):
        return False
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    starts = [start for use in uses if isinstance(use.ctx, ast.Store) for start in _starts(use, parents)]
    return (
        all(_is_harmless(program, use, parents) for use in uses)
        and bool(starts)
        and all(_is_empty(start, is_sum=is_sum) for start in starts)
        and not any(_binds_otherwise(node, name) for node in nodes)
        and not any(
            isinstance(node, ast.Call) and call_name(node) in _BY_TEXT for top in tops for node in ast.walk(top)
        )
    )


def _meaning(body: list[ast.AST], name: str) -> list[ast.AST]:
    """Return the nodes below ``body`` in which ``name`` would be the global one."""
    found: list[ast.AST] = []
    for node in body:
        found.append(node)
        below = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_local(node, name):
            defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value is not None]
            below = [*node.decorator_list, *defaults]
        found += _meaning(below, name)
    return found


def _is_local(function: ast.AST, name: str) -> bool:
    """Whether ``name`` is a parameter of the function or bound in it."""
    inside = list(ast.walk(function))
    if any(isinstance(node, ast.Global | ast.Nonlocal) and name in node.names for node in inside):
        return False
    own = own_nodes(ast.iter_child_nodes(function))
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == name)
        for node in own
    )


def _mentions(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or _binds_otherwise(node, name)


def _binds_otherwise(node: ast.AST, name: str) -> bool:
    """Whether an import, a definition, a parameter or a handler binds ``name``."""
    return name in {getattr(node, field, None) for field in ("name", "asname", "arg", "rest")} and not isinstance(
        node, ast.keyword
    )


def _starts(use: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.expr | None]:
    """Yield what the binding at ``use`` starts the name from, nothing where it goes on from itself, None if unclear."""
    parent = parents.get(use)
    if isinstance(parent, ast.AugAssign):
        return
    if isinstance(parent, ast.Tuple) and isinstance(assign := parents.get(parent), ast.Assign):
        value = assign.value
        alike = isinstance(value, ast.Tuple) and len(value.elts) == len(parent.elts) and len(assign.targets) == 1
        starred = any(isinstance(item, ast.Starred) for item in (*parent.elts, *getattr(value, "elts", ())))
        yield value.elts[parent.elts.index(use)] if alike and not starred else None  # type: ignore[attr-defined,arg-type]
    elif isinstance(parent, ast.Assign):
        value, names = parent.value, target_names(parent.targets[0])
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Name) and names == (value.left.id,):
            return
        yield value if len(parent.targets) == 1 or isinstance(value, ast.Constant) else None
    elif isinstance(parent, ast.AnnAssign):
        yield parent.value
    else:
        yield None


def _is_empty(value: ast.expr | None, *, is_sum: bool) -> bool:
    if isinstance(value, ast.Call):
        named = call_name(value) in (_ZERO if is_sum else _EMPTY)
        plain = {keyword.arg for keyword in value.keywords} <= {"device", "dtype", "maxlen"}
        return named and plain and all(isinstance(argument, ast.Constant) for argument in value.args)
    if is_sum:
        return isinstance(value, ast.Constant) and type(value.value) in (int, float)
    return isinstance(value, ast.List) and not value.elts


def _is_harmless(program: Program, node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether the value of ``node`` is filled, measured, printed or turned to numbers, through sums and means of it."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return True
    above = parents.get(node)
    match above:
        case ast.Attribute(attr=method):
            call = parents.get(above)
            if not (isinstance(call, ast.Call) and call.func is above):
                return False
            if method in _FILLING | {"clear"}:
                return isinstance(node, ast.Name) and isinstance(parents.get(call), ast.Expr)
            return method in _NUMBERS or (method in _SHAPING and _is_harmless(program, call, parents))
        case ast.Call(func=func, args=args) if node in args:
            named = call_name(func)
            if program.function(named) is not None:
                return False
            return named in _READERS or (named in _JOINING and _is_harmless(program, above, parents))
        case ast.FormattedValue():
            return True
        case ast.Subscript(value=value) if value is node and isinstance(above.ctx, ast.Load):
            return _is_harmless(program, above, parents)
        case ast.BinOp():
            return _goes_on(node, above, parents) or _is_harmless(program, above, parents)
        case ast.comprehension(target=ast.Name(id=item), iter=source) if source is node:
            whole = parents[above]
            inner = [n for n in ast.walk(whole) if isinstance(n, ast.Name) and n.id == item]
            return all(_is_harmless(program, n, parents) for n in inner)
    return False


def _goes_on(node: ast.AST, sum_: ast.BinOp, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether this is ``name = name + value``: the name goes on from itself."""
    assign = parents.get(sum_)
    return (
        isinstance(node, ast.Name)
        and sum_.left is node
        and isinstance(assign, ast.Assign)
        and [ast.unparse(target) for target in assign.targets] == [node.id]
    )
