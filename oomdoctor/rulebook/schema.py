"""The form of a rule file, as pydantic checks it. An unknown key is an error, so that a misspelt one is not lost.

Expressions are compiled, and those are refused that do more than compare facts and do sums with them. A rule is matched
while somebody waits for a diagnosis: it calls no function, asks no clock and makes no list, and its patterns are
written out. They are looked for in the text, because the engine evaluates what is constant while it builds a rule.
Limits: how long a pattern takes is up to its author; it is tried on 400 letters at most, and can be interrupted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from math import isfinite
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast

import rule_engine
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from rule_engine import ast as tree

from oomdoctor.errors import SizeError
from oomdoctor.model.case import Cause
from oomdoctor.model.incident import Family
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import parse_size
from oomdoctor.rulebook.context import Fact, Facts, engine_context, kind_of, problems

_LONGEST: Final = 20_000
_ALLOWED: Final = (
    *(tree.FloatExpression, tree.StringExpression, tree.BooleanExpression, tree.NullExpression, tree.ArrayExpression),
    *(tree.AddExpression, tree.SubtractExpression, tree.ArithmeticExpression, tree.UnaryExpression),
    *(tree.ComparisonExpression, tree.ContainsExpression, tree.LogicExpression, tree.TernaryExpression),
    *(tree.CoalesceExpression, tree.SymbolExpression, tree.GetAttributeExpression),
)
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


T = TypeVar("T")


def _printable(text: str) -> str:
    """Refuse what would be nothing to a reader, or would steer the terminal that it is printed on."""
    if not text.strip():
        raise ValueError("there is nothing in it")
    if not text.replace("\n", " ").isprintable():
        raise ValueError("it has a character that cannot be printed")
    return text


def _of_one_line(text: str) -> str:
    if "\n" in text.strip("\n"):
        raise ValueError("it has more than one line")
    return text


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that keeps a value for which ``check`` raises no ValueError."""

    def kept(value: T) -> T:
        check(value)
        return value

    return AfterValidator(kept)


def _refuse_sentence(text: str) -> None:
    if wrong := problems(text):
        raise ValueError("; ".join(wrong))


def _known_fix(fix: str, info: ValidationInfo) -> str:
    known = (info.context or {}).get("fixes")
    if known is not None and fix not in known:
        raise ValueError(f"unknown fix {fix!r}")
    return fix


def facts_in(example: dict[str, dict[str, Any]]) -> Facts:
    """Return the facts of an example, sizes as bytes.

    Raises:
        ValueError: there is no such fact, or it is of another kind.
    """
    return {
        group: {name: _fact(f"{group}.{name}", value) for name, value in names.items()}
        for group, names in example.items()
    }


def _fact(path: str, value: Any) -> Fact:
    kind = kind_of(path)
    if kind is None:
        raise ValueError(f"there is no fact {path!r}")
    if kind is float and isinstance(value, str):
        try:
            return parse_size(value)
        except SizeError as error:
            raise ValueError(str(error)) from None
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(f"{path} is {'a number' if kind is float else 'a word' if kind is str else 'true or false'}")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{path} is a number that can be measured, and {value} is none")
    return cast("Fact", value)


def _refuse_twins(given: list[str]) -> None:
    twin = next((one for at, one in enumerate(given) if one in given[:at]), None)
    if twin is not None:
        raise ValueError(f"{twin!r} is there twice")


_Address: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^\s/]+\.\S+$", strict=True)]
_Text: TypeAlias = Annotated[str, Field(min_length=1, strict=True), AfterValidator(_printable)]
_Line: TypeAlias = Annotated[_Text, AfterValidator(_of_one_line)]
_SEVERAL: Final = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
_Facts: TypeAlias = Annotated[dict[str, dict[str, Any]], _checked(facts_in)]


class Examples(BaseModel):
    """Small sets of facts on which the rule must fire, and on which it must stay silent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fires: Annotated[list[_Facts], Field(min_length=1)]
    silent: Annotated[list[_Facts], Field(min_length=1)]


class RuleFile(BaseModel):
    """One file of ``rules/``.

    Attributes:
        id: the file's stem, named for the symptom.
        since: version of oomdoctor that first had the rule.
        what: what the rule looks at; ``why``: why that uses up memory.
        match: an expression over the facts of ``oomdoctor.rulebook.context``, or several, of which one must hold. An
            expression that compares or calculates with a fact that is not known does not hold, hence the several.
        confidence: the author's estimate of how often the cause is right when it fires, 0 to 1; sorts the findings.
        because: sentences with facts in braces. One with a fact that is not known is left out.
        false_positives: when the rule fires and is wrong.
        fixes: ids of fixes, best first; none where only the user can do something.
        see: ids of rules that look at the same from another side.
        references: addresses of what supports the rule.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", strict=True)]
    since: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$", strict=True)]
    title: _Line
    what: _Text
    why: _Text
    match: Annotated[list[Annotated[_Text, _checked(compiled)]], _SEVERAL, Field(min_length=1)]
    confidence: Annotated[float, Field(gt=0, le=1, strict=True)]
    cause: Cause
    because: Annotated[list[Annotated[_Line, _checked(_refuse_sentence)]], Field(min_length=1)]
    false_positives: _Text
    fixes: Annotated[list[Annotated[_Line, AfterValidator(_known_fix)]], _checked(_refuse_twins)]
    see: list[_Line] = []
    references: Annotated[list[_Address], _checked(_refuse_twins)]
    examples: Examples
