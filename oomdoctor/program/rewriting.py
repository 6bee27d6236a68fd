"""Cells read and written with LibCST: what every fix that changes source shares.

IPython's own lines are masked while LibCST looks at a cell and put back in the text that comes out, so formatting,
comments and magics stay exactly as they were wherever a fix did not change them. Whatever cannot be read or replayed
becomes a ``Refused`` with a reason that a user can be shown, never an exception.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.site import Site
from oomdoctor.model.unavailable import Refused
from oomdoctor.program.magics import MaskedCell, mask, tree_of
from oomdoctor.program.modules import MAKING, why_not

Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
Definition: TypeAlias = cst.FunctionDef | cst.ClassDef
New: TypeAlias = cst.CSTNode | Sequence[Statement] | Callable[[cst.CSTNode], cst.CSTNode]
"""What comes in the place of a node: another one, statements, or what is made of it when all within it is exchanged."""

_BOUND_TO_CLASS: Final = re.compile(r"\bsuper\b|\b__class__\b|(?<!\w)__[a-zA-Z]\w*(?<!__)\b")
Kind = TypeVar("Kind", bound=cst.CSTNode)
Located = TypeVar("Located", Site, TrainingLoop)
_WORD: Final = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParsedCell:
    """A cell as a LibCST module, and where each node of that stands in the lines of the cell."""

    source: str
    module: cst.Module
    masked: MaskedCell = field(repr=False)
    positions: Mapping[cst.CSTNode, CodeRange] = field(repr=False)

    @property
    def tree(self) -> ast.Module:
        """The tree of ``ast`` of the same text."""
        return tree_of(self.source)

    def lines_of(self, node: cst.CSTNode) -> range:
        """Return the lines of the cell that ``node`` stands on, one-based."""
        where = self.positions[node]
        return range(where.start.line, where.end.line + 1)

    def code(self, node: cst.CSTNode) -> str:
        """Return the source text of ``node``, without the blank lines and comments before it."""
        bare = node.with_changes(leading_lines=()) if hasattr(node, "leading_lines") else node
        return self.module.code_for_node(bare).strip()


@lru_cache(maxsize=64)
def read(source: str) -> ParsedCell | Refused:
    """Return ``source`` parsed, once for a text, or why it could not be."""
    masked = mask(source)
    try:
        wrapper = MetadataWrapper(cst.parse_module(masked.text), unsafe_skip_copy=True)  # nobody else has it
    except cst.ParserSyntaxError as error:
        return Refused(f"line {error.raw_line} of the cell is not Python that can be rewritten")
    positions = {
        node: where for node, where in wrapper.resolve(PositionProvider).items() if isinstance(where, CodeRange)
    }
    return ParsedCell(source=source, module=wrapper.module, masked=masked, positions=positions)


def write(parsed: ParsedCell, module: cst.Module) -> str | Refused:
    """Return the text of ``module``, a changed form of ``parsed.module``, with IPython's lines back in it."""
    text = parsed.masked.unmask(module.code)
    return text if text is not None else Refused("the change would touch a line of IPython's own syntax")


def path_to(parsed: ParsedCell, line: int) -> tuple[Statement, ...]:
    """Return the statements that ``line`` stands in, outermost first; empty between statements."""
    kinds = cst.SimpleStatementLine, cst.BaseCompoundStatement
    nodes = (node for node in parsed.positions if isinstance(node, kinds))
    found = [node for node in nodes if line in parsed.lines_of(node)]
    found.sort(key=lambda node: (parsed.positions[node].start.line, -parsed.positions[node].end.line))
    return tuple(found)


def statement_at(parsed: ParsedCell, line: int) -> Statement | None:
    """Return the innermost statement on ``line``."""
    path = path_to(parsed, line)
    return path[-1] if path else None


def loop_at(parsed: ParsedCell, line: int) -> cst.For | cst.While | None:
    """Return the loop that begins on ``line``."""
    loops = (node for node in reversed(path_to(parsed, line)) if isinstance(node, cst.For | cst.While))
    return next((loop for loop in loops if parsed.lines_of(loop).start == line), None)


def apart(node: cst.SimpleStatementLine | cst.SimpleStatementSuite) -> list[cst.SimpleStatementLine]:
    """Return the statements that share a line, each on a line of its own."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        return [node]
    lines = [
        cst.SimpleStatementLine(body=[small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for small in node.body
    ]
    lines[-1] = lines[-1].with_changes(trailing_whitespace=node.trailing_whitespace)
    lines[0] = lines[0].with_changes(leading_lines=getattr(node, "leading_lines", ()))
    return lines


def lines_apart(node: cst.CSTNode) -> list[cst.BaseStatement]:
    """Return the statements of a block or of a statement's block, each on a line of its own."""
    body = node if isinstance(node, cst.Module | cst.BaseSuite) else node.body  # type: ignore[attr-defined]
    if isinstance(body, cst.SimpleStatementSuite):
        return list(apart(body))
    lines = (apart(one) if isinstance(one, cst.SimpleStatementLine) else [one] for one in body.body)
    return [one for line in lines for one in line]  # type: ignore[misc]


