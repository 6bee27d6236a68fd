"""Attention in the source exchanged for ``F.scaled_dot_product_attention``.

What evidence named is looked up again: a softmax of scores in a function of a cell, or a call that asks a model of
transformers for its eager attention. The statements that made the weights go, and their product with the values becomes
one call of the fused kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import libcst as cst

from oomdoctor.fixes._attention_parts import Attention, NotRead
from oomdoctor.fixes._attention_read import read, trees
from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.import_lines import knows

__all__ = ["Fused", "asks_for_eager", "fused"]

_HOMES: Final = {
    "F": ("F", "torch.nn.functional"),
    "nn.functional": ("nn", "torch.nn"),
    "torch.nn.functional": ("torch", "torch"),
}
_LONGEST: Final = 100
_VIEWS: Final = frozenset(
    {"transpose", "permute", "view", "reshape", "size", "contiguous", "unsqueeze", "squeeze", "expand", "to", "bool"}
    | {"flatten", "swapaxes", "type_as", "logical_not", "eq", "ne", "sqrt", "float"}
)
"""What may be called a little later: its result is the same then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """A cell with one attention exchanged.

    Attributes:
        function: qualified name of the function that it stands in.
        home: the name that the new call is reached through, ``F``.
        drops: weights are dropped by a function, which no fact about the models announces.
    """

    cell: Cell
    parsed: rewriting.ParsedCell
    module: cst.Module
    function: str
    home: str
    drops: bool


def asks_for_eager(parsed: rewriting.ParsedCell, line: int) -> cst.SimpleString | None:
    """Return the ``"eager"`` that a statement on ``line`` asks a model for."""
    statement = rewriting.statement_at(parsed, line)
    if statement is None or "attn_implementation" not in parsed.code(statement):
        return None
    finder = _Strings("eager")
    statement.visit(finder)
    return finder.found[0] if len(finder.found) == 1 else None


class _Strings(cst.CSTVisitor):
    """Finds the strings of this value."""

    def __init__(self, value: str) -> None:
        super().__init__()
        self._value = value
        self.found: list[cst.SimpleString] = []

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802
        if node.evaluated_value == self._value:
            self.found.append(node)


def fused(cells: Cells, cell: Cell, line: int) -> Fused | Refused:
    """Return ``cell`` with the attention whose softmax stands on ``line`` exchanged."""
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    path = rewriting.path_to(parsed, line)
    definitions = [node for node in path if isinstance(node, cst.FunctionDef | cst.ClassDef)]
    if not definitions or not isinstance(definitions[-1], cst.FunctionDef):
        return Refused(f"the attention on line {line} stands in no function: its names may be used anywhere")
    if len([node for node in definitions if isinstance(node, cst.FunctionDef)]) > 1:
        return Refused(f"the attention on line {line} stands in a function within a function")
    function = definitions[-1]
    homes = [home for home, imported in _HOMES.items() if _is_imported(cells, home, imported)]
    if not homes:
        return Refused("no cell imports torch.nn.functional")
    try:
        attention = read(parsed, _block(function, path[-1]), line, "\n".join(one.source for one in cells.history))
        _check_uses(parsed, function, attention)
        _check_order(parsed, attention)
    except NotRead as why:
        return Refused(str(why))
    return Fused(
        cell=cell,
        parsed=parsed,
        module=_exchanged(parsed, attention, homes[0]),
        function=".".join(node.name.value for node in definitions),
        home=homes[0],
        drops=attention.weights.dropout is not None and not attention.weights.by_layer,
    )


def _is_imported(cells: Cells, home: str, imported: tuple[str, str]) -> bool:
    taken = re.compile(rf"^[ \t]*{re.escape(home)}\s*=[^=]", re.MULTILINE)
    return knows(cells, *imported) and not any(taken.search(cell.source) for cell in cells.history)


def _block(function: cst.FunctionDef, statement: rewriting.Statement) -> list[rewriting.Statement]:
    """Return the statements that ``statement`` stands among."""
    todo: list[cst.CSTNode] = [function]
    while todo:
        node = todo.pop()
        body = node.body if isinstance(node, cst.IndentedBlock) else ()
        if any(one is statement for one in body):
            return [one for one in body if isinstance(one, cst.SimpleStatementLine | cst.BaseCompoundStatement)]
        todo += node.children
    raise NotRead("the attention stands on one line with its function")


