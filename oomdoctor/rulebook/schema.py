"""The form of a rule file, as pydantic checks it. An unknown key is an error, so that a misspelt one is not lost."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from oomdoctor.model.finding import Cause


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


_Text: TypeAlias = Annotated[str, Field(min_length=1, strict=True), AfterValidator(_printable)]
_Line: TypeAlias = Annotated[_Text, AfterValidator(_of_one_line)]
_Facts: TypeAlias = dict[str, dict[str, Any]]


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
    match: _Text | Annotated[list[_Text], Field(min_length=1)]
    confidence: Annotated[float, Field(gt=0, le=1, strict=True)]
    cause: Cause
    because: Annotated[list[_Line], Field(min_length=1)]
    false_positives: _Text
    fixes: list[_Line]
    see: list[_Line] = []
    references: list[_Line]
    examples: Examples
