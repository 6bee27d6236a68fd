"""Reads rule files, checks them, and makes a rule book of them, or says everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import rule_engine
import yaml
from pydantic import ValidationError

from oomdoctor.errors import Fault, RuleErrors, SizeError
from oomdoctor.model.sizes import parse_size
from oomdoctor.rulebook import sentences
from oomdoctor.rulebook.context import Fact, Facts, kind_of
from oomdoctor.rulebook.expressions import compiled
from oomdoctor.rulebook.facts import complete
from oomdoctor.rulebook.files import files_in, text_of
from oomdoctor.rulebook.matching import Rule, RuleBook
from oomdoctor.rulebook.positions import Document, parse
from oomdoctor.rulebook.schema import RuleFile


def load(
    paths: Sequence[Path], known_fixes: Collection[str] | None, known_rules: Collection[str] = frozenset()
) -> RuleBook:
    """Return the rules in ``paths``, which are files, or folders that are searched for ``*.yaml``.

    Args:
        paths: where to look.
        known_fixes: ids of the fixes that there are; None leaves them unchecked.
        known_rules: ids of rules elsewhere, which these may refer to and must not take.

    Raises:
        RuleErrors: with every fault of every file. Examples that do not hold are faults as well.
    """
    book = load_sound(paths, known_fixes, known_rules)
    if book.faults:
        raise RuleErrors(book.faults)
    return book


def load_sound(
    paths: Sequence[Path],
    known_fixes: Collection[str] | None,
    known_rules: Collection[str] = frozenset(),
    *,
    proven: Path | None = None,
) -> RuleBook:
    """Return the rules of ``paths`` that have no fault, and the faults of the others. See ``load``.

    Args:
        proven: a folder whose examples were tried before, so that they are not tried again.
    """
    faults: list[Fault] = []
    files = list(files_in(paths, faults))
    readers = [_Reader(path, known_fixes, faults, tries=proven not in path.parents) for path in files]
    rules = [rule for reader in readers if (rule := reader.read()) is not None]
    homes = dict.fromkeys(known_rules, "a rule that oomdoctor has")
    for reader in readers:
        reader.check_id(homes)
    for reader in readers:
        reader.check_see(homes)
    broken = {fault.path for fault in faults}
    return RuleBook(
        rules=tuple(sorted((rule for rule in rules if rule.path not in broken), key=lambda rule: rule.file.id)),
        faults=tuple(sorted(faults, key=lambda fault: (fault.path, fault.line))),
    )


class _Reader:
    """Reads one file and writes down each of its faults; ``tries`` its examples or takes them as they are."""

    def __init__(self, path: Path, known_fixes: Collection[str] | None, faults: list[Fault], *, tries: bool) -> None:
        self.path, self.known_fixes, self.faults, self.tries = path, known_fixes, faults, tries
        self.document: Document | None = None

    def read(self) -> Rule | None:
        """Return the rule, None where the file has a fault."""
        before = len(self.faults)
        self.document = document = self._document()
        if document is None:
            return None
        for key, line in document.repeated():
            self._fault(line, f"the key {key!r} is there twice")
        values = document.values if isinstance(document.values, dict) else {}
        try:
            file = RuleFile.model_validate(document.values)
        except ValidationError as error:
            self._form(error, document)
            file = None
        expressions = self._match(values.get("match"), document)
        self._because(values.get("because"), document)
        self._fixes(values.get("fixes"), document)
        self._references(values.get("references"), document)
        examples = self._examples(values.get("examples"), document) if self.tries else {}
        if isinstance(values.get("id"), str) and values["id"] != self.path.stem:
            self._fault(document.line(["id"]), f"the id {values['id']!r} is not the name of the file")
        if file is None or len(self.faults) > before:
            return None
        rule = Rule(file=file, path=str(self.path), expressions=tuple(expressions))
        self._hold(rule, examples, document)
        return rule if len(self.faults) == before else None

    def check_id(self, homes: dict[str, str]) -> None:
        """Refuse an id that another rule has; ``homes`` says where each stands."""
        own = self._value("id")
        if self.document is not None and isinstance(own, str):
            if own in homes:
                self._fault(self.document.line(["id"]), f"{own!r} is the id of {homes[own]} as well")
            else:
                homes[own] = str(self.path)

    def check_see(self, homes: Mapping[str, str]) -> None:
        """Refuse to refer to a rule that is not there, or to itself."""
        for number, other in enumerate(self._value("see") or ()):
            if self.document is not None and isinstance(other, str):
                line = self.document.line(["see", number])
                if other not in homes:
                    self._fault(line, f"there is no rule {other!r}")
                elif other == self._value("id"):
                    self._fault(line, "the rule refers to itself")

    def _value(self, key: str) -> Any:
        values = self.document.values if self.document is not None else None
        found = values.get(key) if isinstance(values, dict) else None
        return found if not isinstance(found, dict) else None

    def _form(self, error: ValidationError, document: Document) -> None:
        """Write down what the form is not; of several readings that a value might have had, one fault is told."""
        faults: dict[tuple[str | int, ...], Mapping[str, Any]] = {}
        for one in error.errors():
            place = tuple(step for step in one["loc"] if not _is_reading(step))
            faults.setdefault(place, one)
        for place, fault in faults.items():
            if not any(other[: len(place)] == place and other != place for other in faults if place):
                self._fault(document.line(place), _words(fault, place))

    def _references(self, given: Any, document: Document) -> None:
        seen: set[str] = set()
        for number, address in enumerate(given if isinstance(given, list) else ()):
            line = document.line(["references", number])
            if isinstance(address, str) and not _is_address(address):
                self._fault(line, f"{address!r} is no address: it begins with http:// or https:// and names a host")
            elif isinstance(address, str) and address in seen:
                self._fault(line, f"{address} is there twice")
            seen.add(str(address))

    def _fault(self, line: int, message: str) -> None:
        self.faults.append(Fault(path=str(self.path), line=line, message=message))

    def _document(self) -> Document | None:
        text = ""
        try:
            text = text_of(self.path)
            return parse(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._fault(mark.line + 1 if mark else 1, f"this is not YAML: {_one_line(error.problem or error.context)}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._fault(line, "this is not YAML: it has a character that cannot be printed")
        except RecursionError:
            self._fault(1, "this is not YAML: it is nested too deeply")
        except (yaml.YAMLError, ValueError) as error:
            self._fault(1, _one_line(error))
        return None

    def _match(self, given: Any, document: Document) -> list[rule_engine.Rule]:
        """Return the expressions that are right."""
        several = list(enumerate(given)) if isinstance(given, list) else [(None, given)]
        right = []
        for number, text in several:
            if isinstance(text, str):
                line = document.line(["match"] if number is None else ["match", number])
                right += self._expression(text, line)
        return right

    def _expression(self, text: str, line: int) -> list[rule_engine.Rule]:
        try:
            return [compiled(text)]
        except ValueError as error:
            self._fault(line, str(error))
            return []

    def _because(self, given: Any, document: Document) -> None:
        for number, sentence in enumerate(given if isinstance(given, list) else ()):
            for problem in sentences.problems(sentence) if isinstance(sentence, str) else ():
                self._fault(document.line(["because", number]), problem)

    def _fixes(self, given: Any, document: Document) -> None:
        seen: set[str] = set()
        for number, fix in enumerate(given if isinstance(given, list) else ()):
            if not isinstance(fix, str):
                continue
            if self.known_fixes is not None and fix not in self.known_fixes:
                self._fault(document.line(["fixes", number]), f"there is no fix {fix!r}")
            elif fix in seen:
                self._fault(document.line(["fixes", number]), f"the fix {fix!r} is there twice")
            seen.add(fix)

    def _examples(self, given: Any, document: Document) -> dict[tuple[str, int], Facts]:
        """Return the facts of each example by where it stands; unknown facts are faults."""
        read: dict[tuple[str, int], Facts] = {}
        for name in ("fires", "silent"):
            examples = given.get(name) if isinstance(given, dict) else None
            for number, example in enumerate(examples if isinstance(examples, list) else ()):
                where = ("examples", name, number)
                read[name, number] = complete(self._facts(example, where, document))
        return read

    def _facts(self, example: Any, where: tuple[str | int, ...], document: Document) -> Facts:
        facts: dict[str, dict[str, Fact]] = {}
        for group, names in example.items() if isinstance(example, dict) else ():
            for name, value in names.items() if isinstance(names, dict) else ():
                try:
                    facts.setdefault(str(group), {})[str(name)] = _value(f"{group}.{name}", value)
                except (SizeError, TypeError) as error:
                    self._fault(document.line([*where, group, name]), str(error))
        return facts

    def _hold(self, rule: Rule, examples: Mapping[tuple[str, int], Facts], document: Document) -> None:
        for (name, number), facts in examples.items():
            if rule.fires(facts) != (name == "fires"):
                wrong = "does not fire" if name == "fires" else "fires"
                self._fault(document.line(["examples", name, number]), f"the rule {wrong} on this example")


def _value(path: str, value: Any) -> Fact:
    kind = kind_of(path)
    if kind is None:
        raise TypeError(f"there is no fact {path!r}")
    if kind is float and isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{path} is {'a number' if kind is float else 'a word' if kind is str else 'true or false'}")
    if isinstance(value, float) and not isfinite(value):
        raise TypeError(f"{path} is a number that can be measured, and {value} is none")
    return cast("Fact", value)


def _is_address(text: str) -> bool:
    """Whether it could be asked for: a scheme of the web, a host with a dot in it, nothing that cannot be in one."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    host = parts.hostname or ""
    return parts.scheme in {"http", "https"} and "." in host.strip(".") and not any(map(str.isspace, text))


_READINGS: Final = ("constrained-", "list[", "str", "function-")
"""How pydantic marks, in the place of a fault, one of several types that a value may have."""


def _is_reading(step: str | int) -> bool:
    return isinstance(step, str) and step.startswith(_READINGS)


def _words(error: Mapping[str, Any], place: Sequence[str | int]) -> str:
    """Return one fault of pydantic in our words."""
    where = ".".join(map(str, place))
    known = {"missing": f"{where} is missing", "extra_forbidden": f"{where}: there is no such key"}
    if not where:
        return "a rule file is a mapping of keys to values"
    said = error["msg"].removeprefix("Value error, ")
    return known.get(error["type"], f"{where}: {said[0].lower()}{said[1:]}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