def block(old: cst.BaseSuite, lines: Sequence[cst.BaseStatement]) -> cst.IndentedBlock:
    """Return a block with these statements in it."""
    return old.with_changes(body=lines) if isinstance(old, cst.IndentedBlock) else cst.IndentedBlock(body=lines)


def within(node: cst.CSTNode, kind: type[Kind], without: tuple[type[cst.CSTNode], ...] = ()) -> Iterator[Kind]:
    """Yield the nodes of a kind below ``node`` in the order of the text, not going into some kinds."""
    for child in node.children:
        if not isinstance(child, without):
            if isinstance(child, kind):
                yield child
            yield from within(child, kind, without)


def text_of(node: cst.CSTNode) -> str:
    """Return the source text of a node."""
    return cst.Module([]).code_for_node(node)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditPlace:
    """A line of a cell that can be changed, in a function (``scope``) of its top level or in the whole cell."""

    cell: Cell
    parsed: ParsedCell
    line: int
    scope: cst.CSTNode


def place_at(cells: Cells, number: int, line: int) -> EditPlace | Refused:
    """Return a line of a cell as a place, or why it cannot be changed."""
    cell = next((one for one in cells.history if one.number == number), None)
    if cell is None:
        return Refused(f"cell {number} is no longer there")
    parsed = read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    around = next(iter(path_to(parsed, line)), None)
    if isinstance(around, cst.ClassDef) and cell.number != cells.failing.number:
        return Refused(f"the change is in a class of {cell}, which the live objects would not follow")
    scope = around if isinstance(around, cst.FunctionDef) else parsed.module
    return EditPlace(cell=cell, parsed=parsed, line=line, scope=scope)


def statements(text: str, parsed: ParsedCell) -> tuple[Statement, ...]:
    """Return ``text`` as statements that take on the indentation of ``parsed``."""
    return tuple(cst.parse_module(text, config=parsed.module.config_for_parsing).body)


def replace(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode | Sequence[Statement]) -> cst.Module:
    """Return ``module`` with ``old`` (the very node) replaced by a node, or a statement by several or none."""
    return exchange(module, {old: new})


def exchange(tree: Kind, changes: Mapping[cst.CSTNode, New]) -> Kind:
    """Return ``tree`` with each of these very nodes below it exchanged."""
    return tree.visit(_Exchange(changes))  # type: ignore[return-value]


def fresh_name(stem: str, cells: Cells, taken: Collection[str] = ()) -> str:
    """Return ``stem``, or ``stem_2`` and so on, whichever no cell uses in any way and ``taken`` does not hold."""
    used = {word for cell in cells.history for word in _WORD.findall(cell.source)} | set(taken) | set(dir(builtins))
    name, number = stem, 2
    while name in used or keyword.iskeyword(name):
        name, number = f"{stem}_{number}", number + 1
    return name


def edit(
    cells: Cells, cell: Cell, parsed: ParsedCell, module: cst.Module, live: Sequence[str] | None = None
) -> Edit | Refused:
    """Return the change of ``cell`` from ``parsed.module`` to ``module``, with what a retry has to run for it.

    For an earlier cell that is what it newly imports, the changed functions of its top level and methods of its
    classes, and ``live``. Another change there is refused, as running such a statement again could undo what the user
    did since.

    Args:
        live: lines that do to the objects that are there what changed statements of an earlier cell do when they make
            them, None where no statement is changed.
    """
    after = write(parsed, module)
    if isinstance(after, Refused):
        return after
    if cell is cells.failing or cell.number == cells.failing.number:
        return Edit(cell=cell.number, before=cell.source, after=after, replay=after)
    if cell.file is not None:
        why = why_not(cell.source, after)
        if why is not None:
            return Refused(f"{cell}: {why}")
        lines = "\n".join(live or ())
        return Edit(cell=cell.number, before=cell.source, after=after, replay=lines, file=cell.file)
    known = {_bare(parsed.module, node) for node in parsed.module.body}
    changed = [node for node in module.body if _bare(module, node) not in known]
    imports = "".join(_text(module, node) for node in changed if is_import(node))
    functions = [_text(module, node) for node in changed if isinstance(node, cst.FunctionDef)]
    classes = [node for node in changed if isinstance(node, cst.ClassDef)]
    given = [given_to_class(parsed.module, module, node, fresh_name("Changed", cells)) for node in classes]
    if None in given:
        return Refused(f"the change is in a class of {cell}, which the live objects would not follow")
    others = (node for node in changed if not is_import(node) and not isinstance(node, cst.FunctionDef | cst.ClassDef))
    if any(others) and live is None:
        return Refused(f"the change is in statements of {cell}, which the live objects would not follow")
    parts = [imports, *functions, *given]
    texts = [parsed.masked.unmask(text) for text in filter(None, parts)]
    if None in texts:
        return Refused("the change would touch a line of IPython's own syntax")
    replay = "\n\n".join([*map(str, texts), *(["\n".join(live)] if live else [])])
    return Edit(cell=cell.number, before=cell.source, after=after, replay=replay)


