"""Where objects are made in the cells: the calls, found and changed, and the places that new lines go to.

Calls are found by the name of the class, under the name that it was imported by, since no object of the namespace leads
to what lives in functions; of calls that bind the same name in the same function, the last one is meant. An optimizer
is followed from its name into the function of the notebook that made it. Limits: classes that a helper returns, and
names that are attributes. A line about a model stands behind the one that makes it, or first in the function that is
given it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import libcst as cst

from oomdoctor.fixes._refusals import Unfit, need, root_of
from oomdoctor.model import Cell, Cells, Edit, Patch, Refused
from oomdoctor.model.code import OptimizerFacts, TrainingLoop
from oomdoctor.program import arguments, import_lines, rewriting
from oomdoctor.program.arguments import last_binding
from oomdoctor.program.dataflow import loop_at
from oomdoctor.program.magics import Loop
from oomdoctor.program.names import bound_names, own_nodes
from oomdoctor.program.rewriting import exchange, text_of, within

_MAIN: Final = re.compile(r"if __name__ == ['\"]__main__['\"]:")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call.

    Attributes:
        node: the call, a node of ``parsed``; ``statement``: the innermost statement around it.
        target: the one name that the statement binds, None where it binds none or several.
        around: the function or class at the top level of the cell that it stands in.
        name: the class's own name.
        bound_in: the cell that binds the object's name, where that is another one; ``bound_by``: the statement there.
    """

    cell: Cell
    parsed: rewriting.ParsedCell
    node: cst.Call
    statement: rewriting.Statement
    target: str | None
    around: rewriting.Definition | None
    name: str
    bound_in: Cell | None = None
    bound_by: rewriting.Statement | None = None

    @property
    def line(self) -> int:
        """Line of the cell, one-based."""
        return self.parsed.lines_of(self.node)[0]

    @property
    def where(self) -> str:
        """The place in words."""
        return f"line {self.line} of {self.cell}"

    def is_live(self, cells: Cells) -> bool:
        """Whether what it makes is there before the failing cell begins, and not only in a function."""
        home = self.cell if self.around is None else self.bound_in
        return home is not None and (self.bound_in or home).number != cells.failing.number


def find(cells: Cells, *names: str) -> tuple[Call, ...]:
    """Return the calls of the classes ``names``, in the order of the cells."""
    text = "\n".join(cell.source for cell in cells.history)
    own = {alias: name for name in names for alias in (name, *re.findall(rf"\b{name} as (\w+)", text))}
    mentions = re.compile(rf"\b({'|'.join(own)})\b")
    found: dict[tuple[str, str], Call] = {}
    for cell in (one for one in cells.history if mentions.search(one.source)):
        parsed = need(rewriting.read(cell.source))
        for node in (one for one in within(parsed.module, cst.Call) if last_name(one) in own):
            path = rewriting.path_to(parsed, parsed.lines_of(node)[0])
            one = _call(cell, parsed, node, path, own[last_name(node)])
            key = one.around.name.value if one.around else "", one.target or f"{cell.number}:{parsed.code(node)}"
            found.pop(key, None)
            found[key] = one
    return tuple(found.values())


def _call(
    cell: Cell, parsed: rewriting.ParsedCell, node: cst.Call, path: Sequence[rewriting.Statement], name: str
) -> Call:
    target = None
    match path[-1]:
        case cst.SimpleStatementLine(
            body=[
                cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=bound))])
                | cst.AnnAssign(target=cst.Name(value=bound))
            ]
        ):
            target = bound
    around = path[0] if isinstance(path[0], cst.FunctionDef | cst.ClassDef) else None
    return Call(cell=cell, parsed=parsed, node=node, statement=path[-1], target=target, around=around, name=name)


def made(cells: Cells, facts: OptimizerFacts) -> Call:
    """Return where an optimizer is made."""
    path = facts.path
    if not facts.home.startswith("torch.optim."):
        raise Unfit(f"`{path}` is a {facts.type_name} of `{facts.home}`, whose options are not known")
    need(path.isidentifier(), f"`{path}` is not a name of its own, so where it is made is not followed")
    for cell in (one for one in reversed(cells.history) if path in one.source):
        parsed = need(rewriting.read(cell.source))
        bound = last_binding(parsed, path)
        if bound is None:
            continue
        if bound.whole is not bound.statement and not _MAIN.match(parsed.code(bound.whole)):
            raise Unfit(f"which of several branches of {cell} makes `{path}` is not followed")
        value, statement = bound.value, bound.statement
        if isinstance(value, cst.Call) and isinstance(statement, cst.SimpleStatementLine):
            if last_name(value) == facts.type_name:
                one = _call(cell, parsed, value, [statement], facts.type_name)
                return replace(one, target=path, bound_by=statement)
            found = find(cells, facts.type_name) if isinstance(value.func, cst.Name) else ()
            own = [one for one in found if one.around is not None and one.around.name.value == last_name(value)]
            if len(own) == 1:
                return replace(own[0], target=path, bound_in=cell, bound_by=statement)
        raise Unfit(f"line {parsed.lines_of(statement)[0]} of {cell} makes `{path}` in a way that is not followed")
    raise Unfit(f"no cell makes `{path}`")


