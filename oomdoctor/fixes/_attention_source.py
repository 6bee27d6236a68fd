"""Attention that is written out, read from the statements that make it and exchanged for the call of a fused kernel.

The statements of one block are followed in their order, each value being scores, weights, or something else. Each is
brought to one form (an operation and its operands, however it is spelled) and looked up among what a kernel does: a
product of queries and keys, a scale, a mask, a cast, a softmax over the last dimension, a dropout. Anything else ends
it. Shapes are not known: keys are told by a transpose of the last two dimensions. That what was read is what the kernel
computes is for the trial to show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import libcst as cst

from oomdoctor.fixes._refusals import Unfit, need, refusing
from oomdoctor.model import Cell, Cells, Edit
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.earlier_cells import node_of
from oomdoctor.program.import_lines import spelled
from oomdoctor.program.names import blocks_of, call_name

_LONGEST: Final = 100
_NAMESPACES: Final = frozenset({"torch", "F", "torch.nn.functional", "nn.functional", "self"})
_OPERATORS: Final = {ast.Mult: "mul", ast.Div: "div", ast.Add: "add", ast.MatMult: "matmul"}
_SWAPS: Final = frozenset(
    {f"transpose({a}, {b})" for a, b in ((-2, -1), (-1, -2), (2, 3), (3, 2))}
    | {"permute(0, 1, 3, 2)", "permute(0, 2, 1)"}
)
_OF_THREE: Final = frozenset({"transpose(1, 2)", "transpose(2, 1)"})
_SCORES: Final = re.compile(r"(\w+)(\w)(\w),\1(\w)\3->\1\2\4")
_MIX: Final = re.compile(r"(\w+)(\w)(\w),\1\3(\w)->\1\2\4")
"""Subscripts of an einsum: ``...id,...jd->...ij``, and ``...ij,...jd->...id``."""
_CASTS: Final = frozenset({"float", "to", "type_as", "type", "half", "bfloat16", "contiguous"})
"""The fused kernel adds up in float32, and answers in the type of its arguments."""
_LITTLE: Final = re.compile(r"-?\d{1,3}(\.\d*)?|float\(.inf.\)")
"""Scores that are filled with this keep a weight."""
_ROOT: Final = re.compile(r"(?P<inverse>1(?:\.0)? / )?(?:math|np)\.sqrt\((?P<of>\w+)(?:\.size\(-1\)|\.shape\[-1\])\)")
"""The root of the features, or its inverse: what a kernel scales by where it is told nothing."""


class Operation(NamedTuple):
    """An expression in one form: ``F.softmax(x, -1)``, ``x.softmax(-1)`` and ``nn.Softmax(-1)(x)`` are the same."""

    name: str
    operands: Sequence[ast.expr]
    given: Mapping[str, ast.expr]


def operation(node: ast.AST) -> Operation | None:
    """Return the operation that an expression is; the making of a layer is none."""
    match node:
        case ast.BinOp(left=left, op=operator, right=right):
            return Operation(_OPERATORS.get(type(operator), "?"), [left, right], {})
        case ast.Call(func=ast.Call(func=layer, args=settings, keywords=keywords), args=args):
            name, operands = call_name(layer).rpartition(".")[2].lower(), [*args, *settings]
        case ast.Call(func=ast.Attribute(value=of, attr=name), args=args, keywords=keywords):
            operands = args if ast.unparse(of) in _NAMESPACES else [of, *args]
        case ast.Call(func=ast.Name(id=name), args=operands, keywords=keywords):
            pass
        case _:
            return None
    return Operation(name, operands, {one.arg or "": one.value for one in keywords})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Products of queries and keys, or the weights that a softmax makes of them; all as text.

    Attributes:
        scale: what they are multiplied by, or ``default``; None where they are as they come.
        mask: ``attn_mask``; ``dropout``: the probability with which weights are dropped; None where there is none.
    """

    query: str
    key: str
    scale: str | None = None
    mask: str | None = None
    is_weights: bool = False
    dropout: str | None = None

    def arguments(self, value: str) -> list[str]:
        """Return what the kernel is given."""
        scale = None if self.scale == "default" else self.scale or "1.0"
        named = {"attn_mask": self.mask, "dropout_p": self.dropout, "scale": scale}
        return [self.query, self.key, value, *(f"{name}={text}" for name, text in named.items() if text is not None)]