def edited(cells: Cells, place: EditPlace, changes: Mapping[cst.CSTNode, New]) -> Patch | Refused:
    """Return the cell of ``place`` with other nodes."""
    return join(cells, [edit(cells, place.cell, place.parsed, exchange(place.parsed.module, changes))])


def at_sites(
    cells: Cells,
    sites: Sequence[Located],
    change: Callable[[ParsedCell, list[Located]], Mapping[cst.CSTNode, New] | cst.Module | Refused],
) -> Patch | Refused:
    """Return the patch of the cells that sites are in; ``change`` returns the nodes to exchange, or the whole cell."""
    edits: list[Edit | Refused] = []
    for number in dict.fromkeys(one.cell for one in sites):
        parsed = read(cells.get(number).source)
        if isinstance(parsed, Refused):
            return parsed
        changes = change(parsed, [one for one in sites if one.cell == number])
        if isinstance(changes, Refused):
            return changes
        module = changes if isinstance(changes, cst.Module) else exchange(parsed.module, changes)
        edits.append(edit(cells, cells.get(number), parsed, module))
    return join(cells, edits)


def join(cells: Cells, edits: Iterable[Edit | Refused]) -> Patch | Refused:
    """Return the edits as one patch, the failing cell last, or the first refusal among them."""
    good: list[Edit] = []
    for one in edits:
        if isinstance(one, Refused):
            return one
        if one.file is None and cells.get(one.cell).file is not None:
            return Refused(f"the change is in {cells.get(one.cell)}, whose loaded form would not follow")
        if one.before != one.after:
            good.append(one)
    if not good:
        return Refused("there is nothing left to change")
    good.sort(key=lambda one: (one.cell == cells.failing.number, one.cell))
    return Patch(edits=tuple(good))


def _text(module: cst.Module, node: cst.CSTNode) -> str:
    return module.code_for_node(node).lstrip("\n")


def _bare(module: cst.Module, node: cst.CSTNode) -> str:
    """Return a statement without the comments above it, which LibCST keeps elsewhere where it is the first."""
    return module.code_for_node(node.with_changes(leading_lines=()))


def is_import(node: cst.CSTNode) -> bool:
    """Whether ``node`` is a line that imports."""
    return isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Import | cst.ImportFrom)


def given_to_class(before: cst.Module, after: cst.Module, changed: cst.ClassDef, holder: str) -> str | None:
    """Return what gives the changed methods of a class to the live one, None where they cannot be given to it.

    Running the definition again would make another class, which the live objects are none of. A method cannot be given
    where it was needed to make the objects (``__init__`` and what it calls have run), or with ``super()`` or private
    names, which are compiled with the class that they stand in.

    Args:
        holder: a name that nothing has, for as long as the statements run.
    """
    found = [node for node in before.body if isinstance(node, cst.ClassDef) and node.name.value == changed.name.value]
    if len(found) != 1 or why_not(before.code_for_node(found[0]), after.code_for_node(changed)) is not None:
        return None
    known = {before.code_for_node(node) for node in found[0].body.body}
    methods = [node for node in changed.body.body if after.code_for_node(node) not in known]
    made = "".join(before.code_for_node(node) for node in found[0].body.body if _is_making(node))
    name, given = changed.name.value, list[str]()
    for method in methods:
        if not isinstance(method, cst.FunctionDef) or method.decorators or _is_making(method):
            return None
        called = method.name.value
        if _BOUND_TO_CLASS.search(after.code_for_node(method)) or re.search(rf"\.{called}\b", made):
            return None
        given += [f"{name}.{called} = {holder}.{called}", f'{name}.{called}.__qualname__ = "{name}.{called}"']
    held = cst.ClassDef(name=cst.Name(holder), body=changed.body.with_changes(body=methods))
    return "\n".join([after.code_for_node(held), *given, f"del {holder}", ""])


def _is_making(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.FunctionDef) and MAKING.fullmatch(node.name.value) is not None


class _Exchange(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, New]) -> None:
        super().__init__()
        self._changes = {id(old): new for old, new in changes.items()}

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel:
        new = self._changes.get(id(original_node))
        if new is None:
            return super().on_leave(original_node, updated_node)
        if isinstance(new, cst.CSTNode):
            return new
        if callable(new):
            return new(updated_node)
        return cst.FlattenSentinel(new) if new else cst.RemovalSentinel.REMOVE
