"""Lets the workers of a loader end with each of its epochs.

``persistent_workers=True`` keeps them, with the batches that they hold and the pages that they have copied, while other
loaders are in use: training and validation together have twice the workers. Without it only the workers of the loader
at hand are there.

It does not give the same numbers. A loader whose workers begin anew draws a seed for them in each epoch, which one with
persistent workers draws in the first epoch alone; from the second on, every later draw of the program is another one,
the order of the samples among them.
Source: torch/utils/data/dataloader.py: ``_BaseDataLoaderIter.__init__`` draws ``_base_seed``, ``_reset`` does not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from oomdoctor.fixes import _host_room, _loader_memory, _loader_source
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Proposal
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident

__all__ = ["FIX", "apply", "patch", "propose"]

_SLOWER: Final = 1.1
"""Time of an epoch whose workers are started for it, as a ratio. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where workers of several loaders are there at once."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    used = _loader_memory.in_use(evidence)
    if isinstance(used, Refused):
        return used
    kept = [loader for loader in used if loader.persistent]
    if not kept:
        return Refused("no loader keeps its workers between epochs")
    taken = sorted(sum(_loader_memory.uss(evidence, loader, alone=False)) for loader in kept)
    idle = sum(taken[:-1])
    if not idle:
        return Refused("the workers of one loader alone were found, and during its epoch they are there in any case")
    return (
        Proposal(
            dose=Dose.of(loaders=_loader_memory.named(kept)),
            effect=Effect.CHANGES_RESULT,
            saves=idle,
            slowdown=_SLOWER,
            basis=f"estimate: workers of {len(kept)} loaders were measured to take {format_size(sum(taken))}, "
            "of which one loader's remain",
            caveat="from the second epoch on, each loader draws a seed for its new workers, so that the order of the "
            "samples and all other random numbers are others",
        ),
    )


patch = partial(_loader_source.patch, "persistent_workers")
apply = partial(_loader_source.apply, "persistent_workers")

FIX: Final = Fix(
    id="persistent_workers_off",
    title="Let workers end with each epoch of their loader",
    effect=Effect.CHANGES_RESULT,
    cost="workers are started for every epoch",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
