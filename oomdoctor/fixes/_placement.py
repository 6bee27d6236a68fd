"""Where new lines go: behind the one that makes a model, before a step or around it.

A line about a model stands behind the one that makes the model, or first in the function that is given it. The step of
a training loop is its lines from the first that runs a model on: they are put under a ``with``, or changed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import libcst as cst

from oomdoctor.fixes._terms import Unfit, need, root_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.arguments import last_binding
from oomdoctor.program.dataflow import loop_at
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import bound_names, own_nodes


class Owner(Protocol):
    """What a line is about: the expression for it, and ``(cell, line)`` of the function that alone leads to it."""

    @property
    def path(self) -> str: ...
    @property
    def scope(self) -> tuple[int, int] | None: ...


def placed(cells: Cells, lines: Iterable[tuple[Owner, str]], imports: Sequence[str]) -> Patch | Refused:
    """Return the patch that runs each line where its owner has just been made or handed over."""
    places: dict[int, list[tuple[_Place, str]]] = {}
    for owner, line in lines:
        place = need(_in_function(cells, owner) if owner.scope is not None else _at_top(cells, owner.path))
        places.setdefault(place.cell.number, []).append((place, line))
    edits = []
    for found in places.values():
        cell, text = found[0][0].cell, found[0][0].text
        changes: dict[cst.CSTNode, list[rewriting.Statement]] = {}
        for place, line in found:
            if (node := place.statement) is not None:
                there, new = changes.get(node, [node]), rewriting.statements(line, text)
                changes[node] = [*there, *new] if place.is_after else [*new, *there]
        top = [line for place, line in found if place.statement is None]
        live = [line for place, line in found if not place.in_function]
        module = import_lines.insert_at_top(text, rewriting.exchange(text.module, changes), [*imports, *top])
        edits.append(rewriting.edit(cells, cell, text, module, live=live or None))
    return rewriting.join(cells, edits)


class _Place(NamedTuple):
    """Where a line goes: after or before a statement, or above all others of the cell."""

    cell: Cell
    text: rewriting.ParsedCell
    statement: rewriting.Statement | None = None
    is_after: bool = True
    in_function: bool = False


def _at_top(cells: Cells, path: str) -> _Place:
    """Return the place right after a name of the notebook is bound, by a function too, or first in the failing cell."""
    root = root_of(path)
    for cell in reversed(cells.beside(cells.failing).history):
        text = rewriting.read(cell.source)
        if isinstance(text, Refused):
            continue
        before = any(root in bound_names(one.source) for one in cells.history if one.number < cell.number)
        if (bound := last_binding(text, root, bound_before=before)) is not None:
            return _Place(cell, text, bound.whole)
        functions = [one for one in _functions(text) if root in _globals_of(one)]
        inner = [found for one in functions if (found := last_binding(text, root, function=one)) is not None]
        if inner:
            return _Place(cell, text, inner[-1].whole, in_function=True)
    return _Place(cells.failing, need(rewriting.read(cells.failing.source)))


def _in_function(cells: Cells, model: Owner) -> _Place:
    """Return the place in a function where its model is bound last, at its beginning where it is handed over."""
    assert model.scope is not None
    cell = cells.get(model.scope[0])
    text = need(rewriting.read(cell.source))
    root = model.path.partition(".")[0]
    found = [one for one in _functions(text) if one.lineno <= model.scope[1] <= (one.end_lineno or one.lineno)]
    if not found or found[-1].body[0].lineno == found[-1].lineno:
        raise Unfit(f"where {cell} makes `{model.path}` was not found")
    function = found[-1]
    if (bound := last_binding(text, root, function=function)) is not None:
        return _Place(cell, text, bound.whole, in_function=True)
    at = 1 if ast.get_docstring(function) is not None and len(function.body) > 1 else 0
    first = rewriting.statement_at(text, function.body[at].lineno)
    return _Place(cell, text, first, is_after=False, in_function=True)


def _functions(text: rewriting.ParsedCell) -> list[ast.FunctionDef]:
    return [one for one in ast.walk(text.tree) if isinstance(one, ast.FunctionDef)]


def _globals_of(function: ast.FunctionDef) -> set[str]:
    return {name for one in own_nodes(function.body) if isinstance(one, ast.Global) for name in one.names}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLines:
    """The body of a loop, in two forms that go side by side.

    Attributes:
        loop: the loop, and ``node``: the same as ``ast`` has it.
        lines: the statements of its body, each on a line of its own, as those of ``node`` are.
        first: which of them runs a model first.
    """

    parsed: rewriting.ParsedCell
    loop: cst.For | cst.While
    node: Loop
    lines: Sequence[cst.BaseStatement]
    first: int

    def under(self, context: str, last: int) -> cst.For | cst.While:
        """Return the loop with ``with context:`` around its lines from the first that runs a model to ``last``."""
        block = under(self.parsed, context, self.lines[self.first : last + 1])
        return self._of([*self.lines[: self.first], block, *self.lines[last + 1 :]])

    def preceded_by(self, line: str) -> cst.For | cst.While:
        """Return the loop with a line before the one that runs a model first."""
        new = preceded(self.lines[self.first], line, self.parsed)
        return self._of([*self.lines[: self.first], *new, *self.lines[self.first + 1 :]])

    def _of(self, lines: Sequence[cst.BaseStatement]) -> cst.For | cst.While:
        return self.loop.with_changes(body=rewriting.block(self.loop.body, lines))


def preceded(old: cst.BaseStatement, text: str, parsed: rewriting.ParsedCell) -> list[Any]:
    """Return the statements of ``text`` and then ``old``, whose comments stand before all of them."""
    first, *rest = rewriting.statements(f"{text}\n", parsed)
    first = first.with_changes(leading_lines=getattr(old, "leading_lines", ()))
    return [first, *rest, old.with_changes(leading_lines=())]


def under(parsed: rewriting.ParsedCell, context: str, lines: Sequence[cst.BaseStatement]) -> cst.With:
    """Return ``with context:`` around statements that stand on lines of their own."""
    first, *rest = lines
    (head,) = rewriting.statements(f"with {context}:\n    pass\n", parsed)
    block = cst.ensure_type(head, cst.With).with_changes(leading_lines=getattr(first, "leading_lines", ()))
    body = [first.with_changes(leading_lines=()), *rest]
    return block.with_changes(body=cst.ensure_type(block.body, cst.IndentedBlock).with_changes(body=body))


def step_lines(parsed: rewriting.ParsedCell, facts: TrainingLoop, runners: Collection[str] = ()) -> StepLines:
    """Return the body of a loop, in which ``runners`` run a model as well as the models themselves."""
    loop, node = rewriting.loop_at(parsed, facts.line), loop_at(parsed.tree, facts.line)
    if loop is None or node is None:
        raise Unfit(f"{facts.where} is not a loop that can be rewritten")
    running = (at for at, one in enumerate(node.body) if runs(one, {*facts.models, *runners}))
    first = need(next(running, None), "the model is not called by a statement of the loop itself")
    return StepLines(parsed=parsed, loop=loop, node=node, lines=rewriting.lines_apart(loop), first=first)


def runs(node: ast.AST, runners: Collection[str]) -> bool:
    """Whether ``node`` calls one of these, or hands one over to what it calls."""
    return any(
        ast.unparse(part.func) in runners or any(ast.unparse(arg) in runners for arg in part.args)
        for part in own_nodes([node])
        if isinstance(part, ast.Call)
    )
