"""Settings of loaders, changed in the calls that make them and on the loaders that are there already.

The call is found from the loader's name, through functions of the notebook as well. A loader that an earlier cell made
gets the new settings as it stands, so that its data set is not read again; the next time it is iterated over, it is as
the changed call would have made it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._batch_sizes import loader_calls
from oomdoctor.fixes._loader_memory import root_of
from oomdoctor.fixes._optimizer_source import with_keyword
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.program import rewriting
from oomdoctor.program.arguments import without_keyword
from oomdoctor.program.book import Book, Page, Place
from oomdoctor.program.replay import exchanged

if TYPE_CHECKING:
    from oomdoctor.model.session import Cells, Session

__all__ = ["apply", "patch"]

_PLACES: Final = {"num_workers": 5, "pin_memory": 7, "timeout": 9, "multiprocessing_context": 11}
"""Where settings stand without their keyword. Source: ``DataLoader.__init__``."""

_NEEDS_WORKERS: Final = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "multiprocessing_context": None,
}
"""What ``DataLoader`` refuses, or asserts to be unset, where it has no workers, and what a loader made without workers
has there. Source: ``DataLoader.__init__``."""
_HELD: Final = {"multiprocessing_context": "_DataLoader__multiprocessing_context"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A setting of loaders that a dose makes less.

    Attributes:
        of: what a loader has.
        none: why nothing is changed, with the number of the dose.
    """

    of: Callable[[LoaderFacts], int]
    none: str


_SETTINGS: Final[Mapping[str, _Setting]] = {
    "num_workers": _Setting(of=lambda one: one.num_workers, none="no loader has more than {} workers"),
    "prefetch_factor": _Setting(
        of=lambda one: one.prefetch or 0, none="no loader fetches more than {} batches ahead for each worker"
    ),
    "pin_memory": _Setting(of=lambda one: one.pin_memory, none="no loader pins its batches"),
    "persistent_workers": _Setting(of=lambda one: one.persistent, none="no loader keeps its workers between epochs"),
}
"""By the keyword of ``DataLoader``. A dose names the loaders, and the number where the setting is one."""


def patch(keyword: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the dose's value of a setting for each of its loaders."""
    setting, value = _SETTINGS[keyword], _value(keyword, dose)
    names = str(dose["loaders"]).split(", ")
    loaders = [one for one in evidence.code.loaders if one.path in names and setting.of(one) > value]
    if not loaders:
        return Refused(setting.none.format(value))
    settings: dict[str, str | None] = {keyword: repr(value)}
    without_workers = keyword == "num_workers" and not value
    if without_workers:
        settings |= dict.fromkeys(_NEEDS_WORKERS)
    book = Book.read(cells)
    end = Place(page=book.failing)
    if any(isinstance(n, ast.ClassDef) and n.name == "DataLoader" for page in book.pages for n in ast.walk(page.tree)):
        return Refused("`DataLoader` is a class of the cells' own")
    wanted: list[tuple[Page, ast.expr, rewriting.New]] = []
    live: dict[int, list[str]] = {}
    taken: set[int] = set()
    for loader in loaders:
        made = loader_calls(book, loader.path, end)
        if not made:
            return Refused(f"no call of DataLoader was found in the cells that makes `{loader.path}`")
        for call, place in made:
            taken.add(id(call))
            if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
                where = f"line {call.lineno} of {place.page.cell}"
                return Refused(
                    f"{where} unpacks the settings of a loader from something that may hold this one already"
                )
            wanted.append((place.page, call, partial(_with, settings=settings)))
        bound = book.binding(root_of(loader.path), end)
        if bound is not None and bound[1].page is not book.failing:
            lines = live.setdefault(made[0][1].page.cell.number, [])
            lines.append(_live(loader, keyword, value, without_workers))
    paths = {loader.path for loader in loaders}
    for other in evidence.code.loaders:
        if other.path not in paths and any(id(call) in taken for call, _ in loader_calls(book, other.path, end)):
            return Refused(f"`{other.path}` is made by the same call")
    changed = exchanged(wanted)
    if isinstance(changed, Refused):
        return changed
    edits = [
        rewriting.edit(cells, cells.get(number), parsed, module, live.get(number))
        for number, (parsed, module) in changed.items()
    ]
    return rewriting.join(cells, edits)


def _value(keyword: str, dose: Dose) -> int | bool:
    return dose.number(keyword) if keyword in dict(dose.values) else False


def _live(loader: LoaderFacts, keyword: str, value: int | bool, without_workers: bool) -> str:
    """Return what gives a loader that is there already the same settings: it guards some of its attributes."""
    held: dict[str, object] = {keyword: value}
    if without_workers:
        held |= {_HELD.get(name, name): least for name, least in _NEEDS_WORKERS.items()}
    held |= {"_iterator": None} if loader.persistent or without_workers else {}
    return f"vars({loader.path}).update({', '.join(f'{name}={least!r}' for name, least in held.items())})"


def _with(node: cst.CSTNode, settings: Mapping[str, str | None]) -> cst.CSTNode:
    call = cst.ensure_type(node, cst.Call)
    for name, text in settings.items():
        at = _PLACES.get(name)
        unnamed = at is not None and len(call.args) > at and call.args[at].keyword is None
        if text is None:
            call = without_keyword(call, name)
        elif unnamed and at is not None:
            new = call.args[at].with_changes(value=cst.parse_expression(text))
            call = call.with_changes(args=[*call.args[:at], new, *call.args[at + 1 :]])
        else:
            named = with_keyword(call, name, text)
            assert not isinstance(named, Refused)  # nothing is unpacked, as was seen before
            call = named
    return call


@contextmanager
def apply(keyword: str, session: Session, dose: Dose) -> Iterator[None]:
    """Give the loaders of the dose its value of a setting for as long as the context lasts.

    Raises:
        OomDoctorError: a loader is not there, or its workers are running and would go on as they are.
    """
    there, value = dict(session.loaders), _value(keyword, dose)
    settings = {keyword: value} | ({"timeout": 0} if keyword == "num_workers" and not value else {})
    loaders = []
    for name in str(dose["loaders"]).split(", "):
        if name not in there:
            raise OomDoctorError(f"`{name}` is not there yet")
        own = vars(there[name])
        if own["_iterator"] is not None:
            raise OomDoctorError(f"the workers of `{name}` are kept between epochs and are running")
        loaders.append(own)
    before = [{key: own[key] for key in ("_iterator", *settings)} for own in loaders]
    try:
        for own in loaders:
            own.update(settings)
        yield
    finally:
        for own, old in zip(loaders, before, strict=True):
            own.update(old)
