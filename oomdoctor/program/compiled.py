"""Texts and the code that they compile to: compiling under a file name, and what of a text stands at a line.

The lines of a code object, of a frame or of a traceback are all that is known of what runs; here they are brought
together with the statements and functions of the text. What is not Python defines nothing and has no statements.

Code can be rewritten so that each loop calls a hook before every iteration, each branch that a counter decides another,
and each expression whose value may be a number a third. The hooks stand in ``builtins`` of the process that runs the
rewritten code: one that was forked to be thrown away. A loop that its hook ends does so as one that has run out: its
``else`` is run, and what follows is seen. Line numbers stay what they are. Limits: ``async for`` does not ask, nor do
functions that were running already, nor those made by ``exec`` of a text that no file holds.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import symtable
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from oomdoctor.program.magics import Definition, Function, mask, tree_of

_FUTURES: Final[int] = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Fault(NamedTuple):
    """Why a text is not Python, in Python's words."""

    message: str
    line: int | None


def source_of(path: Path) -> str:
    """Return the text of a Python file, in the encoding that it declares.

    Raises:
        OSError, SyntaxError, ValueError: it cannot be read, or is in another encoding.
    """
    with tokenize.open(path) as file:
        return file.read()


def compile_python(text: str, filename: str, flags: int = 0, *, awaits: bool = False) -> CodeType:
    """Return the code of a text, with no flags but those that are given; ``awaits`` lets its top level await.

    Raises:
        SyntaxError, ValueError: it is not Python.
    """
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if awaits else 0
    code: CodeType = compile(text, filename, "exec", flags=flags, dont_inherit=True)
    return code


def fault_in(cell: str) -> Fault | None:
    """Return why a cell cannot be compiled, magics aside; None where it can."""
    try:
        compile_python(mask(cell).text, "<cell>", awaits=True)
    except (SyntaxError, ValueError) as error:
        return Fault(error.msg, error.lineno) if isinstance(error, SyntaxError) else Fault(str(error), None)
    return None


def future_flags(code: CodeType) -> int:
    """Return the compiler's flags for the ``from __future__ import`` lines that ``code`` was compiled with."""
    return code.co_flags & _FUTURES


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions, classes and comprehensions in it."""
    codes = [code]
    for each in codes:  # it grows on the way
        yield each
        codes += [constant for constant in each.co_consts if type(constant) is CodeType]


def is_compiled_from(codes: Iterable[CodeType], text: str) -> bool:
    """Return whether ``text`` compiles to all of ``codes``, of one file: else that was edited after it was loaded."""
    codes = list(codes)
    try:
        # Who runs a script by ``exec`` hands on its own futures.
        whole = [compile_python(text, code.co_filename, future_flags(code)) for code in codes[:1]]
    except (SyntaxError, ValueError, RecursionError):
        return False
    return {inner for code in whole for inner in with_inner(code)}.issuperset(codes)


@lru_cache(maxsize=16)
def global_names(text: str) -> frozenset[str]:
    """Return the names that the functions of a text take from its globals."""
    try:
        waiting = [symtable.symtable(text, "<script>", "exec")]
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for table in waiting:  # it grows on the way
        names.update(symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        waiting += table.get_children()
    return frozenset(names)


def defines(text: str, name: str, line: int) -> bool:
    """Return whether a function of this name begins on ``line``, that of its first decorator included."""
    return decorators_of(text, name, line) is not None


def decorators_of(text: str, name: str, line: int) -> list[str] | None:
    """Return how the decorators of a function are written that begins on ``line``, that of its first one included.

    None where no function of this name does.
    """
    functions = (node for node in ast.walk(tree_of(text)) if isinstance(node, Function) and node.name == name)
    for node in functions:
        if line in (node.lineno, *(each.lineno for each in node.decorator_list)):
            return [ast.unparse(each) for each in node.decorator_list]
    return None


def is_in_definition(cell: str, line: int) -> bool:
    """Return whether a line of a cell stands in a function or a class."""
    return any(
        isinstance(node, Definition) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree_of(cell))
    )


def statement_end(text: str, line: int) -> int | None:
    """Return the last line of the statement of the top level that ``line`` stands in; None where it is not Python."""
    ends = [node.end_lineno or node.lineno for node in tree_of(text).body]
    return next((end for end in ends if end >= line), line) if ends else None


def statement_lines(cell: str) -> list[int]:
    """Return the lines on which the statements of a cell begin, in order."""
    return sorted({node.lineno for node in ast.walk(tree_of(cell)) if isinstance(node, ast.stmt)})


def does_nothing(cell: str) -> bool:
    """Return whether a cell has nothing but ``pass`` in it."""
    return all(isinstance(node, ast.Pass) for node in tree_of(cell).body)


def on_their_lines(statements: str, cell: str) -> str:
    """Return statements of a cell on their lines in it; as they are where it has others, or a line is shared."""
    wanted = [ast.dump(node) for node in tree_of(statements).body]
    nodes = [(ast.dump(node), node) for node in tree_of(cell).body]
    kept = {line for text, node in nodes if text in wanted for line in lines_of(node)}
    others = {line for text, node in nodes if text not in wanted for line in lines_of(node)}
    if not wanted or [text for text, _ in nodes if text in wanted] != wanted or kept & others:
        return statements
    lines = [line if at in kept else "" for at, line in enumerate(cell.split("\n"), start=1)]
    return "\n".join([lines[0] or "#", *lines[1:]])  # the shell takes empty lines at the beginning away


def lines_of(node: ast.stmt) -> range:
    """Return the lines of a text that a statement stands on, those of its decorators included."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or node.lineno) + 1)


