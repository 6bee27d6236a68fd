"""Reads rule files, checks them, and makes a rule book of them, or says everything that is wrong at once.

Rules are those that oomdoctor ships, and those of folders that the settings of the notebook name, where the extension
is loaded into it. The shell command has no notebook, and takes none.

Each value of a YAML file knows its line, so that a fault can name it. In a folder, what begins with a dot is passed
over: Jupyter keeps copies in ``.ipynb_checkpoints``.
Limits: links to folders below the one that was named are not followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from oomdoctor.errors import Fault, NotAvailable
from oomdoctor.language import add
from oomdoctor.rulebook.facts import complete
from oomdoctor.rulebook.matching import Rule, RuleBook
from oomdoctor.rulebook.reading import Document, NotYaml, parse, text_of
from oomdoctor.rulebook.schema import RuleFile, compiled, facts_in
from oomdoctor.rulebook.translation import TRANSLATED, faults_of, translations

_SUFFIXES: Final = frozenset({".yaml", ".yml"})


def expanded(path: Path) -> Path:
    """Return the path with ``~`` in place, as it is where there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def files_in(paths: Sequence[Path], faults: list[Fault]) -> Iterator[Path]:
    """Yield the rule files of ``paths``, each once, however many ways lead to it.

    Args:
        paths: files, which are taken whatever they are called, and folders, which are searched for rule files.
        faults: gets what cannot be looked at.
    """
    seen: set[str] = set()
    for path in paths:
        for one in _found(path, faults):
            real = os.path.realpath(one)
            if real not in seen:
                seen.add(real)
                yield one


def _found(path: Path, faults: list[Fault]) -> Iterator[Path]:
    def fault(where: Path, message: str) -> None:
        faults.append(Fault(path=str(where), line=1, message=message))

    def refused(error: OSError) -> None:
        fault(Path(error.filename or path), f"the folder cannot be read: {error.strerror}")

    try:
        os.stat(path)  # noqa: PTH116 - `Path.exists` would hide why
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can be called so
        return fault(path, "there is no such file or folder")
    except OSError as error:
        return fault(path, f"it cannot be looked at: {error.strerror}")
    if not path.is_dir():
        yield path
        return
    for place, folders, names in os.walk(path, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            is_said = name.endswith(TRANSLATED)
            if not (is_said or name.startswith(".")) and (one := Path(place, name)).suffix.lower() in _SUFFIXES:
                yield one


def locate() -> Path:
    """Return the folder of the rules that oomdoctor ships: in the installed package, or beside it in a checkout.

    Raises:
        NotAvailable: there is neither.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "_rules", package.parent / "rules"):
        if folder.is_dir():
            return folder
    raise NotAvailable(f"the rules are missing: neither {package / '_rules'} nor {package.parent / 'rules'} is there")


def everything(folders: Sequence[Path], known_fixes: Collection[str] | None) -> RuleBook:
    """Return all rules that are sound, shipped and of ``folders``; the first of an id wins.

    They are read once, and again when a file of ``folders`` has changed. The examples of those that oomdoctor ships are
    not tried here, which takes as long as a third of the rest: its tests and ``oomdoctor rules check`` have tried them.
    """
    wanted = tuple(map(expanded, folders))
    key = wanted, tuple(_stamps(wanted)), None if known_fixes is None else frozenset(known_fixes)
    if key not in _books:
        shipped = locate()
        _books.clear()
        _books[key] = load([shipped, *wanted], known_fixes, proven=shipped)
        add("rules", partial(translations, _books[key].rules))
    return _books[key]


_books: dict[object, RuleBook] = {}


def _stamps(folders: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    for path in files_in(folders, []):
        with suppress(OSError):  # it went away between the two looks
            about = path.stat()
            yield str(path), about.st_mtime_ns, about.st_size


def of_notebook() -> tuple[Path, ...]:
    """Return the folders that the settings of this process' notebook name; none where it is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    settings = (one for one in getattr(shell, "configurables", ()) if type(one).__name__ == "OomDoctor")
    return tuple(Path(folder) for one in settings for folder in one.rule_paths)


def load(
    paths: Sequence[Path],
    known_fixes: Collection[str] | None,
    known_rules: Collection[str] = frozenset(),
    *,
    proven: Path | None = None,
) -> RuleBook:
    """Return the rules of ``paths`` that have no fault, and every fault of the others.

    Args:
        paths: files, or folders that are searched for ``*.yaml``.
        known_fixes: ids of the fixes that there are; None leaves them unchecked.
        known_rules: ids of rules elsewhere, which these may refer to and must not take.
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
    for rule in rules if proven is None else ():
        faults += [] if rule is None else faults_of(rule)
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
