"""Attention that is written out, read from the statements that make it and exchanged for the call of a fused kernel.

The statements of one block are followed in their order, each value being scores, weights, or something else. Each is
brought to one form (an operation and its operands, however it is spelled) and looked up in a table of what a kernel
does: a product of queries and keys, a scale, a mask, a cast, a softmax over the last dimension, a dropout. Anything
else ends it with a reason. Shapes are not known: keys are told by a transpose of the last two dimensions. That what was
read is what the kernel computes is for the trial to show.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, reads
from oomdoctor.program.import_lines import spelled
from oomdoctor.program.names import blocks_of
from oomdoctor.program.replay import node_of
from oomdoctor.program.rewriting import within

__all__ = ["asks_for_eager", "fused"]

_LONGEST: Final = 100
_NAMESPACES: Final = frozenset({"torch", "F", "torch.nn.functional", "nn.functional"})
_OPERATORS: Final = {ast.Mult: "mul", ast.Div: "div", ast.Add: "add", ast.MatMult: "matmul"}
_SWAPS: Final = frozenset(
    {f"transpose({a}, {b})" for a, b in ((-2, -1), (-1, -2), (2, 3), (3, 2))}
    | {"permute(0, 1, 3, 2)", "permute(0, 2, 1)"}
)
_OF_THREE: Final = frozenset({"transpose(1, 2)", "transpose(2, 1)"})
_SCORES: Final = re.compile(r"(\w+)(\w)(\w),\1(\w)\3->\1\2\4")
_MIX: Final = re.compile(r"(\w+)(\w)(\w),\1\3(\w)->\1\2\4")
"""Subscripts of an einsum: ``...id,...jd->...ij``, and ``...ij,...jd->...id``."""
_LEAST: Final = -1e4
"""The exponential of this is zero in every type, whatever usual scores it stands beside."""
_NEVER: Final = re.compile(r"-float\(.inf.\)|float\(.-inf.\)|-\w+\.inf|torch\.finfo\(.+\)\.min", re.IGNORECASE)
_FEATURES: Final = re.compile(r"(?P<of>\w+)(?:\.size\(-1\)|\.shape\[-1\])")
_ROOT: Final = re.compile(rf"(?P<inverse>1(?:\.0)? / )?(?:math|np)\.sqrt\({_FEATURES.pattern}\)")
"""The root of the features, or its inverse: what a kernel scales by where it is told nothing."""


class NotRead(Exception):
    """The reading stopped; the text is the reason in one sentence. Never leaves the fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Products of queries and keys, or the weights that a softmax makes of them; all as text.

    Attributes:
        scale: what they are multiplied by, or ``default``; None where they are as they come.
        mask: ``attn_mask``, None where there is none.
        dropout: the probability with which weights are dropped.
        by_layer: a layer drops them, which proposals announce.
    """

    query: str
    key: str
    scale: str | None = None
    mask: str | None = None
    is_weights: bool = False
    dropout: str | None = None
    by_layer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """An expression in one form: ``F.softmax(x, -1)``, ``x.softmax(-1)`` and ``nn.Softmax(-1)(x)`` are the same."""

    name: str
    operands: Sequence[ast.expr] = ()
    keywords: Mapping[str, ast.expr]
    code: str


def asks_for_eager(parsed: rewriting.ParsedCell, line: int) -> cst.SimpleString | None:
    """Return the ``"eager"`` that a statement on ``line`` asks a model for."""
    statement = rewriting.statement_at(parsed, line)
    if statement is None or "attn_implementation" not in parsed.code(statement):
        return None
    found = [one for one in within(statement, cst.SimpleString) if one.evaluated_value == "eager"]
    return found[0] if len(found) == 1 else None


def fused(cells: Cells, cell: Cell, line: int) -> tuple[rewriting.ParsedCell, cst.Module, str] | Refused:
    """Return ``cell`` with the attention whose softmax stands on ``line`` exchanged, parsed and as it becomes.

    With it comes the name of its function where that drops weights by a function, which no fact about models announces.
    """
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    tree = ast.parse(parsed.masked.text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and _covers(node, line)]
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
        reader = _Reader(parsed.masked.text, "\n".join(one.source for one in beside.history))
        module = reader.exchanged(parsed, function, _block(function.body, line), line, home)
    except NotRead as why:
        return Refused(str(why))
    return parsed, module, ".".join(node.name for node in around) if reader.drops else ""


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _block(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """Return the statements among which the one on ``line`` stands that has no blocks of its own there."""
    for statement in body:
        for inner in blocks_of(statement) if _covers(statement, line) else ():
            if any(_covers(one, line) for one in inner) and inner[0].lineno != statement.lineno:
                return _block(inner, line)
    return body


class _Reader:
    """Follows statements and remembers which names hold scores and weights."""

    def __init__(self, source: str, text: str) -> None:
        """Begin.

        Args:
            source: the cell.
            text: all cells, to tell what attributes are.
        """
        self._source, self._text = source, text
        self._known: dict[str, Read] = {}
        self._sizes: dict[str, str] = {}
        self._steps: list[ast.stmt] = []
        self._names: set[str] = set()
        self._why = ""
        self.drops = False

    def exchanged(
        self, parsed: rewriting.ParsedCell, function: ast.stmt, block: Sequence[ast.stmt], line: int, home: str
    ) -> cst.Module:
        """Return the cell with one call in the place of the attention whose softmax stands on ``line``."""
        for at, last in enumerate(block):
            ends = self._follow(last)
            if ends is None:
                continue
            first = min(map(block.index, self._steps), default=at)
            if block[first].lineno <= line <= (last.end_lineno or last.lineno):
                weights, value, product = ends
                self.drops = weights.dropout is not None and not weights.by_layer
                between = [node for node in block[first:at] if node not in self._steps]
                self._check(function, last, product, between)
                return _written(parsed, self._steps, last, product, bool(between), _arguments(weights, value), home)
            self._known, self._steps, self._names = {}, [], set()
        raise NotRead(self._why or f"no product of weights and values was found for the softmax on line {line}")

    def _check(self, function: ast.stmt, last: ast.stmt, product: ast.expr, between: Sequence[ast.stmt]) -> None:
        """Check that scores and weights are used for nothing else, and that the call means the same where it stands.

        Raises:
            NotRead: they are, or it does not.
        """
        own = {node for one in (*self._steps, product) for node in ast.walk(one)}
        for node in ast.walk(function):
            is_use = isinstance(node, ast.Name) and node.id in self._names and isinstance(node.ctx, ast.Load)
            if is_use and node not in own and not (node.id in bound(last) and node.lineno > last.lineno):  # type: ignore[attr-defined]
                name, line = node.id, node.lineno  # type: ignore[attr-defined]
                raise NotRead(f"`{name}` is used on line {line} as well: fused kernels do not return it")
        for node in between:
            needed = {name for step in self._steps if step.lineno < node.lineno for name in reads(step)} - self._names
            if not isinstance(node, ast.Assign) or bound(node) & needed:
                raise NotRead(f"line {node.lineno} stands between the scores and the values")

    def _follow(self, statement: ast.stmt) -> tuple[Read, str, ast.expr] | None:
        """Take in one statement; return weights, the text of the values and their product if they end here."""
        for node in _expressions(statement):
            if (factors := _factors(node)) is None:
                continue
            left, right = self._value(factors[0]), self._value(factors[1])
            if left is not None or right is not None:
                if left is None or not left.is_weights or right is not None or not _has_form(_MIX, factors[2]):
                    raise NotRead(f"`{self._code(node)}` is no product of weights and values")
                return left, self._apart(factors[1]), node
        change = self._change(statement)
        for name in bound(statement):
            self._known.pop(name, None)
            self._sizes = {n: text for n, text in self._sizes.items() if name not in (n, text.partition(".")[0])}
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _FEATURES.fullmatch(ast.unparse(value)):
                self._sizes[name] = ast.unparse(value)
        if change is not None:
            self._known[change[0]] = change[1]
            self._names.add(change[0])
            self._steps.append(statement)
        return None

    def _code(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._source, node) or ast.unparse(node)

    def _change(self, statement: ast.stmt) -> tuple[str, Read] | None:
        """Return the name that a statement binds to scores or weights, and those."""
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

    def _where_given(self, test: ast.expr, before: Read | None, after: Read) -> Read:
        """Take in ``if mask is not None: scores = scores.masked_fill(...)``."""
        match test:
            case ast.Compare(left=given, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                if after.mask is not None and replace(after, mask=None) == before:
                    return replace(after, mask=f"{after.mask} if {self._code(given)} is not None else None")
        raise NotRead(f"`{self._code(test)}` decides what is done to the scores or weights")

    def _value(self, node: ast.expr) -> Read | None:
        """Return the scores or weights that an expression is, None where it is something else."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if (factors := _factors(node)) is not None:
            return self._scores(node, *factors)
        operation = self._operation(node)
        if operation is None or not operation.operands:
            return None
        of, rest = self._value(operation.operands[0]), operation.operands[1:]
        if of is None and operation.name in {"mul", "add"} and len(rest) == 1:
            of, rest = self._value(rest[0]), operation.operands[:1]
        if of is None:
            return None
        rule = _RULES.get(operation.name)
        if rule is None:
            raise NotRead(f"what `{operation.code}` does to the scores or weights is nothing that a fused kernel does")
        for one in rest:
            self._apart(one)
        return rule(self, of, replace(operation, operands=rest))

    def _operation(self, node: ast.expr) -> Operation | None:
        code = self._code(node)
        match node:
            case ast.BinOp(left=left, op=operator, right=right):
                return Operation(
                    name=_OPERATORS.get(type(operator), "?"), operands=[left, right], keywords={}, code=code
                )
            case ast.Call(func=ast.Call(func=layer, args=settings, keywords=more), args=args):
                name, args, keywords = f"{ast.unparse(layer)}()", [*args, *settings], more
                name = "softmax" if name.endswith("Softmax()") else name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attribute), args=args, keywords=keywords):
                return self._layer(f"self.{attribute}", args, code)
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=args, keywords=keywords):
                args = args if ast.unparse(of) in _NAMESPACES else [of, *args]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                name = f"{name}()"
            case _:
                return None
        given = {one.arg or "": one.value for one in keywords}
        return Operation(name=name, operands=args, keywords=given, code=code)

    def _layer(self, name: str, args: list[ast.expr], code: str) -> Operation:
        """Return what a layer that is an attribute does, by how the cells make it."""
        made = re.findall(rf"^\s*{re.escape(name)}\s*=\s*(?:torch\.)?nn\.(\w+)\(([^)]*)\)", self._text, re.MULTILINE)
        kinds = {kind for kind, _ in made}
        if kinds == {"Dropout"} and not any("inplace" in given for _, given in made):
            probability = ast.Name(f"{name}.p if {name}.training else 0.0", ast.Load())
            return Operation(name="Dropout", operands=args, keywords={"p": probability}, code=code)
        dims = {re.sub(r"\s|dim=", "", given) for _, given in made}
        if kinds == {"Softmax"} and len(dims) == 1:
            return Operation(name="softmax", operands=[*args, ast.Name(dims.pop(), ast.Load())], keywords={}, code=code)
        return Operation(name=f"{name}()", operands=args, keywords={}, code=code)

    def _scores(self, node: ast.expr, query: ast.expr, key: ast.expr, subscripts: str | None) -> Read | None:
        """Return the scores that a product of queries and keys is."""
        if self._value(query) is not None or self._value(key) is not None:
            return None
        bare = _untransposed(key, node) if subscripts is None else key if _has_form(_SCORES, subscripts) else None
        if bare is None:
            code = self._code(node)
            self._why = "" if self._names else f"that `{code}` multiplies queries and keys cannot be told from the code"
            return None
        return Read(query=self._code(query), key=self._code(bare))

    def _scaled(self, of: Read, given: Operation) -> Read:
        (other,) = given.operands
        code = self._code(other)
        if of.is_weights or of.mask is not None or of.scale is not None:
            raise NotRead(f"`{code}` changes weights or masked scores, or scores that are scaled twice")
        root = _ROOT.fullmatch(re.sub(r"\b\w+(?=\)$)", lambda name: self._sizes.get(name[0], name[0]), code))
        if root is not None and root["of"] in {of.query, of.key} and bool(root["inverse"]) == (given.name == "mul"):
            return replace(of, scale="default")
        return replace(of, scale=code if given.name == "mul" else f"1 / {_bracketed(other, code)}")

    def _added(self, of: Read, given: Operation) -> Read:
        (other,) = given.operands
        if of.is_weights or of.mask is not None or not of.query.isidentifier():
            raise NotRead(f"`{self._code(other)}` is added to weights, to masked scores or to those of unnamed queries")
        return replace(of, mask=f"{_bracketed(other, self._code(other))}.to({of.query}.dtype)")

    def _cast(self, of: Read, given: Operation) -> Read:
        del given
        return of  # the fused kernel adds up in float32, and answers in the type of its arguments

    def _softmax(self, of: Read, given: Operation) -> Read:
        dims = [ast.unparse(one) for one in (*given.operands, *(v for n, v in given.keywords.items() if n == "dim"))]
        if of.is_weights or dims[:1] != ["-1"] or given.keywords.keys() - {"dim", "dtype"}:
            raise NotRead(f"`{given.code}` is no softmax over the last dimension of the scores")
        return replace(of, is_weights=True)

    def _masked(self, of: Read, given: Operation) -> Read:
        values = dict(zip(("mask", "value"), given.operands, strict=False)) | dict(given.keywords)
        if of.is_weights or values.keys() != {"mask", "value"} or of.mask is not None:
            raise NotRead(f"`{given.code}` is no mask of the scores, or not the only one")
        if not _hides(fill := self._code(values["value"])):
            raise NotRead(f"filled with `{fill}`, masked scores may keep a weight")
        match values["mask"]:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                kept = f"{self._code(left)} != {self._code(right)}"
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                kept = self._code(inner)
            case hidden:
                kept = f"~{_bracketed(hidden, self._code(hidden))}"
        return replace(of, mask=kept)

    def _dropped(self, of: Read, given: Operation) -> Read:
        values = dict(zip(("p", "training", "inplace"), given.operands, strict=False)) | dict(given.keywords)
        said = {"p": "0.5", "training": "True", "inplace": "False"} | {n: self._code(v) for n, v in values.items()}
        if not of.is_weights or of.dropout is not None or said["inplace"] != "False":
            raise NotRead("dropout is applied to the scores, in place, or twice")
        dropout = said["p"] if said["training"] == "True" else f"{said['p']} if {said['training']} else 0.0"
        return replace(of, dropout=dropout, by_layer=given.name == "Dropout")

    def _apart(self, node: ast.expr) -> str:
        """Return the text of an expression that is not made of scores or weights."""
        if reads(node) & self._known.keys():
            raise NotRead(f"`{self._code(node)}` is made of the scores or weights themselves")
        return self._code(node)


