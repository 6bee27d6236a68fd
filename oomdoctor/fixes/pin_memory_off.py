"""Leaves batches in ordinary host memory instead of page-locking a copy of each.

Pinned memory cannot be swapped out, the driver allows a share of the machine's memory only, and torch keeps what it has
pinned once, rounded up to a power of two. Batches are the same bit for bit without it: pinning copies them after they
were put together. What is lost is speed: a copy to the device is then made by way of a buffer of the driver's.

Only what loaders pin is left unpinned; a ``pin_memory()`` of the cells' own is not touched.
Source: https://docs.pytorch.org/docs/stable/data.html#memory-pinning
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _host_room, _loader_memory, _loader_source
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Proposal
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    pass

__all__ = ["FIX", "apply", "patch", "propose"]

_SLOWER: Final = 1.1
"""Time of a step with batches copied from pageable memory, as a ratio. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the census found pinned memory, or pinning is what was refused."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    loaders = [loader for loader in evidence.code.loaders if loader.pin_memory]
    if not loaders:
        return Refused("no loader that the notebook has a name for pins its batches")
    pinned = sum(census.bytes_of(Role.PINNED_HOST) for census in evidence.censuses)
    asked = (incident.requested or 0) if incident.family is Family.PINNED else 0
    if not pinned + asked:
        return Refused("the census found no pinned memory, and no size is known of what was to be pinned")
    # What is pinned does not depend on who makes the samples, nor when: only workers that stay matter.
    effect, caveat = _loader_memory.effect_of(
        _loader_memory.why_not_same(loader, moves_samples=False, moves_order=False)
        for loader in loaders
        if loader.persistent and loader.num_workers
    )
    found = [f"{format_size(pinned)} of pinned memory were found"] if pinned else []
    found += [f"{format_size(asked)} more were to be pinned"] if asked else []
    return (
        Proposal(
            dose=Dose.of(loaders=_loader_memory.named(loaders)),
            effect=effect,
            saves=pinned + asked,
            slowdown=_SLOWER,
            basis=f"estimate: {' and '.join(found)}",
            caveat=caveat,
        ),
    )


patch = partial(_loader_source.patch, "pin_memory")
apply = partial(_loader_source.apply, "pin_memory")

FIX: Final = Fix(
    id="pin_memory_off",
    title="Leave batches in pageable host memory",
    effect=Effect.EXACT,
    cost="slower copies of batches to the device",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
