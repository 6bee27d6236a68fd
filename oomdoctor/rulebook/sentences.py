"""The sentences of a finding: text with facts in braces, ``{census.activation:size} are activations``.

Nothing is evaluated: a placeholder is a fact's name and one of four ways to print it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import Formatter
from typing import Final

from oomdoctor.model.sizes import format_size
from oomdoctor.rulebook.context import Fact, Facts, kind_of

_WAYS: Final[Mapping[str, tuple[type, Callable[[float], str]]]] = {
    "size": (float, lambda number: format_size(int(number))),
    "percent": (float, lambda number: f"{number:.0%}"),
    "count": (float, lambda number: f"{number:,.0f}"),
}


def problems(sentence: str) -> list[str]:
    """Return what is wrong with a sentence, one text per fault."""
    try:
        places = _places(sentence)
    except ValueError as error:
        return [f"the sentence does not parse: {error}"]
    return [text for path, way in places if (text := _problem(path, way))]


def _places(sentence: str) -> list[tuple[str, str]]:
    parts = [part for part in Formatter().parse(sentence) if part[1] is not None]
    if any(conversion for *_, conversion in parts):
        raise ValueError("'!' and a letter in braces mean nothing here")
    return [(path or "", way or "") for _, path, way, _ in parts]


def _problem(path: str, way: str) -> str | None:
    kind = kind_of(path)
    if kind is None:
        return f"there is no fact {path!r}"
    if way == "":
        return None if kind is str else f"{path} is a number: write {{{path}:size}}, :percent or :count"
    if way not in _WAYS:
        return f"{path} cannot be printed as {way!r}: there are {', '.join(_WAYS)}"
    return None if kind is float else f"{path} is not a number and cannot be printed as {way}"


def render(sentence: str, facts: Facts) -> str | None:
    """Return the sentence with the facts in place, None where one of them is not known."""
    out = []
    for literal, path, way, _ in Formatter().parse(sentence):
        out.append(literal)
        if path is not None:
            group, _, name = path.partition(".")
            text = _print(facts.get(group, {}).get(name), way or "")
            if text is None:
                return None
            out.append(text)
    return "".join(out)


def _print(value: Fact, way: str) -> str | None:
    if value is None:
        return None
    return _WAYS[way][1](float(value)) if way in _WAYS else str(value)