_RULES: Final[Mapping[str, Callable[[_Reader, Read, Operation], Read]]] = {
    **dict.fromkeys(("mul", "div"), _Reader._scaled),
    "add": _Reader._added,
    **dict.fromkeys(("float", "to", "type_as", "type", "half", "bfloat16", "contiguous"), _Reader._cast),
    "softmax": _Reader._softmax,
    "masked_fill": _Reader._masked,
    **dict.fromkeys(("dropout", "Dropout"), _Reader._dropped),
}
"""What a fused kernel does to scores and weights."""


def _written(
    parsed: rewriting.ParsedCell,
    steps: Sequence[ast.stmt],
    last: ast.stmt,
    product: ast.expr,
    keeps_between: bool,
    arguments: Sequence[str],
    home: str,
) -> cst.Module:
    """Return the cell without the steps, the call in the place of the product, and their comments before it."""
    gone, end, old = [_statement(parsed, step) for step in steps], _statement(parsed, last), node_of(parsed, product)
    if old is None:
        raise NotRead("the product of weights and values is written in a way that is not followed")
    first = gone[0] if gone else end
    comments = [line for node in [*gone, end][1:] for line in node.leading_lines if line.comment is not None]
    # What stood before the steps stays where it is, with the first statement that does.
    leading = list(end.leading_lines) if keeps_between else [*first.leading_lines, *comments]
    taken = parsed.positions[end].start.column + len(parsed.code(end).splitlines()[0]) - len(parsed.code(old))
    call = f"{home}.scaled_dot_product_attention({', '.join(arguments)})"
    if len(call) > _LONGEST - taken:
        call = call.partition("(")[0] + "(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    nodes: dict[cst.CSTNode, rewriting.New] = dict.fromkeys(gone, ())
    nodes |= {old: cst.parse_expression(call, parsed.module.config_for_parsing)}
    nodes |= {end: lambda node: node.with_changes(leading_lines=leading)}
    return rewriting.exchange(parsed.module, nodes)


