"""Fetches fewer batches ahead.

Every worker keeps ``prefetch_factor`` batches ready, in shared memory or on the way there, so that
``num_workers * prefetch_factor`` of them wait at any time. With fewer, the same workers make the same batches in the
same order, only later. How much a batch takes is told by the census; batches that differ much in size are judged by it.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
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

_SLOWER: Final = 1.1
"""Time of a step with fewer batches ready, as a ratio. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose a half of the batches ahead, a half of those, and so on to one for each worker."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    used = _loader_memory.in_use(evidence)
    if isinstance(used, Refused):
        return used
    loaders = [loader for loader in used if (loader.prefetch or 0) > 1]
    if not loaders:
        return Refused(f"the workers of `{used[0].path}` fetch no more than one batch ahead each")
    batch = _loader_memory.batch_bytes(evidence)
    if not batch:
        return Refused("the census found no batch, so what those that wait take is not known")
    return tuple(_proposal(loaders, batch, ahead) for ahead in _halves(max(one.prefetch or 0 for one in loaders)))


def _halves(most: int) -> list[int]:
    halves = []
    while most > 1:
        most //= 2
        halves.append(most)
    return halves


def _proposal(loaders: list[LoaderFacts], batch: int, ahead: int) -> Proposal:
    fewer = [loader for loader in loaders if (loader.prefetch or 0) > ahead]
    waiting = sum(loader.num_workers * ((loader.prefetch or 0) - ahead) for loader in fewer)
    effect, caveat = _loader_memory.effect_of(
        _loader_memory.why_not_same(loader, moves_samples=False) for loader in fewer
    )
    return Proposal(
        dose=Dose.of(prefetch_factor=ahead, loaders=_loader_memory.named(fewer)),
        effect=effect,
        saves=waiting * batch,
        slowdown=_SLOWER,
        basis=f"analytic estimate: {waiting} batches fewer wait, of {format_size(batch)} each by the census",
        caveat=caveat,
    )


patch = partial(_loader_source.patch, "prefetch_factor")
apply = partial(_loader_source.apply, "prefetch_factor")

FIX: Final = Fix(
    id="prefetch",
    title="Fetch fewer batches ahead",
    effect=Effect.EXACT,
    cost="steps may wait for their data",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
