"""Attention in the source exchanged for ``F.scaled_dot_product_attention``.

The statements that made the weights go, and their product with the values becomes one call of the fused kernel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import libcst as cst

from oomdoctor.fixes._attention_read import Attention, NotRead, read
from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.import_lines import spelled
from oomdoctor.program.names import blocks_of
from oomdoctor.program.replay import node_of
from oomdoctor.program.rewriting import within

__all__ = ["Fused", "asks_for_eager", "fused"]

_LONGEST: Final = 100
_SAME_LATER: Final = frozenset(
    {"transpose", "permute", "view", "reshape", "size", "contiguous", "unsqueeze", "squeeze", "expand", "to", "bool"}
    | {"flatten", "swapaxes", "type_as", "logical_not", "eq", "ne", "sqrt", "float"}
    | {"matmul", "bmm", "einsum", "softmax", "Softmax", "masked_fill", "masked_fill_", "dropout"}
)
"""What may be called a little later: its result is the same then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """A cell with one attention exchanged.

    Attributes:
        function: qualified name of the function that it stands in.
        drops: weights are dropped by a function, which no fact about the models announces.
    """

    parsed: rewriting.ParsedCell
    module: cst.Module
    function: str
    drops: bool


def asks_for_eager(parsed: rewriting.ParsedCell, line: int) -> cst.SimpleString | None:
    """Return the ``"eager"`` that a statement on ``line`` asks a model for."""
    statement = rewriting.statement_at(parsed, line)
    if statement is None or "attn_implementation" not in parsed.code(statement):
        return None
    found = [one for one in within(statement, cst.SimpleString) if one.evaluated_value == "eager"]
    return found[0] if len(found) == 1 else None


def fused(cells: Cells, cell: Cell, line: int) -> Fused | Refused:
    """Return ``cell`` with the attention whose softmax stands on ``line`` exchanged."""
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    tree = ast.parse(parsed.masked.text)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and _covers(node, line)
    ]
    function = around[-1] if around else None
    if function is None or isinstance(function, ast.ClassDef):
        return Refused(f"the attention on line {line} stands in no function: its names may be used anywhere")
    if sum(not isinstance(node, ast.ClassDef) for node in around) > 1:
        return Refused(f"the attention on line {line} stands in a function within a function")
    beside = cells.beside(cell)
    home = spelled(beside, "torch.nn.functional")
    if home is None:
        return Refused(f"{'no cell' if cell.file is None else cell.name} imports torch.nn.functional")
    try:
        everything = "\n".join(one.source for one in beside.history)
        attention = read(parsed.masked.text, _block(function.body, line), line, everything)
        _check_uses(function, attention)
        _check_order(attention)
        module = _exchanged(parsed, attention, home)
    except NotRead as why:
        return Refused(str(why))
    drops = attention.weights.dropout is not None and not attention.weights.by_layer
    return Fused(parsed=parsed, module=module, function=".".join(node.name for node in around), drops=drops)


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _block(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """Return the statements among which the one on ``line`` stands that has no blocks of its own there."""
    for statement in body:
        for inner in blocks_of(statement) if _covers(statement, line) else ():
            if any(_covers(one, line) for one in inner) and inner[0].lineno != statement.lineno:
                return _block(inner, line)
    return body


def _check_uses(function: ast.stmt, attention: Attention) -> None:
    """Check that scores and weights are used for nothing else.

    Raises:
        NotRead: they are.
    """
    own = {
        line
        for node in (*attention.steps, attention.last)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    rebound = bound(attention.last)
    for node in _loads(function, attention.names):
        if node.lineno not in own and not (node.id in rebound and node.lineno > max(own)):
            raise NotRead(f"`{node.id}` is used on line {node.lineno} as well: fused kernels do not return it")
    beside = _loads(attention.last, attention.names)
    if len(beside) > len(_loads(attention.product, attention.names)):
        raise NotRead(f"`{beside[0].id}` is used beside its product with the values: fused kernels do not return it")


def _loads(tree: ast.AST, names: frozenset[str]) -> list[ast.Name]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [node for node in nodes if node.id in names and isinstance(node.ctx, ast.Load)]


def _check_order(attention: Attention) -> None:
    """Check that what the call takes is, where it stands now, what it was where it stood.

    Raises:
        NotRead: a statement in between may have changed it.
    """
    for node in attention.between:
        # A name that is bound before any step reads it is the same in the call, which stands below both.
        earlier = [step for step in attention.steps if step.lineno < node.lineno]
        needed = {name for step in earlier for name in reads(step)} - attention.names
        plain = isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)
        if not plain or bound(node) & needed:
            raise NotRead(f"line {node.lineno} stands between the scores and the values")
    if attention.between and (called := next(_calls(attention), None)) is not None:
        raise NotRead(f"`{called}` would be called later than it was")


def _calls(attention: Attention) -> Iterator[str]:
    """Yield calls for queries, keys and masks whose result may be another one later."""
    for call in (node for step in attention.steps for node in ast.walk(step) if isinstance(node, ast.Call)):
        text = ast.unparse(call.func)
        if text.rpartition(".")[2] not in _SAME_LATER and text not in attention.layers:
            yield ast.unparse(call)


def _exchanged(parsed: rewriting.ParsedCell, attention: Attention, home: str) -> cst.Module:
    """Return the cell without the steps, the call in the place of the product, and their comments before it."""
    steps = [_statement(parsed, step) for step in attention.steps]
    last, product = _statement(parsed, attention.last), node_of(parsed, attention.product)
    if product is None:
        raise NotRead("the product of weights and values is written in a way that is not followed")
    first = steps[0] if steps else last
    comments = [line for node in [*steps, last][1:] for line in node.leading_lines if line.comment is not None]
    # What stood before the steps stays where it is, with the first statement that does.
    leading = list(last.leading_lines) if attention.between else [*first.leading_lines, *comments]
    taken = parsed.positions[last].start.column + len(parsed.code(last).splitlines()[0]) - len(parsed.code(product))
    call = cst.parse_expression(_call(attention, home, _LONGEST - taken), parsed.module.config_for_parsing)
    nodes: dict[cst.CSTNode, rewriting.New] = dict.fromkeys(steps, ())
    nodes |= {product: call, last: lambda node: node.with_changes(leading_lines=leading)}
    return rewriting.exchange(parsed.module, nodes)


def _statement(parsed: rewriting.ParsedCell, node: ast.stmt) -> rewriting.Statement:
    """Return the statement that begins where ``node`` does."""
    path = rewriting.path_to(parsed, node.lineno)
    found = next((one for one in path if parsed.lines_of(one).start == node.lineno), None)
    if found is None:
        raise NotRead("the attention stands on one line with its function")
    return found


def _call(attention: Attention, home: str, room: int) -> str:
    """Return the call of the fused kernel, over several lines where it is longer than ``room``."""
    weights = attention.weights
    arguments = [weights.query, weights.key, attention.value]
    arguments += [f"attn_mask={weights.mask}"] if weights.mask is not None else []
    arguments += [f"dropout_p={weights.dropout}"] if weights.dropout is not None else []
    arguments += [f"scale={weights.scale or '1.0'}"] if weights.scale != "default" else []
    name, joined = f"{home}.scaled_dot_product_attention", ", ".join(arguments)
    if len(name) + len(joined) + 2 <= room:
        return f"{name}({joined})"
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
