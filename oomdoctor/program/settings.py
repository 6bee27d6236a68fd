"""What statements of the cells bind: names, parameters, entries of settings and arguments of the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from oomdoctor.program.dataflow import own
from oomdoctor.program.names import call_name

__all__ = [
    "FUNCTIONS",
    "SETTINGS",
    "Function",
    "argument_defaults",
    "argument_for",
    "assigned",
    "binds",
    "calls",
    "default_of",
    "is_given",
    "key_of",
    "literal",
    "looked_up",
    "of_class",
    "own_statements",
    "sets_entry",
]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)

SETTINGS: Final = re.compile(
    r"^((types\.)?SimpleNamespace|(argparse\.)?Namespace|dict|(\w+\.)?(EasyDict|edict|AttrDict|DotDict|Munch|ConfigDict)"
    r"|OmegaConf\.create)$"
)
"""Calls that make settings which can be changed of the settings that they are given."""


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield every call within ``tree``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def literal(node: ast.AST | None) -> int | None:
    """Return the whole number that ``node`` is, None if it is none."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def own_statements(function: Function) -> Iterator[ast.stmt]:
    """Yield the statements of ``function``, those of functions in it left out."""
    for statement in function.body:
        yield from (node for node in own(statement) if isinstance(node, ast.stmt))


def key_of(expr: ast.expr) -> str | None:
    """Return the name of the attribute or item that ``expr`` takes, None where it takes none by name."""
    if isinstance(expr, ast.Attribute):
        return expr.attr
    key = getattr(expr.slice, "value", None) if isinstance(expr, ast.Subscript) else None
    return key if isinstance(key, str) else None


def looked_up(expr: ast.expr) -> ast.expr:
    """Return ``config["size"]`` for ``config.get("size", 8)``."""
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Attribute) and expr.func.attr == "get" and expr.args:
        return ast.Subscript(value=expr.func.value, slice=expr.args[0], ctx=ast.Load())
    return expr


def sets_entry(node: ast.AST, whole: str, key: str) -> bool:
    """Tell whether ``node`` sets the attribute or item ``key`` of ``whole``."""
    return (
        isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and key_of(node) == key
        and ast.unparse(node.value) == whole
    )


def is_given(tree: ast.AST, options: tuple[str, ...]) -> bool:
    """Whether a list of arguments gives one of ``options``, so that its default does not count."""
    lists = (node for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple))
    texts = (str(one.value) for node in lists for one in node.elts if isinstance(one, ast.Constant))
    return any(text.partition("=")[0] in options for text in texts)


def binds(node: ast.stmt, name: str) -> bool:
    """Tell whether ``node`` binds ``name``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return any(isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store) for part in own(node))


def assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return the expression that ``node`` assigns to ``name``; the whole value where it is unpacked from one."""
    if isinstance(node, ast.AnnAssign):
        return node.value
    if isinstance(node, ast.If):
        first, second = (assigned_last(block, name) for block in (node.body, node.orelse))
        return ast.IfExp(test=node.test, body=first, orelse=second)
    if not isinstance(node, ast.Assign):
        return None
    for target in node.targets:
        if isinstance(target, ast.Name) and target.id == name:
            return node.value
        if isinstance(target, ast.Tuple | ast.List):
            names = [part.id if isinstance(part, ast.Name) else "" for part in target.elts]
            if name in names and isinstance(node.value, ast.Tuple) and len(names) == len(node.value.elts):
                return node.value.elts[names.index(name)]
            if name in names:
                return node.value
    return None


def assigned_last(block: Sequence[ast.stmt], name: str) -> ast.expr:
    """Return what a branch assigns to ``name``: what it was before where the branch leaves it alone."""
    made = next((node for node in reversed(block) if binds(node, name)), None)
    if made is None:
        return ast.Name(id=name, ctx=ast.Load())
    return assigned(made, name) or ast.Constant(None)


def positional(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args]


def default_of(function: Function, name: str) -> ast.expr | None:
    """Return the default of a parameter, None where it has none."""
    names = [part.arg for part in positional(function)]
    given = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
    for part, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if value is not None:
            given[part.arg] = value
    return given.get(name)


def argument_for(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return what ``call`` passes for a parameter of ``function``, None where it passes nothing."""
    names = [part.arg for part in positional(function)]
    if names[:1] == ["self"]:
        names = names[1:]
    passed: dict[str | None, ast.expr] = dict(zip(names, unstarred(call.args), strict=False))
    passed |= {keyword.arg: keyword.value for keyword in call.keywords}
    return passed.get(name)


def unstarred(args: Sequence[ast.expr]) -> list[ast.expr]:
    at = next((index for index, one in enumerate(args) if isinstance(one, ast.Starred)), len(args))
    return list(args[:at])


def of_class(node: ast.ClassDef, key: str) -> list[ast.expr]:
    """Return what a class gives its attribute ``key``."""
    found = [assigned(part, key) for part in node.body if binds(part, key)]
    return [value for value in found if value is not None]


def argument_defaults(tree: ast.Module, key: str) -> Iterator[ast.expr]:
    """Yield the default of the command line's argument that is stored as ``key``."""
    for call in calls(tree):
        names = [str(arg.value).lstrip("-").replace("-", "_") for arg in call.args if isinstance(arg, ast.Constant)]
        if call_name(call).endswith("add_argument") and key in names:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == "default")
