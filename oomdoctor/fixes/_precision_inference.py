"""Where the failing cell runs a model for its results alone: the calls, what they are given, and what is made of it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts
from oomdoctor.program import rewriting
from oomdoctor.program.book import Book, Page, Place, calls
from oomdoctor.program.dataflow import bound, own
from oomdoctor.program.names import call_name

__all__ = ["Run", "first_lines", "numpy_calls", "preceded", "runs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One call of a model that the namespace holds.

    Attributes:
        path: the model by its name in the namespace.
        statement: what it stands in, the innermost.
    """

    page: Page
    call: ast.Call
    path: str
    statement: ast.stmt
    scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def runs(book: Book, code: CodeFacts) -> list[Run]:
    """Return the calls of models in the failing cell and in the functions that it calls."""
    paths = {model.path for model in code.models}
    found: list[Run] = []
    for place, scope in _scopes(book):
        for statement in _statements(scope):
            for call in (part for part in own(statement) if isinstance(part, ast.Call)):
                path = _model(book, call, place, paths)
                if path is not None and not any(one.call is call for one in found):
                    found.append(Run(page=place.page, call=call, path=path, statement=statement, scope=scope))
    return found


def _scopes(book: Book) -> Iterator[tuple[Place, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the top level of the failing cell and every function that it calls, and those that these call."""
    waiting: list[tuple[Place, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]] = [
        (Place(page=book.failing), book.failing.tree)
    ]
    seen: set[str] = set()
    while waiting:
        place, scope = waiting.pop(0)
        yield place, scope
        for call in (part for node in scope.body for part in own(node) if isinstance(part, ast.Call)):
            name = call_name(call)
            made = book.function(name)
            if made is not None and name not in seen:
                seen.add(name)
                waiting.append((Place(page=made[0], function=made[1]), made[1]))


def _statements(scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the statements of ``scope``, the innermost first."""
    found = [node for one in scope.body for node in own(one) if isinstance(node, ast.stmt)]
    return sorted(found, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)


def _model(book: Book, call: ast.Call, place: Place, paths: set[str]) -> str | None:
    text = ast.unparse(call.func).removesuffix(".generate")
    if isinstance(call.func, ast.Name) and place.function is not None:
        for value, _ in book.values(text, place):
            if ast.unparse(value) in paths:
                return ast.unparse(value)
    inside = place.function is not None and text in bound(place.function)
    return text if text in paths and not inside else None


def first_lines(book: Book, found: Sequence[Run], line_of: Callable[[str], str]) -> dict[int, list[str]] | Refused:
    """Return a line for each model, by the statement of the failing cell in which it is run first.

    Args:
        line_of: the line for the model of this path.
    """
    first: dict[str, int] = {}
    for run in found:
        place = _entry(book, run)
        if place is None:
            return Refused("where the failing cell begins to run the model was not found")
        first[run.path] = min(place, first.get(run.path, place))
    return {place: [line_of(path) for path, at in first.items() if at == place] for place in first.values()}


def preceded(parsed: rewriting.ParsedCell, module: cst.Module, first: Mapping[int, Sequence[str]]) -> cst.Module:
    """Return ``module`` with the lines of ``first`` before those statements of its top level."""
    body: list[cst.SimpleStatementLine | cst.BaseCompoundStatement] = []
    for index, line in enumerate(module.body):
        if first.get(index):
            new = rewriting.statements("\n".join(first[index]) + "\n", parsed)
            body += [new[0].with_changes(leading_lines=line.leading_lines), *new[1:]]
            body.append(line.with_changes(leading_lines=()))
        else:
            body.append(line)
    return module.with_changes(body=body)


def _entry(book: Book, run: Run) -> int | None:
    """Return the statement of the failing cell's top level that ``run`` happens in, None where it is not seen."""
    for index, node in enumerate(book.failing.tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if any(part is run.call for part in ast.walk(node)):
            return index
        if isinstance(run.scope, ast.FunctionDef) and any(
            call_name(call) in _callers(book, run) for call in calls(node)
        ):
            return index
    return None


def _callers(book: Book, run: Run) -> set[str]:
    """Return the names of the functions that lead to ``run``."""
    names = {getattr(run.scope, "name", "")}
    while True:
        more = {node.name for _, node in book.functions() if any(call_name(call) in names for call in calls(node))}
        if more <= names:
            return names
        names |= more


def numpy_calls(book: Book, found: Sequence[Run]) -> list[tuple[Page, ast.Call, ast.expr | None]]:
    """Return the calls of ``numpy()`` where models are run, with the result of a model that each is of.

    That is the expression to make wider: the call of the model, or the name that its result was bound to. None where
    it is something made from it in another way.
    """
    # What ``generate`` gives are numbers of tokens, of which nothing is to be made wider.
    results = [run for run in found if not ast.unparse(run.call.func).endswith(".generate")]
    models = [run.call for run in results]
    return [
        (place.page, part, _base(part.func.value, {name for run in results for name in _direct(run, scope)}, models))
        for place, scope in _scopes(book)
        for node in scope.body
        for part in own(node)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "numpy"
    ]


def _direct(run: Run, scope: ast.AST) -> set[str]:
    """Return the name in ``scope`` that the result of ``run`` is bound to as it is."""
    node = run.statement
    if run.scope is scope and isinstance(node, ast.Assign) and node.value is run.call:
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def _base(node: ast.expr, made: set[str], models: Sequence[ast.Call]) -> ast.expr | None:
    method = "numpy"  # the innermost that is called: by it, what it is called on is a tensor
    while not any(node is call for call in models):
        if isinstance(node, ast.Name):
            return node if node.id in made and _is_of_tensors(method) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in made:
            return node if _is_of_tensors(method) else None  # a field of the result: ``out.logits``
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        method, node = node.func.attr, node.func.value
    return node if _is_of_tensors(method) else None


def _is_of_tensors(method: str) -> bool:
    """Whether tensors have this method, and containers have none so called."""
    import torch

    return hasattr(torch.Tensor, method) and not any(hasattr(kind, method) for kind in (dict, list, tuple))
