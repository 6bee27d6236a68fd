"""Rewrites code so that each loop calls a hook before every iteration, and each branch that a counter decides another.

The hooks stand in ``builtins`` of the process that runs the rewritten code: one that was forked to be thrown away. A
loop that its hook ends does so as one that has run out: its ``else`` is run, and what follows is seen. Line numbers
stay what they are. Limits: ``async for`` does not ask, nor do functions that were running already, nor those made by
``exec`` of a text that no file holds.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import CodeType
from typing import Any, Final, TypeAlias

from oomdoctor.program.compiled import with_inner

FunctionKey: TypeAlias = tuple[str, int]
"""Qualified name and first line of a function."""

HOOK_PREFIX: Final = "_oomdoctor_"
_JUMP_BACK: Final = frozenset(code for name, code in dis.opmap.items() if "JUMP_BACKWARD" in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """What rewritten code calls. By default every loop runs as it would have.

    Attributes:
        items: takes what a ``for`` or a comprehension goes through, and whether it is a statement outside of functions;
            returns what it goes through instead.
        rounds: takes whether a ``while`` stands outside of functions; returns what is called before its condition is
            looked at, and tells whether to go on.
        mark: called before a plain list comprehension.
        listed: takes what ``mark`` returned and the list that the comprehension made; returns the list.
        branch: takes what an ``if`` decided in whose test there is a counter; returns the decision.
        asked: called before what an ``assert`` tests.
        holds: takes what ``asked`` returned and what was tested; returns whether it holds.
    """

    items: Callable[[Any, bool], Iterable[Any]] = lambda iterable, _is_outside: iterable
    rounds: Callable[[bool], Callable[[], bool]] = lambda _is_outside: lambda: True
    mark: Callable[[], Any] = lambda: None
    listed: Callable[[Any, list[Any]], list[Any]] = lambda _mark, made: made
    branch: Callable[[Any], Any] = lambda outcome: outcome
    asked: Callable[[], Any] = lambda: None
    holds: Callable[[Any, Any], Any] = lambda _asked, outcome: outcome


def install_hooks(hooks: LoopHooks) -> None:
    """Let rewritten code of this process call ``hooks``, in the place of those that it called before."""
    for field in fields(hooks):
        setattr(builtins, HOOK_PREFIX + field.name, getattr(hooks, field.name))


def compile_hooked(text: str, filename: str, flags: int = 0, *, last: str | None = None) -> CodeType:
    """Return the code of a Python text whose loops and branches call the hooks; it may await at its top level.

    Args:
        last: the name that the value of an expression is bound to with which the text ends; None for none.

    Raises:
        SyntaxError: it is not Python.
        ValueError: likewise.
    """
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, filename, "exec", flags=flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    if last is not None and tree.body and isinstance(end := tree.body[-1], ast.Expr):
        kept = ast.Assign(targets=[ast.Name(id=last, ctx=ast.Store())], value=end.value)
        tree.body[-1] = ast.copy_location(kept, end)
    hooked = ast.fix_missing_locations(_Hooking(_counters_of(tree)).visit(tree))
    code: CodeType = compile(hooked, filename, "exec", flags=flags, dont_inherit=True)
    return code


def hooked_functions(text: str, filename: str) -> dict[FunctionKey, CodeType]:
    """Return the code of each function of a file as ``compile_hooked`` makes it; none where it is not Python.

    Two lambdas of one line look alike, and are left out.
    """
    try:
        _, *inner = with_inner(compile_hooked(text, filename))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    counted = Counter(map(function_key, inner))
    return {key: code for code in inner if counted[key := function_key(code)] == 1}


def function_key(code: CodeType) -> FunctionKey:
    """Return what tells a function from the others of its file."""
    return code.co_qualname, code.co_firstlineno


def has_loop(code: CodeType) -> bool:
    """Return whether a function has a loop, or a function or comprehension inside of it has."""
    return any(not _JUMP_BACK.isdisjoint(each.co_code[::2]) for each in with_inner(code))


class _Hooking(ast.NodeTransformer):
    """Puts calls of the hooks into a tree."""

    def __init__(self, counters: frozenset[str]) -> None:
        self._counters = counters
        self._whiles = 0
        self._depth = 0

    def visit_FunctionDef(self, node: Any) -> Any:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = ast.copy_location(_call("items", node.iter, ast.Constant(self._depth == 0)), node.iter)
        return node

    def visit_If(self, node: Any) -> Any:
        self.generic_visit(node)
        names = (part for part in ast.walk(node.test) if isinstance(part, (ast.Name, ast.Attribute)))
        if not self._counters.isdisjoint(map(ast.unparse, names)):
            node.test = ast.copy_location(_call("branch", node.test), node.test)
        return node

    visit_IfExp = visit_If  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.generic_visit(node)
        node.test = ast.copy_location(_call("holds", _call("asked"), node.test), node.test)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        if not node.is_async:
            node.iter = ast.copy_location(_call("items", node.iter, ast.Constant(False)), node.iter)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        self.generic_visit(node)
        if len(node.generators) > 1 or node.generators[0].ifs or node.generators[0].is_async:
            return node
        return ast.copy_location(_call("listed", _call("mark"), node), node)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self.generic_visit(node)
        self._whiles += 1
        name, test = f"rounds_{self._whiles}", node.test
        node.test = ast.copy_location(ast.BoolOp(op=ast.And(), values=[_call(name), test]), test)
        target = ast.Name(id=HOOK_PREFIX + name, ctx=ast.Store())
        begun = ast.Assign(targets=[target], value=_call("rounds", ast.Constant(self._depth == 0)))
        return [ast.copy_location(begun, node), node]


def _call(hook: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=HOOK_PREFIX + hook, ctx=ast.Load()), args=list(args), keywords=[])


def _counters_of(tree: ast.AST) -> frozenset[str]:
    """Return what counts in some code: targets of a ``for``, and what is added to."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor)):
            found |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            found.add(ast.unparse(node.target))
    return frozenset(found)
