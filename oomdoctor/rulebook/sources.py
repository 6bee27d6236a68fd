"""Where rules come from: those that oomdoctor ships, packages that offer some, and folders of the user's.

A package offers rules by an entry point of the group ``oomdoctor.rules`` that names a package of its own with rule
files in it::

    [project.entry-points."oomdoctor.rules"]
    mine = "my_package.rules"

Only files are read. The package is looked up, and neither it nor what is above it is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from oomdoctor.errors import Fault, NotAvailable
from oomdoctor.rulebook.files import expanded, files_in
from oomdoctor.rulebook.loading import load_sound
from oomdoctor.rulebook.matching import RuleBook
from oomdoctor.rulebook.settings import of_profile

GROUP: Final = "oomdoctor.rules"


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
    """Return all rules that are sound: shipped, offered by packages, and of ``folders``; the first of an id wins.

    They are read once, and again when a file of ``folders`` has changed. The examples of those that oomdoctor ships are
    not tried here, which takes as long as a third of the rest: its tests and ``oomdoctor rules check`` have tried them.
    """
    wanted = tuple(map(expanded, folders))
    key = wanted, tuple(_stamps(wanted)), None if known_fixes is None else frozenset(known_fixes)
    if key not in _books:
        paths, faults = offered()
        shipped = locate()
        book = load_sound([shipped, *paths, *wanted], known_fixes, proven=shipped)
        _books.clear()
        _books[key] = RuleBook(rules=book.rules, faults=(*book.faults, *faults))
    return _books[key]


_books: dict[object, RuleBook] = {}


def configured(known_fixes: Collection[str] | None) -> RuleBook:
    """Return all rules that a new notebook would have, those that the default profile's settings name included."""
    folders, faults = of_profile()
    book = everything(folders, known_fixes)
    return RuleBook(rules=book.rules, faults=(*faults, *book.faults))


def _stamps(folders: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    for path in files_in(folders, []):
        with suppress(OSError):  # it went away between the two looks
            about = path.stat()
            yield str(path), about.st_mtime_ns, about.st_size


def offered() -> tuple[tuple[Path, ...], tuple[Fault, ...]]:
    """Return the folders of rules that installed packages offer, and what is wrong with those that have none."""
    folders: list[Path] = []
    faults: list[Fault] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found = [folder for folder in _folders(point) if folder.is_dir()]
        folders += [folder for folder in found if folder not in folders]
        if next(files_in(found, []), None) is None:
            faults.append(_fault(point, f"there is no package {point.value!r} with rule files"))
    return tuple(folders), tuple(faults)


def _fault(point: EntryPoint, message: str) -> Fault:
    owner = point.dist.name if point.dist else GROUP
    return Fault(path=f"entry point {point.name} of {owner}", line=1, message=message)


def _folders(point: EntryPoint) -> list[Path]:
    top, *below = point.value.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a name that is none, or a module without a spec
        return []
    return [Path(place, *below) for place in (spec.submodule_search_locations or ())] if spec is not None else []
