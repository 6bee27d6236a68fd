"""Settings of a DataLoader that take host memory: its workers, the batches they fetch ahead, pinned copies of these.

``fewer_workers``: each worker holds the batches that it has fetched ahead and its own copy of what it touches of the
data set: reading a Python object writes its reference count. ``prefetch``: every worker keeps ``prefetch_factor``
batches ready. ``pin_memory_off``: pinned memory cannot be swapped out, and torch keeps what it has pinned once.
``persistent_workers_off``: workers that are kept hold their batches while other loaders are in use; those that begin
anew draw a seed in each epoch, so that every later draw of the program is another one.

What workers take was measured when memory ran out; where it is not certain that batches stay the same, that is said. A
loader that an earlier cell made gets the new settings as it stands. Limit: with fewer workers each touches more data.
Source: https://docs.pytorch.org/docs/stable/data.html
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import libcst as cst

from oomdoctor.fixes._batch_sizes import check_class, loader_calls
from oomdoctor.fixes._preconditions import check_host
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing, root_of
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Unavailable
from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.incident import Family
from oomdoctor.model.memory import HostProcess
from oomdoctor.model.sizes import format_size
from oomdoctor.program import arguments, rewriting
from oomdoctor.program.earlier_cells import exchanged
from oomdoctor.program.literals import Book, Page, Place

_WORKER: Final = re.compile(r"DataLoader worker(?: \d+)?(?: of (?P<loader>.+?))?(?P<ended> \(ended\))?")
_SLOWER, _WITHOUT = 1.1, 1.5
"""Time of a step whose data come later, and without any workers, as ratios. Round figures, not measured."""

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
_NOT_LESS: Final = {
    "num_workers": "no loader has more than {} workers",
    "prefetch_factor": "no loader fetches more than {} batches ahead for each worker",
    "pin_memory": "no loader pins its batches",
    "persistent_workers": "no loader keeps its workers between epochs",
}
"""Why nothing is changed, by the keyword of ``DataLoader``, with the number of the dose."""


@proposing
def _fewer_workers(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    used = _in_use(incident, evidence)
    loaders = [loader for loader in used if not loader.iterable]
    need(loaders, f"what each worker of `{used[0].path}` reads of its data depends on how many there are")
    taken = {loader: _uss(evidence, loader, len(used) == 1) for loader in loaders}
    need(any(map(sum, taken.values())), "what the worker processes take could not be measured")
    for count in _halves(max(one.num_workers for one in loaders), least=0):
        fewer = [loader for loader in loaders if loader.num_workers > count]
        # Of what is there, the share of the workers that are told to go: one that was killed is not counted again.
        saves = sum(sum(taken[one]) * (one.num_workers - count) // one.num_workers for one in fewer)
        sizes = [size for one in fewer for size in taken[one]]
        basis = f"estimate: {len(sizes)} workers were measured to take {format_size(sum(sizes))} for themselves"
        if saves:
            reasons = [_why_others(loader, count) for loader in fewer]
            yield _proposal(fewer, saves, basis, reasons, 1.2 if count else _WITHOUT, num_workers=count)


def _why_others(loader: LoaderFacts, count: int) -> str | None:
    if (why := _why_not_same(loader, moves_samples=True)) is not None or count:
        return why
    if not loader.collates:
        return f"batches of `{loader.path}` are put together in a way of their own, and may share memory with the data"
    if loader.shuffles:
        return f"`{loader.path}` draws the seed of its order at its first batch and no longer when its loop begins"
    return None


@proposing
def _prefetch(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    used = _in_use(incident, evidence)
    ahead_of = {loader: loader.prefetch or 0 for loader in used if (loader.prefetch or 0) > 1}
    need(ahead_of, f"the workers of `{used[0].path}` fetch no more than one batch ahead each")
    batch = max((census.bytes_of(Role.BATCH) for census in evidence.censuses), default=0)
    need(batch, "the census found no batch, so what those that wait take is not known")
    for ahead in _halves(max(ahead_of.values()), least=1):
        fewer = {loader: now for loader, now in ahead_of.items() if now > ahead}
        waiting = sum(loader.num_workers * (now - ahead) for loader, now in fewer.items())
        basis = f"analytic estimate: {waiting} batches fewer wait, of {format_size(batch)} each by the census"
        reasons = [_why_not_same(loader) for loader in fewer]
        yield _proposal(fewer, waiting * batch, basis, reasons, prefetch_factor=ahead)


def _halves(most: int, least: int) -> Iterator[int]:
    while most > least:
        most //= 2
        yield most


@proposing
def _pin_memory_off(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    check_host(incident)
    loaders = [loader for loader in evidence.code.loaders if loader.pin_memory]
    need(loaders, "no loader that the notebook has a name for pins its batches")
    pinned = sum(census.bytes_of(Role.PINNED_HOST) for census in evidence.censuses)
    asked = (incident.requested or 0) if incident.family is Family.PINNED else 0
    need(pinned + asked, "the census found no pinned memory, and no size is known of what was to be pinned")
    found = [f"{format_size(pinned)} of pinned memory were found"] if pinned else []
    found += [f"{format_size(asked)} more were to be pinned"] if asked else []
    # What is pinned does not depend on who makes the samples, nor when: only workers that stay matter.
    staying = [loader for loader in loaders if loader.persistent and loader.num_workers]
    reasons = [_why_not_same(loader, moves_order=False) for loader in staying]
    yield _proposal(loaders, pinned + asked, f"estimate: {' and '.join(found)}", reasons)


@proposing
def _persistent_workers_off(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    used = _in_use(incident, evidence)
    kept = need([loader for loader in used if loader.persistent], "no loader keeps its workers between epochs")
    taken = sorted(sum(_uss(evidence, loader, alone=False)) for loader in kept)
    idle = sum(taken[:-1])
    need(idle, "the workers of one loader alone were found, and during its epoch they are there in any case")
    basis = (
        f"estimate: workers of {len(kept)} loaders were measured to take {format_size(sum(taken))}, "
        "of which one loader's remain"
    )
    why = (
        "from the second epoch on, each loader draws a seed for its new workers, so that the order of the "
        "samples and all other random numbers are others"
    )
    yield _proposal(kept, idle, basis, [why])


def _proposal(
    loaders: Iterable[LoaderFacts],
    saves: int,
    basis: str,
    reasons: Iterable[str | None],
    slowdown: float = _SLOWER,
    **dose: int,
) -> Proposal:
    """Return a dose for these loaders; ``reasons`` say why batches may be others."""
    found = list(dict.fromkeys(why for why in reasons if why is not None))
    return Proposal(
        dose=Dose.of(**dose, loaders=", ".join(loader.path for loader in loaders)),
        effect=Effect.CHANGES_RESULT if found else Effect.EXACT,
        saves=saves,
        slowdown=slowdown,
        basis=basis,
        caveat="; ".join(found) or None,
    )


def _in_use(incident: Incident, evidence: Evidence) -> tuple[LoaderFacts, ...]:
    """Return the loaders with workers that the failing cell goes through, or whose workers are there."""
    check_host(incident)
    known = [loader for loader in evidence.code.loaders if loader.num_workers]
    need(known, "no loader that the notebook has a name for has worker processes")
    loops = [(root_of(loop.loader), loop) for loop in evidence.code.loops if loop.in_failing_run]
    iterated = {root_of(dict(loop.stands_for).get(name, name)) for name, loop in loops}
    roots = {root_of(name) for name, _ in _workers(evidence) if name} or iterated
    found = tuple(loader for loader in known if root_of(loader.path) in roots)
    if not found and len(known) > 1:
        raise Unfit("which of the loaders was in use is not known")
    return found or tuple(known)


def _workers(evidence: Evidence) -> tuple[tuple[str | None, HostProcess], ...]:
    """Return the worker processes that are there, each with the loader that it is of where that is known."""
    children = evidence.host.children
    found = () if isinstance(children, Unavailable) else ((_WORKER.fullmatch(one.label), one) for one in children)
    return tuple((match["loader"], child) for match, child in found if match is not None and not match["ended"])


def _uss(evidence: Evidence, loader: LoaderFacts, alone: bool) -> tuple[int, ...]:
    """Return what each worker would free if it ended, in bytes; those without a name are a loader's ``alone``."""
    mine = [child for name, child in _workers(evidence) if name == loader.path or (name is None and alone)]
    return tuple(child.uss for child in mine if isinstance(child.uss, int))


