"""Compiles the expressions of rules, and refuses those that do more than compare facts and do sums with them.

A rule is matched while somebody waits for a diagnosis: it calls no function, asks no clock and makes no list, and a
pattern is written out and cannot be tried in exponentially many ways. Patterns are looked for in the text, because the
engine evaluates what is constant in an expression while it builds it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

import rule_engine
from rule_engine import ast as tree

from oomdoctor.model.incident import Family
from oomdoctor.model.memory import Role
from oomdoctor.rulebook.context import engine_context

_LONGEST: Final = 20_000
_ALLOWED: Final = (
    *(tree.FloatExpression, tree.StringExpression, tree.BooleanExpression, tree.NullExpression, tree.ArrayExpression),
    *(tree.AddExpression, tree.SubtractExpression, tree.ArithmeticExpression, tree.UnaryExpression),
    *(tree.ComparisonExpression, tree.ContainsExpression, tree.LogicExpression, tree.TernaryExpression),
    *(tree.CoalesceExpression, tree.SymbolExpression, tree.GetAttributeExpression),
)
_MOST_REPEATS: Final = 3
"""In one pattern. Over 400 letters ``.*.*x`` takes 0.02 s, and with a third ``.*`` 1.5 s."""
_WORD: Final = r"""\s*(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_STRING: Final = re.compile(_WORD)
_PATTERN: Final = re.compile(rf"[=!]~~?(?:{_WORD}(?!\s*\+))?")
_KINDS: Final = {"FLOAT": "a number", "STRING": "a word", "BOOLEAN": "a yes or no"}
_WORDS: Final = {"family": ("family", frozenset(Family)), "largest_role": ("role", frozenset(Role))}
"""What facts that are one word of a few are called, and the words."""


@cache
def compiled(text: str) -> rule_engine.Rule:
    """Return the compiled expression.

    Raises:
        ValueError: it cannot be a rule's expression; the message says why, in one line.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # an escape such as "\\w", which Python will refuse
            _refuse_text(text)
            rule = rule_engine.Rule(text, context=engine_context())
        for node in _nodes(rule.statement.expression):
            _refuse(node)
    except (rule_engine.EngineError, DeprecationWarning) as error:
        said = " ".join(str(getattr(error, "message", "") or error).split())
        raise ValueError(f"the expression is refused: {said}") from None
    except (ArithmeticError, MemoryError):
        raise ValueError("the expression is refused: a number in it is too large") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    kind = rule.statement.expression.result_type
    if kind is not rule_engine.DataType.BOOLEAN:
        raise ValueError(f"the expression is a {kind.name.lower()}, not a yes or no")
    return rule


def _refuse_text(text: str) -> None:
    for pattern in _PATTERN.finditer(text):
        if pattern["text"] is None:
            raise ValueError("the expression is refused: the pattern on the right must be written out")
        if _takes_without_end(pattern["text"][1:-1]):
            raise ValueError("the expression is refused: by its repeats, a search for the pattern may take without end")
    if "<<" in _STRING.sub("", text):
        raise ValueError("the expression is refused: it compares facts and does sums, and shifts nothing")


def _refuse(node: Any) -> None:
    if not isinstance(node, _ALLOWED):
        raise ValueError("the expression is refused: it compares facts, does sums (+ - * / // %), and calls nothing")
    if isinstance(node, tree.SymbolExpression) and node.scope is not None:
        raise ValueError(f"the expression is refused: ${node.name} is no fact")
    for fact, other in _compared(node):
        _refuse_comparison(fact, other)


def _compared(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield which two values are asked to be equal; the engine takes any two for unequal that are not of one kind."""
    if type(node) is tree.ComparisonExpression:
        yield from ((node.left, node.right), (node.right, node.left))
    elif isinstance(node, tree.ContainsExpression) and isinstance(node.container, tree.ArrayExpression):
        yield from ((node.member, one) for one in node.container.value)


def _refuse_comparison(fact: Any, other: Any) -> None:
    name, kind, against = getattr(fact, "name", None), fact.result_type.name, other.result_type.name
    if not isinstance(fact, tree.GetAttributeExpression) or kind not in _KINDS or against not in _KINDS:
        return
    if kind != against:
        raise ValueError(
            f"the expression is refused: {name} is {_KINDS[kind]}, and it is compared with {_KINDS[against]}"
        )
    called, words = _WORDS.get(str(name), ("", frozenset[str]()))
    if called and isinstance(other, tree.StringExpression) and str(other.value) not in words:
        raise ValueError(f"the expression is refused: no {called} is called {str(other.value)!r}")


def _nodes(node: Any) -> Iterator[Any]:
    if isinstance(node, list | tuple):
        for part in node:
            yield from _nodes(part)
    elif isinstance(node, tree.ASTNodeBase):
        yield node
        slots = {name for base in type(node).__mro__ for name in vars(base).get("__slots__", ())}
        for name in sorted({*slots, *getattr(node, "__dict__", ())} - {"context"}):
            yield from _nodes(getattr(node, name, None))


def _takes_without_end(pattern: str) -> bool:
    """Whether a search of a short line may take hours: what is repeated repeats or branches itself, or much repeats."""
    try:
        repeats = list(_repeats(_parser.parse(bytes(pattern, "ascii", "backslashreplace").decode("unicode_escape"))))
    except (re.error, OverflowError, UnicodeDecodeError):  # the engine says what is wrong with it
        return False
    return None in repeats or len(repeats) > _MOST_REPEATS


def _repeats(pattern: Any, *, within: bool = False) -> Iterator[object]:
    """Yield the open repeats of a parsed pattern, None for one within another, or for a choice within one."""
    for kind, given in pattern:
        is_repeat = kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and given[1] != 1
        if within and (is_repeat or kind in (_parser.BRANCH, _parser.MAX_REPEAT, _parser.MIN_REPEAT)):
            yield None
        elif is_repeat:
            yield kind
        parts = given[1] if kind is _parser.BRANCH else given if isinstance(given, tuple) else (given,)
        for part in parts:
            if isinstance(part, _parser.SubPattern):
                yield from _repeats(part, within=within or is_repeat)
