"""Attention that is written out, read from the statements that make it: softmax(Q Kᵀ · scale, masked) V.

The statements of one block are followed in their order, each value being scores, weights, or something else. What is
done to scores and weights has to be on the list: a scale, a mask, a cast, a softmax over the last dimension, a dropout.
Anything else ends it with a reason. Shapes are not known: keys are told by a transpose of the last two dimensions.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import libcst as cst

from oomdoctor.fixes import _attention_terms as terms
from oomdoctor.fixes._attention_parts import Attention, NotRead, Read, Scores, Weights
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound

__all__ = ["read", "trees"]

_NAMESPACES: Final = frozenset({"torch", "F", "torch.nn.functional", "nn.functional"})
_CASTS: Final = frozenset({"float", "to", "type_as", "type", "half", "bfloat16", "contiguous"})
_OPERATORS: Final = {"mul": "Multiply", "div": "Divide", "add": "Add"}


def read(parsed: rewriting.ParsedCell, block: Sequence[rewriting.Statement], line: int, text: str) -> Attention:
    """Return the attention of ``block`` whose softmax stands on ``line``.

    Args:
        parsed: the cell.
        block: statements that follow one another.
        line: of the cell.
        text: of all cells, to tell what attributes are.

    Raises:
        NotRead: it is not known to be what a fused kernel computes.
    """
    reader = _Reader(parsed, text)
    for at, statement in enumerate(block):
        found = reader.follow(statement)
        if found is None:
            continue
        first = min([block.index(step) for step in found.steps], default=at)
        if line in range(parsed.lines_of(block[first]).start, parsed.lines_of(statement).stop):
            return replace(found, between=tuple(node for node in block[first:at] if node not in found.steps))
        reader = _Reader(parsed, text)
    raise NotRead(reader.why or f"no product of weights and values was found for the softmax on line {line}")


def trees(parsed: rewriting.ParsedCell, node: cst.CSTNode) -> list[ast.stmt]:
    """Return a statement as the standard library has it."""
    return ast.parse(textwrap.dedent(parsed.code(node))).body


@dataclass(slots=True, eq=False)
class _Reader:
    """Follows statements and remembers which names hold scores and weights, and what others stand for."""

    parsed: rewriting.ParsedCell
    text: str
    known: dict[str, Read] = field(default_factory=dict)
    steps: list[rewriting.Statement] = field(default_factory=list)
    bound: dict[str, cst.BaseExpression] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    why: str = ""

    def follow(self, statement: rewriting.Statement) -> Attention | None:
        """Take in one statement; return the attention if it ends here."""
        products = _Products(self)
        statement.visit(products)
        if products.found is not None:
            node, weights, value = products.found
            return Attention(
                weights=weights,
                value=value,
                steps=tuple(self.steps),
                last=statement,
                product=node,
                names=frozenset(self.names),
                layers=frozenset(self.layers),
            )
        change = self._branch(statement) if isinstance(statement, cst.If) else self._change(_only(statement))
        for name in {name for tree in trees(self.parsed, statement) for name in bound(tree)}:
            self.known.pop(name, None)
            self.bound = {n: v for n, v in self.bound.items() if n != name and not self._mentions(v, {name})}
        if change is not None:
            self.known[change[0]] = change[1]
            self.names.add(change[0])
            self.steps.append(statement)
        elif (plain := _plain_assignment(_only(statement))) is not None:
            self.bound[plain[0]] = plain[1]
        return None

    def attends(self, node: cst.BaseExpression) -> tuple[Weights, str] | None:
        """Return weights and the text of the values where ``node`` is their product."""
        pair = terms.factors(self.parsed, node)
        if pair is None:
            return None
        left, right = map(self._value, pair)
        subscripts = terms.spec(node)
        if left is None and right is None:
            return None
        if not isinstance(left, Weights) or right is not None or (subscripts and not terms.is_mix(subscripts)):
            raise NotRead(f"`{self.parsed.code(node)}` is no product of weights and values")
        return left, self._apart(pair[1])

    def _change(self, small: cst.BaseSmallStatement | None) -> tuple[str, Read] | None:
        """Return the name that a statement binds to scores or weights, and those."""
        match small:
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value):
                found = self._value(value)
                return None if found is None else (name, found)
            case cst.AugAssign(target=cst.Name(value=name), operator=operator, value=value) if name in self.known:
                return name, self._arithmetic(self.known[name], type(operator).__name__.removesuffix("Assign"), value)
            case cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value=name)), args=_) as call):
                method = cst.ensure_type(call.func, cst.Attribute).attr.value
                if name in self.known and method.endswith("_"):
                    return name, self._method(call, self.known[name], method.removesuffix("_"))
        return None

    def _branch(self, statement: cst.If) -> tuple[str, Read] | None:
        """Take in ``if mask is not None: scores = scores.masked_fill(...)``."""
        inner = statement.body.body[0] if len(statement.body.body) == 1 else None
        change = self._change(_only(inner))
        if change is None:
            return None
        name, after = change
        before, given = self.known.get(name), self._given(statement.test)
        is_mask = isinstance(after, Scores) and after.mask is not None and replace(after, mask=None) == before
        if isinstance(after, Scores) and is_mask and given is not None and statement.orelse is None:
            return name, replace(after, mask=f"{after.mask} if {given} is not None else None")
        raise NotRead(f"`{self.parsed.code(statement.test)}` decides what is done to the scores or weights")

    def _given(self, test: cst.BaseExpression) -> str | None:
        match test:
            case cst.Comparison(
                left=cst.Name() | cst.Attribute() as left,
                comparisons=[cst.ComparisonTarget(operator=cst.IsNot(), comparator=cst.Name(value="None"))],
            ):
                return self.parsed.code(left)
        return None

    def _value(self, node: cst.BaseExpression) -> Read | None:
        """Return the scores or weights that an expression is, None where it is something else."""
        if isinstance(node, cst.Name):
            return self.known.get(node.value)
        if (pair := terms.factors(self.parsed, node)) is not None:
            return self._scores(node, *pair)
        if isinstance(node, cst.BinaryOperation):
            return self._operation(node)
        return self._call(node) if isinstance(node, cst.Call) else None

    def _scores(self, node: cst.BaseExpression, query: cst.BaseExpression, key: cst.BaseExpression) -> Scores | None:
        """Return the scores that a product of queries and keys is."""
        if self._value(query) is not None or self._value(key) is not None:
            return None
        if (subscripts := terms.spec(node)) is not None:
            bare = self.parsed.code(key) if terms.is_scores(subscripts) else None
        else:
            bare = terms.untransposed(self.parsed, key, node)
        if bare is None:
            code = self.parsed.code(node)
            self.why = "" if self.names else f"that `{code}` multiplies queries and keys cannot be told from the code"
            return None
        return Scores(query=self.parsed.code(query), key=bare)

    def _operation(self, node: cst.BinaryOperation) -> Read | None:
        operator = type(node.operator).__name__
        left, right = self._value(node.left), self._value(node.right)
        if left is None and right is None:
            return None
        if left is not None and right is None:
            return self._arithmetic(left, operator, node.right)
        if right is not None and left is None and operator in ("Multiply", "Add"):
            return self._arithmetic(right, operator, node.left)
        raise NotRead(f"`{self.parsed.code(node)}` is nothing that a fused kernel does to scores")

    def _arithmetic(self, of: Read, operator: str, other: cst.BaseExpression) -> Scores:
        code = self._apart(other)
        if not isinstance(of, Scores) or operator not in _OPERATORS.values():
            raise NotRead(f"`{code}` changes scores or weights in a way that no fused kernel does")
        if of.mask is not None:
            raise NotRead(f"`{code}` is applied to scores that are masked")
        if operator == "Add":
            if not of.query.isidentifier():
                raise NotRead(f"`{code}` is added to the scores of queries that have no name")
            return replace(of, mask=f"{terms.bracketed(other, code)}.to({of.query}.dtype)")
        attribute = other.attr.value if isinstance(other, cst.Attribute) else None
        if "torch." in code or (attribute and re.search(rf"\.{attribute}\s*=\s*(torch\.|nn\.Param)", self.text)):
            raise NotRead(f"the scale `{code}` is a tensor")
        if of.scale is not None:
            raise NotRead("the scores are scaled twice")
        return replace(of, scale=terms.scale_of(self.parsed, operator, other, (of.query, of.key), self.bound))

    def _call(self, node: cst.Call) -> Read | None:
        """Return what a call makes of scores or weights, None where it is given none."""
        function = node.func
        if isinstance(function, cst.Attribute) and (of := self._value(function.value)) is not None:
            return self._method(node, of, function.attr.value)
        inner = self._value(node.args[0].value) if node.args and not node.args[0].star else None
        if inner is None:
            return None
        name = self.parsed.code(function.func if isinstance(function, cst.Call) else function)
        home, _, method = name.rpartition(".")
        if isinstance(function, cst.Call) and method == "Softmax":
            return self._softmax(inner, node, function.args)
        if method == "softmax" and home in _NAMESPACES:
            return self._softmax(inner, node, node.args[1:])
        if method == "masked_fill" and home == "torch":
            return self._masked(inner, node, node.args[1:])
        if method == "dropout" and home in _NAMESPACES:
            return self._dropped(inner, terms.dropout_probability(self.parsed, node), by_layer=False)
        return self._layer(name, inner, node)

    def _method(self, node: cst.Call, of: Read, method: str) -> Read:
        if method == "softmax":
            return self._softmax(of, node, node.args)
        if method == "masked_fill":
            return self._masked(of, node, node.args)
        if method in _OPERATORS and len(node.args) == 1:
            return self._arithmetic(of, _OPERATORS[method], node.args[0].value)
        if method in _CASTS:  # the fused kernel adds up in float32, and answers in the type of its arguments
            return of
        raise NotRead(f"`.{method}()` of the scores or weights is nothing that a fused kernel does")

    def _layer(self, name: str, inner: Read, node: cst.Call) -> Read:
        """Return what a layer that is an attribute makes of scores or weights."""
        made = re.findall(rf"^\s*{re.escape(name)}\s*=\s*(?:torch\.)?nn\.(\w+)\(([^)]*)\)", self.text, re.MULTILINE)
        kinds, arguments = {kind for kind, _ in made}, {re.sub(r"\s", "", given) for _, given in made}
        if name.startswith("self.") and len(node.args) == 1:
            self.layers.add(name)
            if kinds == {"Dropout"} and not any("inplace" in given for given in arguments):
                return self._dropped(inner, f"{name}.p if {name}.training else 0.0", by_layer=True)
            if kinds == {"Softmax"} and arguments <= {"-1", "dim=-1"} and isinstance(inner, Scores):
                return Weights(scores=inner)
        raise NotRead(f"what `{name}` does to the scores or weights cannot be told from the code")

    def _softmax(self, scores: Read, node: cst.Call, options: Sequence[cst.Arg]) -> Weights:
        dims = [self.parsed.code(one.value) for one in options if one.keyword is None or one.keyword.value == "dim"]
        others = [one for one in options if one.keyword is not None and one.keyword.value not in ("dim", "dtype")]
        if not isinstance(scores, Scores) or dims[:1] != ["-1"] or others:
            raise NotRead(f"`{self.parsed.code(node)}` is no softmax over the last dimension of the scores")
        return Weights(scores=scores)

    def _masked(self, of: Read, node: cst.Call, options: Sequence[cst.Arg]) -> Scores:
        names = ("mask", "value")
        given = {one.keyword.value if one.keyword else names[min(at, 1)]: one.value for at, one in enumerate(options)}
        if not isinstance(of, Scores) or given.keys() != set(names) or of.mask is not None:
            raise NotRead(f"`{self.parsed.code(node)}` is no mask of the scores, or not the only one")
        if not terms.hides(fill := self.parsed.code(given["value"])):
            raise NotRead(f"filled with `{fill}`, masked scores may keep a weight")
        self._apart(given["mask"])
        return replace(of, mask=terms.kept(self.parsed, given["mask"]))

    def _dropped(self, of: Read, probability: str | None, *, by_layer: bool) -> Weights:
        if not isinstance(of, Weights) or of.dropout is not None or probability is None:
            raise NotRead("dropout is applied to the scores, in place, or twice")
        return replace(of, dropout=probability, by_layer=by_layer)

    def _apart(self, node: cst.BaseExpression) -> str:
        """Return the text of an expression that is not made of scores or weights."""
        code = self.parsed.code(node)
        if self._mentions(node, self.known):
            raise NotRead(f"`{code}` is made of the scores or weights themselves")
        return code

    def _mentions(self, node: cst.BaseExpression, names: dict[str, Read] | set[str]) -> bool:
        code = self.parsed.code(node)
        return any(re.search(rf"(?<![\w.]){re.escape(name)}\b", code) for name in names)


def _only(statement: cst.CSTNode | None) -> cst.BaseSmallStatement | None:
    """Return the one simple statement of a line."""
    return statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None


def _plain_assignment(small: cst.BaseSmallStatement | None) -> tuple[str, cst.BaseExpression] | None:
    match small:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value):
            return name, value
    return None


class _Products(cst.CSTVisitor):
    """Finds the first product of weights and values in a statement, not in the blocks within it."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader
        self.found: tuple[cst.BaseExpression, Weights, str] | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self.found is not None or isinstance(node, cst.BaseSuite | cst.Lambda):
            return False
        if isinstance(node, cst.BinaryOperation | cst.Call) and (product := self._reader.attends(node)) is not None:
            self.found = node, *product
            return False
        return True
