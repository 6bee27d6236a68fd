"""Whether it is the host's memory that ran out, where that is all that a fix saves."""

from __future__ import annotations

from typing import Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.incident import Family, Incident

__all__ = ["refuse"]

_FAMILIES: Final = frozenset(
    {
        *(Family.HOST, Family.NUMPY, Family.PINNED, Family.FORK, Family.SHM),
        *(Family.WORKER_KILLED, Family.RANK_KILLED, Family.KERNEL_KILLED),
    }
)


def refuse(incident: Incident) -> Refused | None:
    """Return why memory of the host is not what is missing, None where it may be."""
    if incident.family in _FAMILIES or incident.device == "cpu":
        return None
    return Refused("a device ran out of memory, and this saves memory of the host alone")
