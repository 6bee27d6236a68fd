"""Where rules come from: those that oomdoctor ships, packages that offer some, and folders of the user's.

A package offers rules by an entry point of the group ``oomdoctor.rules`` that names a package of its own with rule
files in it::

    [project.entry-points."oomdoctor.rules"]
    mine = "my_package.rules"

Only files are read. The package is looked up, and neither it nor what is above it is imported.

The user's folders are named by the settings of the notebook that runs, or of IPython's default profile. In a notebook
``OomDoctor.rule_paths`` is asked of the extension, and of the configuration where it is not loaded. The shell command
has no notebook; it reads what a new one would: ``ipython_config.py`` and ``ipython_kernel_config.py``, as Python or
JSON, of the default profile. A profile that is written in Python is run, as IPython itself runs it.
Limits: other profiles, and settings that were given on a kernel's command line, are not known to the shell command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from oomdoctor.errors import Fault, NotAvailable
from oomdoctor.rulebook.loading import expanded, files_in, load
from oomdoctor.rulebook.matching import RuleBook

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
        book = load([shipped, *paths, *wanted], known_fixes, proven=shipped)
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
        found = [folder for folder in _of_package(point) if folder.is_dir()]
        folders += [folder for folder in found if folder not in folders]
        if next(files_in(found, []), None) is None:
            faults.append(_fault(point, f"there is no package {point.value!r} with rule files"))
    return tuple(folders), tuple(faults)


def _fault(point: EntryPoint, message: str) -> Fault:
    owner = point.dist.name if point.dist else GROUP
    return Fault(path=f"entry point {point.name} of {owner}", line=1, message=message)


def _of_package(point: EntryPoint) -> list[Path]:
    top, *below = point.value.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a name that is none, or a module without a spec
        return []
    return [Path(place, *below) for place in (spec.submodule_search_locations or ())] if spec is not None else []


_SECTION: Final = "OomDoctor"
_NAME: Final = "rule_paths"


def of_notebook() -> tuple[Path, ...]:
    """Return the folders that the settings of this process' notebook name; none where it is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return ()
    for one in shell.configurables:
        if type(one).__name__ == _SECTION:
            return tuple(map(Path, getattr(one, _NAME)))
    return _folders(shell.config)


def of_profile() -> tuple[tuple[Path, ...], tuple[Fault, ...]]:
    """Return the folders that the default profile's settings name, and what is wrong with those settings.

    Of several files that name some, the last counts, as in IPython.
    """
    folders: tuple[Path, ...] = ()
    faults = []
    for path in _files():
        try:
            folders = _folders(_read(path)) or folders
        except (Exception, SystemExit) as error:  # noqa: BLE001 - border: it is a program of the user's
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            faults.append(Fault(path=str(path), line=1, message=f"the settings cannot be read: {reason}"))
    return folders, tuple(faults)


def _files() -> Iterator[Path]:
    """Yield the files of settings that there are, in the order in which IPython reads them.

    Source: ``BaseIPythonApplication.init_config_files`` and ``SYSTEM_CONFIG_DIRS`` of IPython.core.application.
    """
    home = Path(os.environ.get("IPYTHONDIR") or Path("~", ".ipython")).expanduser()
    system = [Path(sys.prefix, "etc", "ipython")]
    if os.name != "nt":
        system = [Path("/etc/ipython"), Path("/usr/local/etc/ipython"), *system]
    for name in ("ipython_config", "ipython_kernel_config"):
        for folder in (*system, home / "profile_default"):
            for suffix in (".py", ".json"):
                if (path := folder / (name + suffix)).is_file():
                    yield path


def _read(path: Path) -> Any:
    from traitlets.config.loader import JSONFileConfigLoader, PyFileConfigLoader

    loader = (JSONFileConfigLoader if path.suffix == ".json" else PyFileConfigLoader)(path.name, str(path.parent))
    with redirect_stdout(sys.stderr):
        return loader.load_config()


def _folders(config: Any) -> tuple[Path, ...]:
    """Return the folders that a configuration names.

    Raises:
        TypeError: it names something else.
    """
    named = config[_SECTION].get(_NAME, []) if _SECTION in config else []
    if hasattr(named, "get_value"):  # built up with append and extend
        named = named.get_value([])
    if not isinstance(named, (list, tuple)) or not all(isinstance(one, (str, Path)) for one in named):
        raise TypeError(f"c.{_SECTION}.{_NAME} is a list of folders")
    return tuple(map(Path, named))
