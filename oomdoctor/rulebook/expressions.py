"""Compiles the expressions of rules, and refuses those that could fail or run without end when they are matched.

A rule is matched while somebody waits for a diagnosis. So an expression compares facts and does sums with them, and no
more: no function, no clock, no list that is made; and a pattern is written out, and cannot be tried in exponentially
many ways.

The engine evaluates what is constant in an expression while it builds it. So what an expression may not have is looked
for in what the engine has parsed and not yet built, and no comparison of constants is ever built. Limits: this reads
the deferred nodes of rule_engine 5, for which it has no public name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from math import prod
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

import rule_engine
from rule_engine import ast as tree
from rule_engine.parser import Parser

from oomdoctor.model.incident import Family
from oomdoctor.model.memory import Role
from oomdoctor.rulebook.context import LONGEST_TEXT, engine_context

_LONGEST: Final = 20_000
_LONGEST_NUMBER: Final = 70
"""Characters: 64 bits written out, and more than any size. A power of numbers with 3,000 takes seconds."""
_SUMS: Final = (tree.AddExpression, tree.SubtractExpression, tree.ArithmeticExpression, tree.UnaryExpression)
_VALUES: Final = (
    *(tree.FloatExpression, tree.StringExpression, tree.BooleanExpression, tree.NullExpression),
    tree.ArrayExpression,
)
_COMPARISONS: Final = (
    *(tree.ComparisonExpression, tree.ArithmeticComparisonExpression, tree.FuzzyComparisonExpression),
    tree.ContainsExpression,
)
_CHOICES: Final = (tree.LogicExpression, tree.TernaryExpression, tree.CoalesceExpression)
_FACTS: Final = (tree.SymbolExpression, tree.GetAttributeExpression)
_ALLOWED: Final = frozenset({tree.Statement, *_SUMS, *_VALUES, *_COMPARISONS, *_CHOICES, *_FACTS})
_KINDS: Final = {"FLOAT": "a number", "STRING": "a word", "BOOLEAN": "a yes or no"}
_WORDS: Final = {"family": ("family", frozenset(Family)), "largest_role": ("role", frozenset(Role))}
"""What facts that are one word of a few are called, and the words."""


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
            rule = _Rule(text, context=engine_context())
        for node in _nodes(rule.statement.expression):
            _refuse(node)
    except (rule_engine.EngineError, DeprecationWarning) as error:
        raise ValueError(f"the expression is refused: {_one_line(getattr(error, 'message', '') or error)}") from None
    except ArithmeticError:
        raise ValueError("the expression is refused: a number in it is too large") from None
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None
    kind = rule.statement.expression.result_type
    if kind is not rule_engine.DataType.BOOLEAN:
        raise ValueError(f"the expression is a {kind.name.lower()}, not a yes or no")
    return rule


class _CheckedParser(Parser):  # type: ignore[misc]
    """The engine's parser, which builds nothing before it is checked."""

    def __init__(self) -> None:
        """Make no tables of the grammar, which takes half a second: those of the engine are used."""

    def parse(self, text: str, context: rule_engine.Context, **kwargs: Any) -> tree.Statement:
        parser: Any = rule_engine.Rule.parser
        with parser._ParserBase__mutex:
            parser.context = context
            try:
                parsed = parser._parser.parse(text, lexer=parser._lexer, **kwargs)
            finally:
                parser.context = None
        _refuse_unbuilt(parsed)
        built: tree.Statement = parsed.build()
        return built


class _Rule(rule_engine.Rule):  # type: ignore[misc]
    parser = _CheckedParser()


def _refuse_unbuilt(statement: Any) -> None:
    """Refuse what an expression may not have, in the engine's nodes before they are built, which evaluates some."""
    nodes = [statement]
    for node in nodes:  # which grows
        _refuse_kind(node)
        nodes += _parts(node)
    known: set[int] = set()  # what has a fact in it
    for node in reversed(nodes):
        if node.cls is tree.SymbolExpression or any(id(part) in known for part in _parts(node)):
            known.add(id(node))
        elif issubclass(node.cls, (*_COMPARISONS, *_CHOICES)):
            raise ValueError("the expression is refused: a part of it has no fact in it, and says nothing")