FunctionKey: TypeAlias = tuple[str, int]
"""Qualified name and first line of a function."""

HOOK_PREFIX: Final = "_oomdoctor_"


@dataclass(frozen=True, slots=True)
class Site:
    """An expression of a program that compares, computes, calls or subscripts.

    Attributes:
        function: the qualified name of what it stands in, empty outside of functions and classes.
        text: the expression, by which it is known in a changed program.
        names: what it reads, as dotted names; ``inner``: the texts of such expressions in it.
    """

    function: str
    text: str
    names: tuple[str, ...] = field(default=(), compare=False)
    inner: tuple[str, ...] = field(default=(), compare=False)


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
        value: takes the parts of a ``Site`` and the value of that expression; returns the value.
    """

    items: Callable[[Any, bool], Iterable[Any]] = lambda iterable, _is_outside: iterable
    rounds: Callable[[bool], Callable[[], bool]] = lambda _is_outside: lambda: True
    mark: Callable[[], Any] = lambda: None
    listed: Callable[[Any, list[Any]], list[Any]] = lambda _mark, made: made
    branch: Callable[[Any], Any] = lambda outcome: outcome
    asked: Callable[[], Any] = lambda: None
    holds: Callable[[Any, Any], Any] = lambda _asked, outcome: outcome
    value: Callable[[tuple[Any, ...], Any], Any] = lambda _site, value: value


def install_hooks(hooks: LoopHooks) -> None:
    """Let rewritten code of this process call ``hooks``, in the place of those that it called before."""
    for hook in fields(hooks):
        setattr(builtins, HOOK_PREFIX + hook.name, getattr(hooks, hook.name))


def compile_hooked(text: str, filename: str, flags: int = 0, *, last: str | None = None) -> CodeType:
    """Return the code of a Python text whose loops and branches call the hooks; it may await at its top level.

    Args:
        last: the name that the value of an expression is bound to with which the text ends.

    Raises:
        SyntaxError, ValueError: it is not Python.
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
    """Return the code of each function of a file as ``compile_hooked`` makes it, but for lambdas that share a line."""
    try:
        _, *inner = with_inner(compile_hooked(text, filename))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    counted = Counter(map(function_key, inner))
    return {key: code for code in inner if counted[key := function_key(code)] == 1}


def function_key(code: CodeType) -> FunctionKey:
    """Return what tells a function from the others of its file."""
    return code.co_qualname, code.co_firstlineno


_VALUED: Final = (ast.Compare, ast.BoolOp, ast.BinOp, ast.Call, ast.Subscript)


class _Hooking(ast.NodeTransformer):
    def __init__(self, counters: frozenset[str]) -> None:
        self._counters = counters
        self._whiles = 0
        self._depth = 0
        self._within: list[str] = []
        self._unhooked: set[ast.AST] = set()

    def visit(self, node: ast.AST) -> Any:
        """Return a node as it is rewritten."""
        if not isinstance(node, _VALUED) or node in self._unhooked or isinstance(getattr(node, "ctx", None), _STORED):
            return super().visit(node)
        parts = [part for part in ast.walk(node) if part is not node]
        names = {ast.unparse(part) for part in parts if _is_dotted(part)}
        inner = {ast.unparse(part) for part in parts if isinstance(part, _VALUED)}
        site: Any = (".".join(self._within), ast.unparse(node), (*sorted(names),), (*sorted(inner),))
        return ast.copy_location(_call("value", ast.Constant(site), super().visit(node)), node)

    def visit_ClassDef(self, node: Any) -> Any:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        self._depth += 1
        returns, node.returns = node.returns, None  # what is annotated is read by others as it stands
        self.visit_ClassDef(node)
        node.returns = returns
        self._depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        self._unhooked.update(ast.walk(node.pattern))
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        self._unhooked.add(node.value)  # nobody takes its value
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = ast.copy_location(_call("items", node.iter, ast.Constant(self._depth == 0)), node.iter)
        return node

    def visit_If(self, node: Any) -> Any:
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            self._unhooked.update(ast.walk(node.test))  # nothing follows it
        self.generic_visit(node)
        names = (part for part in ast.walk(node.test) if isinstance(part, (ast.Name, ast.Attribute)))
        if not self._counters.isdisjoint(map(ast.unparse, names)):
            node.test = ast.copy_location(_call("branch", node.test), node.test)
        return node

    visit_IfExp = visit_If  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self._unhooked.update(ast.walk(node.test))
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
        self._unhooked.update(ast.walk(node.test))  # the loop asks
        self.generic_visit(node)
        self._whiles += 1
        name, test = f"rounds_{self._whiles}", node.test
        node.test = ast.copy_location(ast.BoolOp(op=ast.And(), values=[_call(name), test]), test)
        target = ast.Name(id=HOOK_PREFIX + name, ctx=ast.Store())
        begun = ast.Assign(targets=[target], value=_call("rounds", ast.Constant(self._depth == 0)))
        return [ast.copy_location(begun, node), node]


_STORED: Final = (ast.Store, ast.Del)


def _is_dotted(node: ast.AST) -> bool:
    """Tell whether an expression is a name, or an attribute of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


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
