"""Whether it is the host's memory that ran out, and whether it can take what a fix would move there."""

from __future__ import annotations

from typing import Final

from oomdoctor.fixes._unfit import Unfit
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import DeviceMemory, HostMemory
from oomdoctor.model.sizes import format_size

_FAMILIES: Final = frozenset(
    {
        *(Family.HOST, Family.NUMPY, Family.PINNED, Family.FORK, Family.SHM),
        *(Family.WORKER_KILLED, Family.RANK_KILLED, Family.KERNEL_KILLED),
    }
)


def check_host(incident: Incident) -> None:
    """Raise ``Unfit`` where memory of the host is not what is missing."""
    if incident.family not in _FAMILIES and incident.device != "cpu":
        raise Unfit("a device ran out of memory, and this saves memory of the host alone")


def refuse(evidence: Evidence, size: int) -> Refused | None:
    """Return why ``size`` bytes of the device in question cannot go to host memory, None if they can."""
    if (why := _same_memory(evidence.device)) is not None:
        return Refused(why)
    room = _room(evidence.host)
    if room is not None and room < size:
        return Refused(f"host memory has {format_size(room)} left, and {format_size(size)} would have to go there")
    return None


def _same_memory(device: DeviceMemory) -> str | None:
    if device.tensor_device != "cpu":
        return None
    if device.simulated:
        return "the virtual accelerator counts host memory: moving tensors there frees nothing on this machine"
    return "the tensors are in host memory already"


def _room(host: HostMemory) -> int | None:
    """Return what is left on the host, by the strictest count that could be read."""
    pairs = ((host.cgroup_limit, host.cgroup_used), (host.process_limit, host.process_used))
    left = [limit - used for limit, used in pairs if isinstance(limit, int) and isinstance(used, int)]
    left += [host.available] if isinstance(host.available, int) else []
    return max(min(left), 0) if left else None
