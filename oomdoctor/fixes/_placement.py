"""Lines about models in the source: behind the one that makes the model, or first in the function that is given it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes._terms import Unfit, need, root_of
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.arguments import last_binding
from oomdoctor.program.names import bound_names


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
    declared = m.Global(names=[m.ZeroOrMore(), m.NameItem(m.Name(root)), m.ZeroOrMore()])
    for cell in reversed(cells.beside(cells.failing).history):
        text = rewriting.read(cell.source)
        if isinstance(text, Refused):
            continue
        before = any(root in bound_names(one.source) for one in cells.history if one.number < cell.number)
        if (bound := last_binding(text, root, bound_before=before)) is not None:
            return _Place(cell, text, bound.whole)
        functions = [one for one in rewriting.within(text.module, cst.FunctionDef) if m.findall(one, declared)]
        if lines := [line for one in functions for line in _binding(one, root)]:
            return _Place(cell, text, lines[-1], in_function=True)
    return _Place(cells.failing, need(rewriting.read(cells.failing.source)))


def _in_function(cells: Cells, model: Owner) -> _Place:
    """Return the place in a function where its model is bound last, at its beginning where it is handed over."""
    assert model.scope is not None
    cell = cells.get(model.scope[0])
    text = need(rewriting.read(cell.source))
    root = model.path.partition(".")[0]
    found = [one for one in rewriting.within(text.module, cst.FunctionDef) if model.scope[1] in text.lines_of(one)]
    if not found or not isinstance(found[-1].body, cst.IndentedBlock):
        raise Unfit(f"where {cell} makes `{model.path}` was not found")
    body: Any = found[-1].body.body
    if bound := _binding(found[-1], root):
        return _Place(cell, text, bound[-1], in_function=True)
    at = 1 if found[-1].get_docstring() is not None and len(body) > 1 else 0
    return _Place(cell, text, body[at], is_after=False, in_function=True)


def _binding(function: cst.FunctionDef, name: str) -> list[cst.SimpleStatementLine]:
    """Return the lines of a function that assign to a name, ``name = name.train()`` in a loop apart."""
    target = m.AssignTarget(target=m.Name(name)) | m.AnnAssign(target=m.Name(name))
    lines = rewriting.within(function.body, cst.SimpleStatementLine, without=(cst.FunctionDef, cst.ClassDef))
    loops = (*rewriting.within(function.body, cst.For), *rewriting.within(function.body, cst.While))
    looped = {line for loop in loops for line in rewriting.within(loop, cst.SimpleStatementLine)}
    of_itself = m.Assign(value=m.Call(func=m.Attribute(value=m.Name(name))))
    return [line for line in lines if m.findall(line, target) and not (line in looped and m.findall(line, of_itself))]
