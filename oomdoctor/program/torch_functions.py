"""The vocabulary of torch: what its functions and methods do to the autograd graph, and to their tensor.

The tables of ``words.toml`` say what the results of a name are; every list that readers of code need is made from them.
A name means the method of a tensor (``out.argmax(1)``), the function of torch (``torch.argmax(out, 1)``), or both. The
test of this module calls each name of torch on tensors that require a gradient, and looks whether the result has one.

Limits: names alone are judged, so that a method of the user's own object that is called ``item`` counts as torch's.
"""

from __future__ import annotations

import ast
import tomllib
from enum import Enum, auto
from pathlib import Path
from typing import Final


class Result(Enum):
    """What the result of a name is, seen from the tensor that it is called on."""

    NUMBER = auto()  # no tensor: a number, a size, a list, an array
    DETACHED = auto()  # the same values without the graph
    DISCRETE = auto()  # positions, counts and truth values, which have no gradient
    TRUNCATED = auto()  # the same values in a type that has no gradient
    NEW = auto()  # a tensor of the same kind with values of its own
    MOVED = auto()  # the same values on another device or laid out anew
    CAST = auto()  # the same values in another type that can have a gradient
    SHAPED = auto()  # the same values in another shape
    JOINED = auto()  # several tensors as one
    REDUCED = auto()  # few values of many


_TABLES: Final[dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)


def word_list(table: str, name: str) -> frozenset[str]:
    """Return the words of the vocabulary that stand under a name of one of its tables, where it says what they are."""
    return frozenset(_TABLES[table][name].split())


def names_of(*results: Result) -> frozenset[str]:
    """Return the names that have one of these results."""
    return frozenset().union(*(word_list("results", result.name) for result in results))


NO_GRAPH: Final = names_of(Result.NUMBER, Result.DETACHED, Result.DISCRETE, Result.TRUNCATED, Result.NEW)
"""Names whose result has no graph, whatever they are given."""
JOINS: Final = names_of(Result.JOINED)
INDEXED: Final = word_list("torch", "INDEXED")
HOST: Final = word_list("torch", "HOST")
SMALL: Final = HOST | names_of(Result.NUMBER, Result.DISCRETE, Result.REDUCED)
"""Names whose result is small beside a batch of outputs, or is not on the device."""
PLAIN_FUNCTIONS: Final = word_list("torch", "PLAIN_FUNCTIONS")
PLAIN_ATTRIBUTES: Final = word_list("torch", "PLAIN_ATTRIBUTES")
GRADLESS: Final = word_list("torch", "GRADLESS")
GRADFUL: Final = word_list("torch", "GRADFUL")
TAKES_GRADIENT: Final = word_list("torch", "TAKES_GRADIENT")
LETS_ERRORS_THROUGH: Final = GRADLESS | GRADFUL | word_list("torch", "LETS_ERRORS_THROUGH")
"""Contexts that swallow no error."""
WANTS_GRADIENT: Final = TAKES_GRADIENT | GRADFUL | word_list("torch", "WANTS_GRADIENT")
"""These, and those that are called where somebody is about to take one."""
ASKS_GRADIENT: Final = word_list("torch", "ASKS_GRADIENT")
FILLS: Final = word_list("torch", "FILLS")
GATHERS: Final = word_list("torch", "GATHERS")
DRAWS: Final = word_list("torch", "DRAWS")


def last_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called: ``argmax`` of ``model(x).argmax(1)``."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def is_in_place(method: str) -> bool:
    """Return whether a method writes into its tensor, as ``add_`` does."""
    return method.endswith("_") and not method.endswith("__") and method not in _NO_WRITES


_NO_WRITES: Final = frozenset({"requires_grad_", "share_memory_"})


def cuts_graph(call: ast.Call) -> bool:
    """Return whether the result of a call has no graph, whatever it is given."""
    match call.func:
        case ast.Name(id=name):
            return name in PLAIN_FUNCTIONS or name in NO_GRAPH
        case ast.Attribute(value=ast.Constant() | ast.JoinedStr()):
            return True  # a text is formatted or joined
        case ast.Attribute(attr=name):
            return name in NO_GRAPH
    return False


def has_index(call: ast.expr) -> bool:
    """Return whether the result of a call is a pair of values and positions, of which the second has no graph."""
    if not isinstance(call, ast.Call) or last_name(call) not in INDEXED or not isinstance(call.func, ast.Attribute):
        return False
    return bool(call.args or call.keywords) or last_name(call) == "sort"


_CHANGING: Final = frozenset({"fill", "sort", "partition", "put", "itemset"})
"""Methods of an array that change it and do not end in an underscore."""


def writes_past_autograd(node: ast.AST) -> bool:
    """Whether it writes through ``.data`` or ``.numpy()``, exchanges ``.data`` itself, or calls what changes it."""
    match node:
        case ast.Call(func=ast.Attribute(value=base, attr=name)):
            return (name in _CHANGING or is_in_place(name)) and _leads_past_autograd(base)
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Subscript))
            written = (part for part in parts if isinstance(part.ctx, ast.Store) and ast.unparse(part) != "self.data")
            return any(map(_leads_past_autograd, written))  # what a class of its own calls so is no tensor's
    return False


def _leads_past_autograd(value: ast.expr) -> bool:
    """Whether ``.data`` or ``.numpy()`` stands in the chain, with parts, attributes and calls after it."""
    while isinstance(value, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(value, ast.Attribute) and value.attr == "data":
            return True
        value = value.func if isinstance(value, ast.Call) else value.value
        if isinstance(value, ast.Attribute) and value.attr in {"numpy", "__array__"}:
            return True
    return False
