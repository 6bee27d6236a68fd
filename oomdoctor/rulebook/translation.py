"""What rules say in Chinese: ``<rule>.zh.yaml`` beside ``<rule>.yaml``, read when somebody reads Chinese.

It has those keys of the rule that are texts, in the same form and with the same placeholders. What is missing in it, or
has a fault, is told in English.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any, Final

from oomdoctor.errors import Fault
from oomdoctor.rulebook.matching import Rule
from oomdoctor.rulebook.reading import NotYaml, parse, text_of

TRANSLATED: Final = ".zh.yaml"
"""End of the name of such a file."""
TEXTS: Final = frozenset({"title", "what", "why", "because", "false_positives"})
"""Keys of a rule that are shown as sentences."""


def file_of(rule: Rule) -> Path:
    """Return the file that says ``rule`` in Chinese, where there is one."""
    return Path(rule.path).with_suffix(TRANSLATED)


def translations(rules: Sequence[Rule]) -> Iterator[tuple[str, str]]:
    """Yield the texts of rules with what the files beside them say; of a file that cannot be read nothing."""
    for rule in rules:
        with suppress(ValueError):
            values = parse(text_of(path)).values if (path := file_of(rule)).is_file() else None
            for english, said, _ in _pairs(rule, values):
                if _places(english) == _places(said):
                    yield english, said


def faults_of(rule: Rule) -> Iterator[Fault]:
    """Yield what is wrong with the file that says ``rule`` in Chinese; nothing where there is none."""
    path = file_of(rule)
    if not path.is_file():
        return
    try:
        document = parse(text_of(path))
    except ValueError as error:
        yield Fault(path=str(path), line=error.line if isinstance(error, NotYaml) else 1, message=str(error))
        return
    values = document.values if isinstance(document.values, dict) else {}
    found = {place for *_, place in _pairs(rule, values)}
    for key in values.keys() - TEXTS:
        yield Fault(path=str(path), line=document.line((key,)), message=f"{key}: there is no such key")
    for place in {place for *_, place in _pairs(rule, _texts(rule))} - found:
        yield Fault(path=str(path), line=document.line(place[:1]), message=f"{'.'.join(map(str, place))} is missing")
    for english, said, place in _pairs(rule, values):
        if _places(english) != _places(said):
            yield Fault(path=str(path), line=document.line(place), message="its placeholders are not those of the rule")


def _texts(rule: Rule) -> dict[str, Any]:
    return rule.file.model_dump(include=set(TEXTS))


def _pairs(rule: Rule, values: Any) -> Iterator[tuple[str, str, tuple[str | int, ...]]]:
    """Yield each text of a rule with its translation in ``values`` and where it stands there."""
    for key, text in _texts(rule).items():
        said = values.get(key) if isinstance(values, dict) else None
        if isinstance(text, str) and isinstance(said, str):
            yield text, said, (key,)
        elif isinstance(text, list) and isinstance(said, list) and len(text) == len(said):
            both = enumerate(zip(text, said, strict=True))
            yield from ((one, other, (key, at)) for at, (one, other) in both if isinstance(other, str))


def _places(text: str) -> list[str] | None:
    """Return the placeholders of a text in order of the alphabet, None where it does not parse."""
    try:
        return sorted(f"{path}:{way}" for _, path, way, _ in Formatter().parse(text) if path is not None)
    except ValueError:
        return None