def _why_not_same(loader: LoaderFacts, *, moves_samples: bool = False, moves_order: bool = True) -> str | None:
    """Return why the batches may differ, None where it is certain that they do not.

    Batch ``i`` comes from worker ``i % num_workers``, in order, and each worker has random numbers of its own, seeded
    from one number that the loader draws when it is iterated over. Workers that stay between epochs are the exception:
    made anew, they cost one draw more. Source: torch/utils/data/dataloader.py, ``_BaseDataLoaderIter``.

    Args:
        moves_samples: samples are made by other workers than before.
        moves_order: indices are asked for earlier or later than before.
    """
    if loader.persistent:
        return f"the workers of `{loader.path}` are kept between epochs, and begin anew with other random numbers"
    if loader.unordered:
        return f"`{loader.path}` gives its batches in the order in which they are ready"
    if moves_samples and loader.varies is not None:
        return f"the samples of `{loader.path}` may depend on the worker that makes them: {loader.varies}"
    if moves_order and loader.order is not None:
        return f"the order of `{loader.path}` may depend on how far ahead batches are fetched: {loader.order}"
    return None


def _now(keyword: str, loader: LoaderFacts) -> int:
    names = {"prefetch_factor": "prefetch", "persistent_workers": "persistent"}
    return int(getattr(loader, names.get(keyword, keyword)) or 0)