def _arguments(weights: Read, value: str) -> list[str]:
    arguments = [weights.query, weights.key, value]
    arguments += [f"attn_mask={weights.mask}"] if weights.mask is not None else []
    arguments += [f"dropout_p={weights.dropout}"] if weights.dropout is not None else []
    return arguments + ([f"scale={weights.scale or '1.0'}"] if weights.scale != "default" else [])


def _statement(parsed: rewriting.ParsedCell, node: ast.stmt) -> rewriting.Statement:
    """Return the statement that begins where ``node`` does, and is alone on its line."""
    path = rewriting.path_to(parsed, node.lineno)
    found = next((one for one in path if parsed.lines_of(one).start == node.lineno), None)
    if found is None or (isinstance(found, cst.SimpleStatementLine) and len(found.body) > 1):
        raise NotRead("the attention stands on one line with other statements")
    return found


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, outermost first, not those of the blocks and lambdas within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.Lambda | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _factors(node: ast.expr) -> tuple[ast.expr, ast.expr, str | None] | None:
    """Return the two factors of a product of matrices, and the subscripts of an einsum."""
    match node:
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            return left, right, None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="einsum"), args=[form, left, right]):
            return left, right, re.sub(r"[\s'\"]+", "", ast.unparse(form))
        case ast.Call(func=ast.Attribute(value=home, attr="matmul" | "bmm"), args=args, keywords=[]):
            factors = args if ast.unparse(home) == "torch" else [home, *args]
            return (factors[0], factors[1], None) if len(factors) == 2 else None
    return None


