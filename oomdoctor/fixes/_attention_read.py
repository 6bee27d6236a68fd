"""Attention that is written out, read from the statements that make it: softmax(Q Kᵀ · scale, masked) V.

The statements of one block are followed in their order, each value being scores, weights, or something else. What is
done to scores and weights has to be on the list: a scale, a mask, a cast, a softmax over the last dimension, a dropout.
Anything else ends it with a reason. Shapes are not known: keys are told by a transpose of the last two dimensions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from oomdoctor.program.dataflow import bound, reads

__all__ = ["Attention", "NotRead", "Read", "read"]

_NAMESPACES: Final = frozenset({"torch", "F", "torch.nn.functional", "nn.functional"})
_CASTS: Final = frozenset({"float", "to", "type_as", "type", "half", "bfloat16", "contiguous"})
_OPERATORS: Final = {"mul": ast.Mult, "div": ast.Div, "add": ast.Add}
_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_SWAPS: Final = frozenset({("-2", "-1"), ("-1", "-2"), ("2", "3"), ("3", "2")})
_OF_THREE: Final = frozenset({("1", "2"), ("2", "1")})
_PERMUTED: Final = frozenset({("0", "1", "3", "2"), ("0", "2", "1")})
_SCORES: Final = re.compile(r"(\w+)(\w)(\w),\1(\w)\3->\1\2\4")
_MIX: Final = re.compile(r"(\w+)(\w)(\w),\1\3(\w)->\1\2\4")
"""Subscripts of an einsum: ``...id,...jd->...ij``, and ``...ij,...jd->...id``."""
_LEAST: Final = -1e4
"""The exponential of this is zero in every type, whatever usual scores it stands beside."""
_NEVER: Final = re.compile(
    r"-float\(['\"]inf['\"]\)|float\(['\"]-inf['\"]\)|-(torch|math|np|numpy)\.inf|torch\.finfo\(.+\)\.min",
    re.IGNORECASE,
)


class NotRead(Exception):
    """The reading stopped; the text is the reason in one sentence. Never leaves the fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Products of queries and keys, or the weights that a softmax makes of them.

    Attributes:
        scale: text of what they are multiplied by, or ``default``; None where they are as they come.
        mask: text of ``attn_mask``, None where there is none.
        dropout: text of the probability with which weights are dropped; ``by_layer``: a layer does it, which proposals
            announce.
    """

    query: str
    key: str
    scale: str | None = None
    mask: str | None = None
    is_weights: bool = False
    dropout: str | None = None
    by_layer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """One attention in a block of statements.

    Attributes:
        value: text of the values.
        steps: the statements that made the weights, which go.
        last: the statement with the product of weights and values, and ``product``: that product.
        between: other statements among them.
        names: names that scores and weights went by.
        layers: texts of the layers that were called on them.
    """

    weights: Read
    value: str
    steps: tuple[ast.stmt, ...]
    last: ast.stmt
    product: ast.expr
    between: tuple[ast.stmt, ...]
    names: frozenset[str]
    layers: frozenset[str]


def read(source: str, block: Sequence[ast.stmt], line: int, text: str) -> Attention:
    """Return the attention of ``block`` whose softmax stands on ``line``.

    Args:
        source: the cell that it is of.
        block: statements that follow one another.
        line: of the cell.
        text: of all cells, to tell what attributes are.

    Raises:
        NotRead: it is not known to be what a fused kernel computes.
    """
    shared = {node for pair in pairwise(block) if pair[0].end_lineno == pair[1].lineno for node in pair}
    reader = _Reader(source, text)
    for at, statement in enumerate(block):
        ends = reader.follow(statement, is_alone=statement not in shared)
        if ends is None:
            continue
        steps, (weights, value, product) = tuple(reader.steps), ends
        first = min(map(block.index, steps), default=at)
        if block[first].lineno <= line <= (statement.end_lineno or statement.lineno):
            return Attention(
                weights=weights,
                value=value,
                steps=steps,
                last=statement,
                product=product,
                between=tuple(node for node in block[first:at] if node not in steps),
                names=frozenset(reader.names),
                layers=frozenset(reader.layers),
            )
        reader = _Reader(source, text)
    raise NotRead(reader.why or f"no product of weights and values was found for the softmax on line {line}")


class _Reader:
    """Follows statements and remembers which names hold scores and weights, and what others stand for."""

    def __init__(self, source: str, text: str) -> None:
        self._source, self._text = source, text
        self._known: dict[str, Read] = {}
        self._bound: dict[str, ast.expr] = {}
        self.steps: list[ast.stmt] = []
        self.names: set[str] = set()
        self.layers: set[str] = set()
        self.why = ""

    def follow(self, statement: ast.stmt, *, is_alone: bool) -> tuple[Read, str, ast.expr] | None:
        """Take in one statement; return weights, the text of the values and their product if they end here."""
        for node in _expressions(statement):
            if (found := self._attends(node)) is not None:
                return *found, node
        change = self._change(statement) if is_alone else None
        for name in bound(statement):
            self._known.pop(name, None)
            self._bound = {n: value for n, value in self._bound.items() if n != name and name not in reads(value)}
        if change is not None:
            self._known[change[0]] = change[1]
            self.names.add(change[0])
            self.steps.append(statement)
        elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            self._bound[target.id] = statement.value
        return None

    def _code(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._source, node) or ast.unparse(node)

    def _attends(self, node: ast.expr) -> tuple[Read, str] | None:
        """Return weights and the text of the values where ``node`` is their product."""
        factors = _factors(node)
        if factors is None:
            return None
        left, right, subscripts = self._value(factors[0]), self._value(factors[1]), factors[2]
        if left is None and right is None:
            return None
        if left is None or not left.is_weights or right is not None or not _has_form(_MIX, subscripts):
            raise NotRead(f"`{self._code(node)}` is no product of weights and values")
        return left, self._apart(factors[1])

    def _change(self, statement: ast.stmt) -> tuple[str, Read] | None:
        """Return the name that a statement binds to scores or weights, and those."""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = self._value(value)
                return None if found is None else (name, found)
            case ast.AugAssign(target=ast.Name(id=name), op=operator, value=value) if name in self._known:
                return name, self._arithmetic(self._known[name], operator, value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) as call):
                if name in self._known and method.endswith("_"):
                    return name, self._method(call, self._known[name], method.removesuffix("_"))
            case ast.If(body=[inner]):
                return self._branch(statement, inner)
        return None

    def _branch(self, statement: ast.If, inner: ast.stmt) -> tuple[str, Read] | None:
        """Take in ``if mask is not None: scores = scores.masked_fill(...)``."""
        change = self._change(inner)
        if change is None:
            return None
        name, after = change
        match statement.test:
            case ast.Compare(left=ast.Name() | ast.Attribute() as given, ops=[ast.IsNot()], comparators=[none]):
                is_mask = after.mask is not None and replace(after, mask=None) == self._known.get(name)
                if is_mask and not statement.orelse and ast.unparse(none) == "None":
                    return name, replace(after, mask=f"{after.mask} if {self._code(given)} is not None else None")
        raise NotRead(f"`{self._code(statement.test)}` decides what is done to the scores or weights")

    def _value(self, node: ast.expr) -> Read | None:
        """Return the scores or weights that an expression is, None where it is something else."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if (factors := _factors(node)) is not None:
            return self._scores(node, *factors)
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        return self._call(node) if isinstance(node, ast.Call) else None

    def _scores(self, node: ast.expr, query: ast.expr, key: ast.expr, subscripts: str | None) -> Read | None:
        """Return the scores that a product of queries and keys is."""
        if self._value(query) is not None or self._value(key) is not None:
            return None
        bare = _untransposed(key, node) if subscripts is None else key if _has_form(_SCORES, subscripts) else None
        if bare is None:
            code = self._code(node)
            self.why = "" if self.names else f"that `{code}` multiplies queries and keys cannot be told from the code"
            return None
        return Read(query=self._code(query), key=self._code(bare))

    def _operation(self, node: ast.BinOp) -> Read | None:
        left, right = self._value(node.left), self._value(node.right)
        if left is not None and right is None:
            return self._arithmetic(left, node.op, node.right)
        if right is not None and left is None and isinstance(node.op, ast.Mult | ast.Add):
            return self._arithmetic(right, node.op, node.left)
        if left is None and right is None:
            return None
        raise NotRead(f"`{self._code(node)}` is nothing that a fused kernel does to scores")

    def _arithmetic(self, of: Read, operator: ast.operator, other: ast.expr) -> Read:
        code = self._apart(other)
        if of.is_weights or type(operator) not in _OPERATORS.values():
            raise NotRead(f"`{code}` changes scores or weights in a way that no fused kernel does")
        if of.mask is not None:
            raise NotRead(f"`{code}` is applied to scores that are masked")
        if isinstance(operator, ast.Add):
            if not of.query.isidentifier():
                raise NotRead(f"`{code}` is added to the scores of queries that have no name")
            return replace(of, mask=f"{_bracketed(other, code)}.to({of.query}.dtype)")
        attribute = other.attr if isinstance(other, ast.Attribute) else None
        if "torch." in code or (attribute and re.search(rf"\.{attribute}\s*=\s*(torch\.|nn\.Param)", self._text)):
            raise NotRead(f"the scale `{code}` is a tensor")
        if of.scale is not None:
            raise NotRead("the scores are scaled twice")
        if self._is_default(of, operator, other):
            return replace(of, scale="default")
        return replace(of, scale=code if isinstance(operator, ast.Mult) else f"1 / {_bracketed(other, code)}")

    def _is_default(self, of: Read, operator: ast.operator, number: ast.expr) -> bool:
        """Whether scores are divided by the root of the features of queries or keys."""
        own = {of.query, of.key}
        sizes = {n: v for n, v in self._bound.items() if n not in own and isinstance(v, ast.Call | ast.Subscript)}
        text = ast.unparse(_Inlined(sizes).visit(ast.parse(ast.unparse(number), mode="eval")))
        features = {f"{one}{form}" for one in own for form in (".size(-1)", ".shape[-1]")}
        roots = {form.format(one) for one in features for form in ("math.sqrt({})", "np.sqrt({})", "{} ** 0.5")}
        if isinstance(operator, ast.Div):
            return text in roots
        return text in {f"{one} / {root}" for one in ("1", "1.0") for root in roots} | {
            f"{x} ** -0.5" for x in features
        }

    def _call(self, node: ast.Call) -> Read | None:
        """Return what a call makes of scores or weights, None where it is given none."""
        function = node.func
        if isinstance(function, ast.Attribute) and (of := self._value(function.value)) is not None:
            return self._method(node, of, function.attr)
        of = self._value(node.args[0]) if node.args else None
        if of is None:
            return None
        name = ast.unparse(function.func if isinstance(function, ast.Call) else function)
        home, _, method = name.rpartition(".")
        if isinstance(function, ast.Call) and method == "Softmax":
            return self._softmax(of, node, function.args, function.keywords)
        if method == "softmax" and home in _NAMESPACES:
            return self._softmax(of, node, node.args[1:], node.keywords)
        if method == "masked_fill" and home == "torch":
            return self._masked(of, node, node.args[1:])
        if method == "dropout" and home in _NAMESPACES:
            return self._dropped(of, self._probability(node), by_layer=False)
        return self._layer(name, of, node)

    def _method(self, node: ast.Call, of: Read, method: str) -> Read:
        if method == "softmax":
            return self._softmax(of, node, node.args, node.keywords)
        if method == "masked_fill":
            return self._masked(of, node, node.args)
        if method in _OPERATORS and len(node.args) == 1 and not node.keywords:
            return self._arithmetic(of, _OPERATORS[method](), node.args[0])
        if method in _CASTS:  # the fused kernel adds up in float32, and answers in the type of its arguments
            return of
        raise NotRead(f"`.{method}()` of the scores or weights is nothing that a fused kernel does")

    def _layer(self, name: str, of: Read, node: ast.Call) -> Read:
        """Return what a layer that is an attribute makes of scores or weights."""
        made = re.findall(rf"^\s*{re.escape(name)}\s*=\s*(?:torch\.)?nn\.(\w+)\(([^)]*)\)", self._text, re.MULTILINE)
        kinds, arguments = {kind for kind, _ in made}, {re.sub(r"\s", "", given) for _, given in made}
        if name.startswith("self.") and len(node.args) == 1 and not node.keywords:
            self.layers.add(name)
            if kinds == {"Dropout"} and not any("inplace" in given for given in arguments):
                return self._dropped(of, f"{name}.p if {name}.training else 0.0", by_layer=True)
            if kinds == {"Softmax"} and arguments <= {"-1", "dim=-1"} and not of.is_weights:
                return replace(of, is_weights=True)
        raise NotRead(f"what `{name}` does to the scores or weights cannot be told from the code")

    def _softmax(self, of: Read, node: ast.Call, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> Read:
        dims = [ast.unparse(one) for one in (*args, *(one.value for one in keywords if one.arg == "dim"))]
        if of.is_weights or dims[:1] != ["-1"] or {one.arg for one in keywords} - {"dim", "dtype"}:
            raise NotRead(f"`{self._code(node)}` is no softmax over the last dimension of the scores")
        return replace(of, is_weights=True)

    def _masked(self, of: Read, node: ast.Call, args: Sequence[ast.expr]) -> Read:
        given = dict(zip(("mask", "value"), args, strict=False)) | {one.arg or "": one.value for one in node.keywords}
        if of.is_weights or given.keys() != {"mask", "value"} or of.mask is not None:
            raise NotRead(f"`{self._code(node)}` is no mask of the scores, or not the only one")
        if not _hides(fill := self._code(given["value"])):
            raise NotRead(f"filled with `{fill}`, masked scores may keep a weight")
        self._apart(given["mask"])
        match given["mask"]:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                kept = f"{self._code(left)} != {self._code(right)}"
            case ast.UnaryOp(op=ast.Invert(), operand=inner):
                kept = self._code(inner)
            case hidden:
                kept = f"~{_bracketed(hidden, self._code(hidden))}"
        return replace(of, mask=kept)

    def _probability(self, call: ast.Call) -> str | None:
        """Return the text of the probability of a ``F.dropout``, None where it works in place."""
        given = {"p": "0.5", "training": "True", "inplace": "False"}
        given |= zip(given, map(self._code, call.args[1:]), strict=False)
        given |= {one.arg or "": self._code(one.value) for one in call.keywords}
        if given["inplace"] != "False":
            return None
        return given["p"] if given["training"] == "True" else f"{given['p']} if {given['training']} else 0.0"

    @staticmethod
    def _dropped(of: Read, probability: str | None, *, by_layer: bool) -> Read:
        if not of.is_weights or of.dropout is not None or probability is None:
            raise NotRead("dropout is applied to the scores, in place, or twice")
        return replace(of, dropout=probability, by_layer=by_layer)

    def _apart(self, node: ast.expr) -> str:
        """Return the text of an expression that is not made of scores or weights."""
        if reads(node) & self._known.keys():
            raise NotRead(f"`{self._code(node)}` is made of the scores or weights themselves")
        return self._code(node)


class _Inlined(ast.NodeTransformer):
    """Puts what names stand for in their places."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


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
        case ast.Call(func=ast.Attribute(value=home, attr=name), args=args, keywords=[]):
            is_torch = ast.unparse(home) == "torch"
            if name == "einsum" and is_torch and len(args) == 3 and isinstance(args[0], ast.Constant):
                return args[1], args[2], re.sub(r"\s+", "", str(args[0].value))
            if name in _PRODUCTS and len(args) == 1 + is_torch:
                return (args[0], args[1], None) if is_torch else (home, args[0], None)
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
            dims = tuple(map(ast.unparse, args))
            is_of_three = isinstance(product, ast.Call) and ast.unparse(product.func).rpartition(".")[2] == "bmm"
            if method in ("transpose", "swapaxes", "swapdims") and dims in _SWAPS | (
                _OF_THREE if is_of_three else set()
            ):
                return of
            return of if method == "permute" and dims in _PERMUTED else None
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
