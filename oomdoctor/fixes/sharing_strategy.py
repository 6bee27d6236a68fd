"""Hands tensors between processes by file name instead of by file descriptor.

With the strategy ``file_descriptor`` every tensor that came from a worker keeps a descriptor open for as long as it
lives; a loop that keeps batches, or samples of many small tensors, uses up the thousand or so that a process may have.
With ``file_system`` tensors are found by their name, and no descriptor stays. The values are the same.

It is no help where /dev/shm is too small: both strategies keep the tensors there, as its name or without one. Limits:
if a process is killed, files may stay in /dev/shm until torch's own manager removes them.
Source: https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.fixes import _host_room
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "apply", "patch", "propose"]

_BY_NAME: Final = "file_system"
_NEAR: Final = 0.8
"""Share of the descriptors from which on they count as used up, as in the rule ``descriptor_limit_near``."""

_TOLD: Final = re.compile(r"too many open files|received \d+ items of ancdata|set_sharing_strategy", re.IGNORECASE)
"""Source: torch/utils/data/dataloader.py; multiprocessing/reduction.py."""

_SETS: Final = re.compile(r"\bset_sharing_strategy\s*\(")


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where descriptors are what ran out."""
    if (refused := _host_room.refuse_device(incident)) is not None:
        return refused
    if evidence.code.sharing_strategy is None:
        return Refused("no tensors are handed between processes here")
    if evidence.code.sharing_strategy == _BY_NAME:
        return Refused("tensors are handed between processes by file name already")
    basis = _basis(incident, evidence)
    if basis is None:
        return Refused("descriptors did not run out, and what is short in /dev/shm is so with either sharing strategy")
    if any(loader.spawns and loader.num_workers for loader in evidence.code.loaders):
        return Refused("workers that are spawned begin with the strategy of the platform, whatever is set here")
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.EXACT,
            saves=0,
            slowdown=1.0,
            basis=basis,
            caveat="it frees descriptors and no memory; a worker that is killed may leave files in /dev/shm",
        ),
    )


def _basis(incident: Incident, evidence: Evidence) -> str | None:
    """Return how it is known that descriptors ran out, None where it is not."""
    opened, limit = evidence.host.files_open, evidence.host.files_limit
    if isinstance(opened, int) and isinstance(limit, int) and opened >= _NEAR * limit:
        return f"{opened} of {limit} file descriptors are open in this process"
    told = _TOLD.search(incident.message)
    return None if told is None else f"the message says `{told[0]}`"


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the failing cell with the strategy set before all else."""
    del evidence, dose
    cell = cells.failing
    sets = next((one for one in cells.history if _SETS.search(one.source)), None)
    if sets is not None:
        return Refused(f"{sets} sets the sharing strategy itself")
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    lines = [] if import_lines.knows_torch(cells) else ["import torch"]
    lines.append(f'torch.multiprocessing.set_sharing_strategy("{_BY_NAME}")')
    return rewriting.join(
        cells, [rewriting.edit(cells, cell, parsed, import_lines.insert_at_top(parsed, parsed.module, lines))]
    )


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Hand tensors over by name while the context lasts."""
    import torch

    del session, dose
    multiprocessing: Any = torch.multiprocessing
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy(_BY_NAME)
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


FIX: Final = Fix(
    id="sharing_strategy",
    title="Hand tensors between processes by file name",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=apply,
    patch=patch,
    is_tried=False,
)
