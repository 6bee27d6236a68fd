"""Reads rule files, checks them, and makes a rule book of them, or says everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oomdoctor.errors import Fault, RuleErrors
from oomdoctor.rulebook.expressions import compiled
from oomdoctor.rulebook.facts import complete
from oomdoctor.rulebook.files import files_in, text_of
from oomdoctor.rulebook.matching import Rule, RuleBook
from oomdoctor.rulebook.positions import Document, NotYaml, parse
from oomdoctor.rulebook.schema import RuleFile, facts_in


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
    readers = [_Reader(path, faults) for path in list(files_in(paths, faults))]
    rules = [one.read(known_fixes, tries=proven not in one.path.parents) for one in readers]
    homes = dict.fromkeys(known_rules, "a rule that oomdoctor has")
    for reader in readers:
        reader.check_id(homes)
    for reader in readers:
        reader.check_see(homes)
    broken = {fault.path for fault in faults}
    sound = [rule for rule in rules if rule is not None and rule.path not in broken]
    return RuleBook(
        rules=tuple(sorted(sound, key=lambda rule: rule.file.id)),
        faults=tuple(sorted(faults, key=lambda fault: (fault.path, fault.line))),
    )


class _Reader:
    """Reads one file and writes down each of its faults."""

    def __init__(self, path: Path, faults: list[Fault]) -> None:
        self.path, self.faults = path, faults
        self.document = Document(values=None, root=None)

    def read(self, known_fixes: Collection[str] | None, *, tries: bool) -> Rule | None:
        """Return the rule, None where the file is none; ``tries`` its examples or takes them as they are."""
        try:
            self.document = parse(text_of(self.path))
        except ValueError as error:
            self._fault(error.line if isinstance(error, NotYaml) else 1, str(error))
            return None
        except RecursionError:
            self._fault(1, "this is not YAML: it is nested too deeply")
            return None
        for key, line in self.document.repeated():
            self._fault(line, f"the key {key!r} is there twice")
        try:
            file = RuleFile.model_validate(self.document.values, context={"fixes": known_fixes})
        except ValidationError as error:
            for fault in error.errors():
                self._fault(self.document.line(fault["loc"]), _words(fault))
            return None
        rule = Rule(file=file, path=str(self.path), expressions=tuple(map(compiled, file.match)))
        for name, examples in (("fires", file.examples.fires), ("silent", file.examples.silent)) if tries else ():
            for number, example in enumerate(examples):
                if rule.fires(complete(facts_in(example))) != (name == "fires"):
                    wrong = "does not fire" if name == "fires" else "fires"
                    self._fault_at(("examples", name, number), f"the rule {wrong} on this example")
        return rule

    def check_id(self, homes: dict[str, str]) -> None:
        """Refuse an id that another rule has, or that is not the file's name; ``homes`` says where each stands."""
        own = self._value("id")
        if not isinstance(own, str):
            return
        if own != self.path.stem:
            self._fault_at(("id",), f"the id {own!r} is not the name of the file")
        if own in homes:
            self._fault_at(("id",), f"{own!r} is the id of {homes[own]} as well")
        else:
            homes[own] = str(self.path)

    def check_see(self, homes: Mapping[str, str]) -> None:
        """Refuse to refer to a rule that is not there, or to itself."""
        see = self._value("see")
        for number, other in enumerate(see if isinstance(see, list) else ()):
            if isinstance(other, str) and other not in homes:
                self._fault_at(("see", number), f"there is no rule {other!r}")
            elif other == self._value("id"):
                self._fault_at(("see", number), "the rule refers to itself")

    def _value(self, key: str) -> Any:
        values = self.document.values
        return values.get(key) if isinstance(values, dict) else None

    def _fault_at(self, place: tuple[str | int, ...], message: str) -> None:
        self._fault(self.document.line(place), message)

    def _fault(self, line: int, message: str) -> None:
        self.faults.append(Fault(path=str(self.path), line=line, message=message))


def _words(error: Mapping[str, Any]) -> str:
    """Return one fault of pydantic in our words."""
    where = ".".join(map(str, error["loc"]))
    known = {"missing": f"{where} is missing", "extra_forbidden": f"{where}: there is no such key"}
    if not where:
        return "a rule file is a mapping of keys to values"
    said = error["msg"].removeprefix("Value error, ")
    return known.get(error["type"], f"{where}: {said[0].lower()}{said[1:]}")