@refusing
def _patch(keyword: str, cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the dose's value of a setting for each of its loaders."""
    value = dose.number(keyword) if keyword in dict(dose.values) else False
    names = str(dose["loaders"]).split(", ")
    loaders = [one for one in evidence.code.loaders if one.path in names and _now(keyword, one) > value]
    need(loaders, _NOT_LESS[keyword].format(value))
    without_workers = keyword == "num_workers" and not value
    needing = _NEEDS_WORKERS if without_workers else {}
    settings = {keyword: repr(value)} | dict.fromkeys(needing)
    held: dict[str, object] = {keyword: value} | {_HELD.get(name, name): least for name, least in needing.items()}
    book = Book.read(cells)
    end = Place(page=book.failing)
    check_class(book)
    wanted: list[tuple[Page, ast.expr, rewriting.New]] = []
    live: dict[int, list[str]] = {}
    for loader in loaders:
        why = f"no call of DataLoader was found in the cells that makes `{loader.path}`"
        made = need(loader_calls(book, loader.path, end), why)
        for call, place in made:
            if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
                where = f"line {call.lineno} of {place.page.cell}"
                raise Unfit(f"{where} unpacks the settings of a loader from something that may hold this one already")
            wanted.append((place.page, call, partial(_with, settings=settings)))
        bound = book.binding(root_of(loader.path), end)
        if bound is not None and bound[1].page is not book.failing:  # a loader guards some of its attributes
            anew = {"_iterator": None} if loader.persistent or without_workers else {}
            told = ", ".join(f"{name}={least!r}" for name, least in (held | anew).items())
            live.setdefault(made[0][1].page.cell.number, []).append(f"vars({loader.path}).update({told})")
    taken = {id(call) for _, call, _ in wanted}
    for other in evidence.code.loaders:
        if other not in loaders and any(id(call) in taken for call, _ in loader_calls(book, other.path, end)):
            raise Unfit(f"`{other.path}` is made by the same call")
    changed = need(exchanged(wanted)).items()
    return rewriting.join(
        cells, [rewriting.edit(cells, cells.get(n), parsed, module, live.get(n)) for n, (parsed, module) in changed]
    )


def _with(node: cst.CSTNode, settings: Mapping[str, str | None]) -> cst.CSTNode:
    call = cst.ensure_type(node, cst.Call)
    for name, text in settings.items():
        at = _PLACES.get(name)
        if text is None:
            call = arguments.without_keyword(call, name)
        elif at is not None and len(call.args) > at and call.args[at].keyword is None:
            new = call.args[at].with_changes(value=cst.parse_expression(text))
            call = call.with_changes(args=[*call.args[:at], new, *call.args[at + 1 :]])
        else:
            call = arguments.with_keyword(call, name, text)
    return call


FIXES: Final = (
    Fix(
        id="fewer_workers",
        title="Use fewer DataLoader workers",
        effect=Effect.EXACT,
        cost="steps may wait for their data",
        propose=_fewer_workers,
        patch=partial(_patch, "num_workers"),
        is_tried=False,
    ),
    Fix(
        id="prefetch",
        title="Fetch fewer batches ahead",
        effect=Effect.EXACT,
        cost="steps may wait for their data",
        propose=_prefetch,
        patch=partial(_patch, "prefetch_factor"),
        is_tried=False,
    ),
    Fix(
        id="pin_memory_off",
        title="Turn off pinned memory for batches",
        effect=Effect.EXACT,
        cost="slower copies of batches to the device",
        propose=_pin_memory_off,
        patch=partial(_patch, "pin_memory"),
        is_tried=False,
    ),
    Fix(
        id="persistent_workers_off",
        title="End DataLoader workers after each epoch",
        effect=Effect.CHANGES_RESULT,
        cost="workers are started for every epoch",
        propose=_persistent_workers_off,
        patch=partial(_patch, "persistent_workers"),
        is_tried=False,
    ),
)