def exchanged(
    cells: Cells,
    new: Mapping[Call, cst.Call],
    imports: Sequence[str] = (),
    live: Mapping[Call, Sequence[str]] | None = None,
) -> Patch | Refused:
    """Return the cells with other calls in the places of these, and what each of them has to import.

    ``live`` are lines that do the same to what an earlier cell has made; it is None where no retry ever runs them.
    """
    edits = list[Edit | Refused]()
    for number in dict.fromkeys(one.cell.number for one in new):
        here = [one for one in new if one.cell.number == number]
        cell, parsed = here[0].cell, here[0].parsed
        module = exchange(parsed.module, {one.node: new[one] for one in here})
        module = import_lines.insert_at_top(parsed, module, imports)
        if live is None:
            edits.append(advised(cell, parsed, module))
        else:
            lines = [line for one in here for line in live.get(one, ())]
            edits.append(rewriting.edit(cells, cell, parsed, module, lines or None))
    return rewriting.join(cells, edits)


def changed(
    cells: Cells, cell: Cell, changes: Mapping[cst.CSTNode, rewriting.New] | cst.Module, imports: Sequence[str] = ()
) -> Patch | Refused:
    """Return the cell with these nodes exchanged, or as it is to be, with what it has to import."""
    parsed = need(rewriting.read(cell.source))
    module = changes if isinstance(changes, cst.Module) else exchange(parsed.module, changes)
    module = import_lines.insert_at_top(parsed, module, imports)
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


def advised(cell: Cell, parsed: rewriting.ParsedCell, module: cst.Module) -> Edit:
    """Return the change of a cell that is only advice and never run: what would be run for it is the whole cell."""
    after = need(rewriting.write(parsed, module))
    return Edit(cell=cell.number, before=cell.source, after=after, replay=after)


def last_name(node: cst.BaseExpression) -> str:
    """Return the last part of the name that is called, ``Adam`` of ``torch.optim.Adam(...)``; empty if it has none."""
    func = node.func if isinstance(node, cst.Call) else node
    if isinstance(func, cst.Attribute):
        return func.attr.value
    return func.value if isinstance(func, cst.Name) else ""


def keyword(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """Return what is passed by the keyword ``name``, None where nothing is."""
    return next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def keyword_text(call: cst.Call, name: str) -> str | None:
    """Return the text of what is passed by the keyword ``name``, None where nothing is."""
    given = keyword(call, name)
    return None if given is None else text_of(given)


def with_keyword(call: cst.Call, name: str, value: str, after: str | None = None) -> cst.Call:
    """Return ``call`` with ``name=value`` among its arguments, in the style in which they are written."""
    if any(arg.star for arg in call.args):
        raise Unfit("the settings are unpacked from something that may hold this one already")
    return arguments.with_keyword(call, name, value, after)


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
        place = _in_function(cells, owner) if owner.scope is not None else _at_top(cells, owner.path)
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
        for function in reversed(_functions(text)):
            names = [name for one in own_nodes(function.body) if isinstance(one, ast.Global) for name in one.names]
            if root in names and (bound := last_binding(text, root, function=function)) is not None:
                return _Place(cell, text, bound.whole, in_function=True)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLines:
    """The body of a loop in two forms that go side by side, of LibCST and as the ``node`` of ``ast``.

    Each statement of ``lines`` is on a line of its own; the one at ``first`` runs a model first.
    """

    parsed: rewriting.ParsedCell
    loop: cst.For | cst.While
    node: Loop
    lines: Sequence[cst.BaseStatement]
    first: int

    def under(self, context: str, last: int) -> cst.For | cst.While:
        """Return the loop with ``with context:`` around its lines from the first that runs a model to ``last``."""
        return self._with([under(self.parsed, context, self.lines[self.first : last + 1])], last + 1)

    def preceded_by(self, line: str) -> cst.For | cst.While:
        """Return the loop with a line before the one that runs a model first."""
        return self._with(preceded(self.lines[self.first], line, self.parsed), self.first + 1)

    def _with(self, new: Sequence[cst.BaseStatement], end: int) -> cst.For | cst.While:
        lines = [*self.lines[: self.first], *new, *self.lines[end:]]
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
    running = [at for at, one in enumerate(node.body) if runs(one, {*facts.models, *runners})]
    first, *_ = need(running, "the model is not called by a statement of the loop itself")
    return StepLines(parsed=parsed, loop=loop, node=node, lines=rewriting.lines_apart(loop), first=first)


def runs(node: ast.AST, runners: Collection[str]) -> bool:
    """Whether ``node`` calls one of these, or hands one over to what it calls."""
    return any(
        ast.unparse(part.func) in runners or any(ast.unparse(arg) in runners for arg in part.args)
        for part in own_nodes([node])
        if isinstance(part, ast.Call)
    )