def _has_form(form: re.Pattern[str], subscripts: str | None) -> bool:
    """Whether the subscripts of an einsum, where there are any, have a form, each letter standing for another one."""
    found = None if subscripts is None else form.fullmatch(subscripts)
    letters = "".join(found.groups()) if found is not None else ""
    return subscripts is None or (found is not None and len(set(letters)) == len(letters))


def _untransposed(node: ast.expr, product: ast.expr) -> ast.expr | None:
    """Return what ``node`` swaps the last two dimensions of, None where that cannot be told."""
    match node:
        case ast.Attribute(value=of, attr="mT"):
            return of
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=args):
            if ast.unparse(of) == "torch" and args:
                of, args = args[0], args[1:]
            swap = f"{method.replace('swapaxes', 'transpose')}({', '.join(map(ast.unparse, args))})"
            is_of_three = isinstance(product, ast.Call) and ast.unparse(product.func).endswith("bmm")
            return of if swap in _SWAPS or (is_of_three and swap in _OF_THREE) else None
    return None


def _hides(text: str) -> bool:
    """Whether a score that is filled with this has no weight."""
    text = re.sub(r"\s+", "", text)
    try:
        return float(text) <= _LEAST
    except ValueError:
        return _NEVER.fullmatch(text) is not None


def _bracketed(node: ast.expr, code: str) -> str:
    """Return the text of an expression so that an operator may stand before it or a method be called on it."""
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return code if plain else f"({code})"
