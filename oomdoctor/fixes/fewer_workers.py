"""Loads data with fewer worker processes.

Each worker holds the batches that it has fetched ahead and its own copy of what it touches of the data set: reading a
Python object writes its reference count, and the page that it lies on is copied. What that comes to was measured when
memory ran out, worker by worker. Batches come in the same order from however many workers, and are the same as long as
samples do not depend on the worker that makes them; where that is not certain, it is said. Without any workers, samples
are made in the process of the notebook itself, which then also starts to shuffle at another moment.

Limits: that workers go on to grow is not foreseen, and with fewer of them, each touches more of the data.
Source: https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _host_room, _loader_memory, _loader_source
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Proposal
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident

__all__ = ["FIX", "apply", "patch", "propose"]

_SLOWER, _WITHOUT = 1.2, 1.5
"""Time of a step with fewer workers and with none, as ratios. Round figures, not measured: what a step waits for its
data is not known."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose a half of the workers, a half of those, and so on to none."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    used = _loader_memory.in_use(evidence)
    if isinstance(used, Refused):
        return used
    loaders = [loader for loader in used if not loader.iterable]
    if not loaders:
        return Refused(f"what each worker of `{used[0].path}` reads of its data depends on how many there are")
    taken = {loader: _loader_memory.uss(evidence, loader, len(used) == 1) for loader in loaders}
    sizes = [size for each in taken.values() for size in each]
    if not any(sizes):
        return Refused("what the worker processes take could not be measured")
    counts = _counts(max(one.num_workers for one in loaders))
    return tuple(one for count in counts if (one := _proposal(taken, count)).saves)


def _counts(most: int) -> list[int]:
    counts = []
    while most:
        most //= 2
        counts.append(most)
    return counts


def _proposal(taken: dict[LoaderFacts, tuple[int, ...]], count: int) -> Proposal:
    fewer = {loader: sizes for loader, sizes in taken.items() if loader.num_workers > count}
    sizes = [size for each in fewer.values() for size in each]
    # Of what is there, the share of the workers that are told to go: one that was killed is not counted again.
    saves = sum(sum(each) * (loader.num_workers - count) // loader.num_workers for loader, each in fewer.items())
    reasons = [_why_not(loader, count) for loader in fewer]
    effect, caveat = _loader_memory.effect_of(reasons)
    return Proposal(
        dose=Dose.of(num_workers=count, loaders=_loader_memory.named(fewer)),
        effect=effect,
        saves=saves,
        slowdown=_SLOWER if count else _WITHOUT,
        basis=f"estimate: {len(sizes)} workers were measured to take {format_size(sum(sizes))} for themselves",
        caveat=caveat,
    )


def _why_not(loader: LoaderFacts, count: int) -> str | None:
    if (why := _loader_memory.why_not_same(loader, moves_samples=True)) is not None or count:
        return why
    if not loader.collates:
        return f"batches of `{loader.path}` are put together in a way of their own, and may share memory with the data"
    if loader.shuffles and not loader.looped:
        return f"`{loader.path}` draws the seed of its order at its first batch and no longer when it is iterated over"
    return None


patch = partial(_loader_source.patch, "num_workers")
apply = partial(_loader_source.apply, "num_workers")

FIX: Final = Fix(
    id="fewer_workers",
    title="Load data with fewer worker processes",
    effect=Effect.EXACT,
    cost="steps may wait for their data",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