def _check_uses(parsed: rewriting.ParsedCell, function: cst.FunctionDef, attention: Attention) -> None:
    """Check that scores and weights are used for nothing else.

    Raises:
        NotRead: they are.
    """
    own = {line for node in (*attention.steps, attention.last) for line in parsed.lines_of(node)}
    last = trees(parsed, attention.last)
    rebound = {name for tree in last for name in bound(tree)}
    for node in _loads(parsed.tree, attention.names):
        is_another = node.id in rebound and node.lineno > max(own)
        if node.lineno in parsed.lines_of(function) and node.lineno not in own and not is_another:
            raise NotRead(f"`{node.id}` is used on line {node.lineno} as well: fused kernels do not return it")
    beside = [node for tree in last for node in _loads(tree, attention.names)]
    if len(beside) > len(_loads(ast.parse(parsed.code(attention.product).strip(), mode="eval"), attention.names)):
        raise NotRead(f"`{beside[0].id}` is used beside its product with the values: fused kernels do not return it")


def _loads(tree: ast.AST, names: frozenset[str]) -> list[ast.Name]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [node for node in nodes if node.id in names and isinstance(node.ctx, ast.Load)]


def _check_order(parsed: rewriting.ParsedCell, attention: Attention) -> None:
    """Check that what the call takes is, where it stands now, what it was where it stood.

    Raises:
        NotRead: a statement in between may have changed it.
    """
    steps = [tree for node in attention.steps for tree in trees(parsed, node)]
    for node in attention.between:
        # A name that is bound before any step reads it is the same in the call, which stands below both.
        earlier = [one for one in attention.steps if parsed.lines_of(one).start < parsed.lines_of(node).start]
        needed = {name for one in earlier for tree in trees(parsed, one) for name in reads(tree)} - attention.names
        (tree, *more) = trees(parsed, node)
        plain = isinstance(tree, ast.Assign) and all(isinstance(target, ast.Name) for target in tree.targets)
        if not plain or more or bound(tree) & needed:
            raise NotRead(f"line {parsed.lines_of(node).start} stands between the scores and the values")
    if attention.between and (called := next(_calls(steps, attention.layers), None)) is not None:
        raise NotRead(f"`{called}` would be called later than it was")


def _calls(steps: list[ast.stmt], layers: frozenset[str]) -> Iterator[str]:
    """Yield calls for queries, keys and masks whose result may be another one later."""
    skipped = {"matmul", "bmm", "einsum", "softmax", "Softmax", "masked_fill", "masked_fill_", "dropout", "float"}
    for tree in steps:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            name = text.rpartition(".")[2]
            if name not in _VIEWS | skipped and text not in layers:
                yield ast.unparse(node)


def _exchanged(parsed: rewriting.ParsedCell, attention: Attention, home: str) -> cst.Module:
    """Return the cell without the steps, the call in the place of the product, and their comments before it."""
    before = attention.steps[0].leading_lines if attention.steps else attention.last.leading_lines
    rest = [*attention.steps, attention.last][1:]
    comments = [line for node in rest for line in node.leading_lines if line.comment is not None]
    width = parsed.positions[attention.last].start.column
    beside = len(parsed.code(attention.last).splitlines()[0]) - len(parsed.code(attention.product))
    new = cst.parse_expression(_call(attention, home, _LONGEST - width - beside), parsed.module.config_for_parsing)
    leading = [*before, *comments]
    if attention.between:
        # What stood before the steps stays where it is, with the first statement that does.
        leading = list(attention.last.leading_lines)
    return parsed.module.visit(_Exchange(attention, new, leading))


class _Exchange(cst.CSTTransformer):
    """Takes the steps out, and puts the call in the place of the product."""

    def __init__(self, attention: Attention, new: cst.BaseExpression, leading: list[cst.EmptyLine]) -> None:
        super().__init__()
        self._attention, self._new, self._leading = attention, new, leading

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel:
        if any(original_node is step for step in self._attention.steps):
            return cst.RemovalSentinel.REMOVE
        if original_node is self._attention.product:
            return self._new
        if original_node is self._attention.last:
            return updated_node.with_changes(leading_lines=self._leading)
        return super().on_leave(original_node, updated_node)


def _call(attention: Attention, home: str, room: int) -> str:
    """Return the call of the fused kernel, over several lines where it is longer than ``room``."""
    scores = attention.weights.scores
    arguments = [scores.query, scores.key, attention.value]
    arguments += [f"attn_mask={scores.mask}"] if scores.mask is not None else []
    dropout = attention.weights.dropout
    arguments += [f"dropout_p={dropout}"] if dropout is not None else []
    scale = "1.0" if scores.scale is None else scores.scale
    arguments += [f"scale={scale}"] if scale != "default" else []
    name, joined = f"{home}.scaled_dot_product_attention", ", ".join(arguments)
    if len(name) + len(joined) + 2 <= room:
        return f"{name}({joined})"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