@refusing
def fused(cells: Cells, cell: Cell, line: int) -> Edit:
    """Return the change of ``cell`` that exchanges the attention whose softmax stands on ``line``."""
    parsed = need(rewriting.read(cell.source))
    tree = ast.parse(parsed.masked.text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and _covers(node, line)]
    if not around or isinstance(around[-1], ast.ClassDef):
        raise Unfit(f"the attention on line {line} stands in no function: its names may be used anywhere")
    if sum(not isinstance(node, ast.ClassDef) for node in around) > 1:
        raise Unfit(f"the attention on line {line} stands in a function within a function")
    here = "no cell" if cell.file is None else cell.name
    home = need(spelled(cells.beside(cell), "torch.nn.functional"), f"{here} imports torch.nn.functional")
    return need(rewriting.edit(cells, cell, parsed, _exchanged(parsed, around[-1], line, home)))


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _block(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """Return the statements among which the one on ``line`` stands that has no blocks of its own there."""
    for statement in body:
        for inner in blocks_of(statement) if _covers(statement, line) else ():
            if any(_covers(one, line) for one in inner) and inner[0].lineno != statement.lineno:
                return _block(inner, line)
    return body


def _exchanged(parsed: rewriting.ParsedCell, function: ast.stmt, line: int, home: str) -> cst.Module:
    block = _block(function.body, line)  # type: ignore[attr-defined]
    reader = _Reader(parsed.masked.text)
    for at, last in enumerate(block):
        if (ends := reader.follow(last)) is None:
            continue
        weights, value, product = ends
        first = min(map(block.index, reader.steps), default=at)
        if block[first].lineno <= line <= (last.end_lineno or last.lineno):
            _check_unused(function, reader, last, product)
            is_whole = all(node in reader.steps for node in block[first:at])
            return _written(parsed, reader.steps, last, product, is_whole, weights.arguments(value), home)
        reader = _Reader(parsed.masked.text)
    raise Unfit(reader.why or f"no product of weights and values was found for the softmax on line {line}")


def _check_unused(function: ast.stmt, reader: _Reader, last: ast.stmt, product: ast.expr) -> None:
    """Check that scores and weights are used for nothing else: a rare branch would not show in a trial."""
    own = {node for one in (*reader.steps, product) for node in ast.walk(one)}
    for node in ast.walk(function):
        is_use = isinstance(node, ast.Name) and node.id in reader.names and isinstance(node.ctx, ast.Load)
        if is_use and node not in own and not (node.id in bound(last) and node.lineno > last.lineno):  # type: ignore[attr-defined]
            name, line = node.id, node.lineno  # type: ignore[attr-defined]
            raise Unfit(f"`{name}` is used on line {line} as well: fused kernels do not return it")


class _Reader:
    """Follows statements and remembers which names hold scores and weights, and by which ``steps`` they are made."""

    def __init__(self, source: str) -> None:
        self._source, self._known = source, dict[str, _Read]()
        self.steps, self.names, self.why = list[ast.stmt](), set[str](), ""

    def follow(self, statement: ast.stmt) -> tuple[_Read, str, ast.expr] | None:
        """Take in one statement; return weights, the text of the values and their product if they end here."""
        for node in _expressions(statement):
            if (factors := _factors(node)) is None:
                continue
            left, right = self._value(factors[0]), self._value(factors[1])
            if left is not None or right is not None:
                if left is None or not left.is_weights or right is not None or not _has_form(_MIX, factors[2]):
                    raise Unfit(f"`{self._code(node)}` is no product of weights and values")
                return left, self._apart(factors[1]), node
        change = self._change(statement)
        for name in bound(statement):
            self._known.pop(name, None)
        if change is not None:
            self._known[change[0]] = change[1]
            self.names.add(change[0])
            self.steps.append(statement)
        return None

    def _code(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._source, node) or ast.unparse(node)

    def _change(self, statement: ast.stmt) -> tuple[str, _Read] | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = self._value(value)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=operator, value=value):
                found = self._value(ast.BinOp(ast.Name(id=target.id, ctx=ast.Load()), operator, value))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name) as of, attr=method)) as call):
                func = ast.Attribute(of, method.removesuffix("_"), ast.Load())
                found = self._value(ast.Call(func, call.args, call.keywords)) if method.endswith("_") else None
            case ast.If(test=test, body=[inner], orelse=[]) if (change := self._change(inner)) is not None:
                name, found = change
                return name, self._where_given(test, self._known.get(name), found)
            case _:
                return None
        return None if found is None else (name, found)

    def _where_given(self, test: ast.expr, before: _Read | None, after: _Read) -> _Read:
        """Take in ``if mask is not None: scores = scores.masked_fill(...)``."""
        match test:
            case ast.Compare(left=given, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                if after.mask is not None and replace(after, mask=None) == before:
                    return replace(after, mask=f"{after.mask} if {self._code(given)} is not None else None")
        raise Unfit(f"`{self._code(test)}` decides what is done to the scores or weights")

    def _value(self, node: ast.expr) -> _Read | None:
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if (factors := _factors(node)) is not None:
            return self._scores(node, *factors)
        done = operation(node)
        if done is None or not done.operands:
            return None
        of, rest = self._value(done.operands[0]), done.operands[1:]
        if of is None and done.name in {"mul", "add"} and len(rest) == 1:
            of, rest = self._value(rest[0]), done.operands[:1]
        if of is None:
            return None
        for one in rest:
            self._apart(one)
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        made = self._after(of, done.name, rest, done.given, name if name.startswith("self.") else "")
        why = f"what `{self._code(node)}` does to the scores or weights is nothing that a fused kernel does"
        return need(made, why)

    def _scores(self, node: ast.expr, query: ast.expr, key: ast.expr, subscripts: str | None) -> _Read | None:
        if self._value(query) is not None or self._value(key) is not None:
            return None
        bare = _untransposed(key, node) if subscripts is None else key if _has_form(_SCORES, subscripts) else None
        if bare is None:
            code = self._code(node)
            self.why = "" if self.names else f"that `{code}` multiplies queries and keys cannot be told from the code"
            return None
        return _Read(query=self._code(query), key=self._code(bare))

    def _after(
        self, of: _Read, name: str, rest: Sequence[ast.expr], given: Mapping[str, ast.expr], layer: str
    ) -> _Read | None:
        """Return what a function, or a ``layer`` of ``self``, makes of scores or weights, None if a kernel does not."""
        is_plain, said = not of.is_weights and of.mask is None, {name: self._code(one) for name, one in given.items()}
        match name, rest:
            case "mul" | "div", [other] if is_plain and of.scale is None:
                code = self._code(other)
                root = _ROOT.fullmatch(code)
                if root is not None and root["of"] in {of.query, of.key} and bool(root["inverse"]) == (name == "mul"):
                    return replace(of, scale="default")
                return replace(of, scale=code if name == "mul" else f"1 / {_bracketed(other, code)}")
            case "add", [other] if is_plain and of.query.isidentifier():
                return replace(of, mask=f"{_bracketed(other, self._code(other))}.to({of.query}.dtype)")
            case "masked_fill", _ if is_plain:
                hidden, fill = [*rest, *given.values()]
                return None if _LITTLE.fullmatch(self._code(fill)) else replace(of, mask=self._kept(hidden))
            case "softmax", _ if not of.is_weights and not said.keys() - {"dim", "dtype"}:
                dims = [*map(self._code, rest), *(said[name] for name in said if name == "dim")]
                return replace(of, is_weights=True) if dims == ["-1"] or (layer and not dims) else None
            case "dropout", _ if of.is_weights and of.dropout is None and not layer:
                said |= dict(zip(("p", "training"), map(self._code, rest), strict=False))
                share, training = said.get("p", "0.5"), said.get("training", "True")
                return replace(of, dropout=share if training == "True" else f"{share} if {training} else 0.0")
        if name in _CASTS:
            return of
        if layer and "drop" in name.lower() and of.is_weights and of.dropout is None:
            return replace(of, dropout=f"{layer}.p if {layer}.training else 0.0")
        return None

    def _kept(self, hidden: ast.expr) -> str:
        """Return the mask of what is attended to, from the one of what is hidden."""
        match hidden:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return f"{self._code(left)} != {self._code(right)}"
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                return self._code(inner)
        return f"~{_bracketed(hidden, self._code(hidden))}"

    def _apart(self, node: ast.expr) -> str:
        if reads(node) & self._known.keys():
            raise Unfit(f"`{self._code(node)}` is made of the scores or weights themselves")
        return self._code(node)


def _written(
    parsed: rewriting.ParsedCell,
    steps: Sequence[ast.stmt],
    last: ast.stmt,
    product: ast.expr,
    is_whole: bool,
    arguments: Sequence[str],
    home: str,
) -> cst.Module:
    """Return the cell without the steps, the call in the place of the product, and their comments before it."""
    gone, end = [_statement(parsed, step) for step in steps], _statement(parsed, last)
    old = need(node_of(parsed, product), "the product of weights and values is written in a way that is not followed")
    first = gone[0] if gone else end
    comments = [line for node in [*gone, end][1:] for line in node.leading_lines if line.comment is not None]
    # What stood before the steps stays where it is, with the first statement that does.
    leading = [*first.leading_lines, *comments] if is_whole else list(end.leading_lines)
    taken = parsed.positions[end].start.column + len(parsed.code(end).splitlines()[0]) - len(parsed.code(old))
    call = f"{home}.scaled_dot_product_attention({', '.join(arguments)})"
    if len(call) > _LONGEST - taken:
        call = call.partition("(")[0] + "(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    nodes: dict[cst.CSTNode, rewriting.New] = {
        **dict.fromkeys(gone, ()),
        old: cst.parse_expression(call, parsed.module.config_for_parsing),
        end: lambda node: node.with_changes(leading_lines=leading),
    }
    return rewriting.exchange(parsed.module, nodes)