def _refuse_kind(node: Any) -> None:
    if node.cls not in _ALLOWED:
        raise ValueError(
            "the expression is refused: it compares facts, does sums (+ - * / // % **), and calls or makes nothing"
        )
    if node.cls is tree.SymbolExpression and node.kwargs["scope"] is not None:
        raise ValueError(f"the expression is refused: ${node.args[1]} is no fact")
    if node.cls is tree.GetAttributeExpression and node.args[1].cls is not tree.SymbolExpression:
        raise ValueError(f"the expression is refused: .{node.args[2]} stands after what is no group of facts")
    if node.cls is tree.FloatExpression and len(node.args[1]) > _LONGEST_NUMBER:
        raise ValueError(f"the expression is refused: a number in it has more than {_LONGEST_NUMBER} characters")
    if node.cls is tree.FuzzyComparisonExpression:
        _, _, left, right = node.args
        if right.cls is not tree.StringExpression:
            raise ValueError("the expression is refused: the pattern on the right must be written out")
        if left.cls is not tree.GetAttributeExpression:
            raise ValueError("the expression is refused: on the left of a pattern stands a fact, and nothing else")


def _parts(node: Any) -> Iterator[Any]:
    """Yield what a node that is not built is made of: such nodes, some of them in lists."""
    for given in (*node.args, *node.kwargs.values()):
        yield from (one for one in (given if isinstance(given, tuple) else (given,)) if isinstance(one, type(node)))


def _refuse(node: Any) -> None:
    for fact, other in _compared(node):
        _refuse_comparison(fact, other)
    if isinstance(node, tree.FuzzyComparisonExpression):
        if _is_explosive(str(node.right.value)):
            raise ValueError(
                "the expression is refused: the pattern repeats a group that has a repeat or a choice in it, "
                "and may take without end"
            )
        if _steps(_parser.parse(str(node.right.value))) > _MOST_STEPS:
            raise ValueError(
                "the expression is refused: the pattern has so many repeats that may share one text, "
                "that a search may take without end"
            )


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
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, tree.ASTNodeBase):
            yield one
            slots = {name for base in type(one).__mro__ for name in vars(base).get("__slots__", ())}
            waiting += [getattr(one, name, None) for name in {*slots, *getattr(one, "__dict__", ())} - {"context"}]


_REPEATS: Final = (_parser.MAX_REPEAT, _parser.MIN_REPEAT)
_MOST_STEPS: Final = (LONGEST_TEXT + 1) ** 2
"""Of two repeats that may share one text. Over 400 letters ``.*.*x`` takes 0.02 s, and with a third ``.*`` 1.5 s."""
_OPEN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|*+?]|\{\d*,?\d*\}|[^\\]", re.DOTALL)


def _is_explosive(pattern: str) -> bool:
    """Whether a repeat goes over a group that can match one text in several ways, as far as the pattern's form tells.

    A repeat within a repeat, and a choice within one, are what makes a search of a short line take hours.
    """
    loose = [False]  # for each group that is open: whether a repeat or a choice stands in it
    closed = False  # of the group that ended right before
    before = ""
    for piece in _OPEN.findall(pattern):
        repeats = piece in "*+" or (piece[0] == "{" and len(piece) > 1)
        if repeats and closed:
            return True
        if piece == "(":
            loose.append(False)
        elif piece == "|" or repeats or (piece == "?" and before not in ("", "(")):
            loose[-1] = True
        closed = piece == ")" and len(loose) > 1 and loose.pop()
        loose[-1] = loose[-1] or closed
        before = piece
    return False


def _steps(pattern: Any) -> float:
    """Return in how many ways the repeats of a parsed pattern can share a text of ``LONGEST_TEXT`` characters.

    One whose next character cannot be one of its own ends where it must, and is not counted.
    """
    ways, parts = 1.0, list(pattern)
    for at, (kind, given) in enumerate(parts):
        if kind is _parser.BRANCH:
            ways *= max(map(_steps, given[1]))
        elif kind in _REPEATS:
            least, most, body = given
            ways *= _steps(body)
            if not (at + 1 < len(parts) and _ends_before(body, parts[at + 1])):
                ways *= min(int(most) - least, LONGEST_TEXT) + 1
        else:
            inner = given if isinstance(given, tuple) else (given,)
            ways *= prod(_steps(one) for one in inner if isinstance(one, _parser.SubPattern))
    return ways


def _ends_before(body: Any, following: tuple[Any, Any]) -> bool:
    """Return whether a repeat of ``body``, one character of a class, cannot go on over what follows it: a character."""
    if len(body) != 1 or following[0] is not _parser.LITERAL or body[0][0] not in (_parser.IN, _parser.LITERAL):
        return False
    kind, given = body[0]
    parts = [(kind, given)] if kind is _parser.LITERAL else list(given)
    kinds = {kind for kind, _ in parts}
    if not kinds <= {_parser.LITERAL, _parser.RANGE}:
        return False
    spans = [(given, given) if kind is _parser.LITERAL else given for kind, given in parts]
    cases = {ord(case) for case in (chr(following[1]).lower(), chr(following[1]).upper()) if len(case) == 1}
    return not any(low <= code <= high for low, high in spans for code in cases)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
