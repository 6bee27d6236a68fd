"""The terms of attention as code writes them: products, transposes, scales, masks, probabilities.

Each is told from the text of one expression alone, and comes back as the text that the fused kernel is to be given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import libcst as cst

from oomdoctor.program import rewriting

__all__ = [
    "bracketed",
    "dropout_probability",
    "factors",
    "hides",
    "is_mix",
    "is_scores",
    "kept",
    "scale_of",
    "spec",
    "untransposed",
]

_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_LAST_TWO: Final = frozenset({("-2", "-1"), ("-1", "-2"), ("2", "3"), ("3", "2")})
_OF_THREE: Final = frozenset({("1", "2"), ("2", "1")})
_PERMUTED: Final = frozenset({("0", "1", "3", "2"), ("0", "2", "1")})
_LEAST: Final = -1e4
"""The exponential of this is zero in every type, whatever usual scores it stands beside."""
_NEVER: Final = re.compile(
    r"-float\(['\"]inf['\"]\)|float\(['\"]-inf['\"]\)|-(torch|math|np|numpy)\.inf|torch\.finfo\(.+\)\.min",
    re.IGNORECASE,
)


def factors(
    parsed: rewriting.ParsedCell, node: cst.BaseExpression
) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return the two factors of a product of matrices, None where ``node`` is none."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return node.left, node.right
    if not isinstance(node, cst.Call) or any(one.keyword or one.star for one in node.args):
        return None
    values = [one.value for one in node.args]
    home, _, name = parsed.code(node.func).rpartition(".")
    if name == "einsum" and home == "torch" and len(values) == 3:
        return values[1], values[2]
    if name in _PRODUCTS and home == "torch" and len(values) == 2:
        return values[0], values[1]
    if name in _PRODUCTS and isinstance(node.func, cst.Attribute) and len(values) == 1:
        return node.func.value, values[0]
    return None


def spec(node: cst.BaseExpression) -> str | None:
    """Return the subscripts of a call of ``einsum``, None where it is none."""
    if not isinstance(node, cst.Call) or len(node.args) != 3 or not isinstance(node.args[0].value, cst.SimpleString):
        return None
    return re.sub(r"\s+", "", str(node.args[0].value.evaluated_value))


def is_scores(subscripts: str) -> bool:
    """Whether an einsum is ``...id,...jd->...ij``."""
    return _is_form(re.fullmatch(r"(\w+)(\w)(\w),\1(\w)\3->\1\2\4", subscripts))


def is_mix(subscripts: str) -> bool:
    """Whether an einsum is ``...ij,...jd->...id``."""
    return _is_form(re.fullmatch(r"(\w+)(\w)(\w),\1\3(\w)->\1\2\4", subscripts))


def _is_form(found: re.Match[str] | None) -> bool:
    letters = "".join(found.groups()) if found is not None else ""
    return found is not None and len(set(letters)) == len(letters)


def untransposed(parsed: rewriting.ParsedCell, node: cst.BaseExpression, product: cst.BaseExpression) -> str | None:
    """Return the text of what ``node`` swaps the last two dimensions of, None where that cannot be told."""
    if isinstance(node, cst.Attribute) and node.attr.value == "mT":
        return parsed.code(node.value)
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    arguments = tuple(parsed.code(one.value) for one in node.args)
    method, of = node.func.attr.value, parsed.code(node.func.value)
    if of == "torch" and arguments:
        of, arguments = arguments[0], arguments[1:]
    is_of_three = isinstance(product, cst.Call) and parsed.code(product.func).rpartition(".")[2] == "bmm"
    swaps = _LAST_TWO | (_OF_THREE if is_of_three else frozenset())
    if method in ("transpose", "swapaxes", "swapdims") and arguments in swaps:
        return of
    return of if method == "permute" and arguments in _PERMUTED else None


def scale_of(
    parsed: rewriting.ParsedCell,
    operator: str,
    number: cst.BaseExpression,
    rows: tuple[str, str],
    bound: Mapping[str, cst.BaseExpression],
) -> str:
    """Return what scores are multiplied by, ``default`` where it is one over the root of the features.

    Args:
        parsed: the cell.
        operator: ``Multiply`` or ``Divide``.
        number: what by.
        rows: texts of queries and keys.
        bound: what local names stand for.
    """
    features = {f"{one}{form}" for one in rows for form in (".size(-1)", ".shape[-1]")}
    roots = {f"{home}.sqrt({one})" for one in features for home in ("math", "np")} | {f"{one}**0.5" for one in features}
    text = re.sub(r"\s+", "", parsed.code(number.with_changes(lpar=(), rpar=())))
    for name, value in bound.items():
        if name not in rows and isinstance(value, cst.Call | cst.Subscript):
            text = re.sub(rf"(?<![\w.]){name}(?![\w(])", re.sub(r"\s+", "", parsed.code(value)), text)
    if operator == "Divide":
        return "default" if text in roots else f"1 / {bracketed(number, parsed.code(number))}"
    over = {f"{one}/{root}" for one in ("1", "1.0", "1.") for root in roots} | {f"{one}**-0.5" for one in features}
    return "default" if text in over else parsed.code(number.with_changes(lpar=(), rpar=()))


def hides(text: str) -> bool:
    """Whether a score that is filled with this has no weight."""
    text = re.sub(r"\s+", "", text)
    try:
        return float(text) <= _LEAST
    except ValueError:
        return _NEVER.fullmatch(text) is not None


def kept(parsed: rewriting.ParsedCell, hidden: cst.BaseExpression) -> str:
    """Return the text of which scores stay, given that of those that are filled."""
    match hidden:
        case cst.Comparison(left=left, comparisons=[cst.ComparisonTarget(operator=cst.Equal(), comparator=right)]):
            return f"{parsed.code(left)} != {parsed.code(right)}"
        case cst.UnaryOperation(operator=cst.BitInvert(), expression=inner):
            return parsed.code(inner)
    return f"~{bracketed(hidden, parsed.code(hidden))}"


def dropout_probability(parsed: rewriting.ParsedCell, call: cst.Call) -> str | None:
    """Return the text of the probability of a ``F.dropout``, None where it works in place."""
    given = {"p": "0.5", "training": "True", "inplace": "False"}
    names = ["input", *given]
    for at, one in enumerate(call.args):
        given[one.keyword.value if one.keyword else names[min(at, 3)]] = parsed.code(one.value)
    if given["inplace"] != "False":
        return None
    return given["p"] if given["training"] == "True" else f"{given['p']} if {given['training']} else 0.0"


def bracketed(node: cst.BaseExpression, code: str) -> str:
    """Return the text of an expression so that an operator may stand before it or a method be called on it."""
    plain = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.Integer | cst.Float)
    return code if plain or node.lpar else f"({code})"