def _statement(parsed: rewriting.ParsedCell, node: ast.stmt) -> rewriting.Statement:
    """Return the statement that begins where ``node`` does, and is alone on its line."""
    path = rewriting.path_to(parsed, node.lineno)
    found = next((one for one in path if parsed.lines_of(one).start == node.lineno), None)
    if found is None or (isinstance(found, cst.SimpleStatementLine) and len(found.body) > 1):
        raise Unfit("the attention stands on one line with other statements")
    return found


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, outermost first, not those of the blocks and lambdas within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.Lambda | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _factors(node: ast.expr) -> tuple[ast.expr, ast.expr, str | None] | None:
    match operation(node):
        case Operation("matmul" | "bmm", [left, right]):
            return left, right, None
        case Operation("einsum", [form, left, right]):
            return left, right, re.sub(r"[\s'\"]+", "", ast.unparse(form))
    return None


def _has_form(form: re.Pattern[str], subscripts: str | None) -> bool:
    """Whether the subscripts of an einsum, where there are any, have a form, each letter standing for another one."""
    found = None if subscripts is None else form.fullmatch(subscripts)
    letters = "".join(found.groups()) if found is not None else ""
    return subscripts is None or (found is not None and len(set(letters)) == len(letters))


def _untransposed(node: ast.expr, product: ast.expr) -> ast.expr | None:
    """Return what ``node`` swaps the last two dimensions of, None where that cannot be told."""
    if isinstance(node, ast.Attribute):
        return node.value if node.attr == "mT" else None
    done, made = operation(node), operation(product)
    if done is None or made is None or not done.operands:
        return None
    swap = f"{done.name.replace('swapaxes', 'transpose')}({', '.join(map(ast.unparse, done.operands[1:]))})"
    return done.operands[0] if swap in _SWAPS or (made.name == "bmm" and swap in _OF_THREE) else None


def _bracketed(node: ast.expr, code: str) -> str:
    """Return the text of an expression so that an operator may stand before it or a method be called on it."""
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return code if plain else f"({code})"
