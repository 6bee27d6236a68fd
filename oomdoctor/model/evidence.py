"""What was found at one moment: the memory, who held it, and the code."""

from __future__ import annotations

from dataclasses import dataclass

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.memory import Census, DeviceMemory, HostHolding, HostMemory, JittorMemory, ModuleMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was found at one moment, the device in question first.

    Attributes:
        devices: every device in use, and the host's memory as a device where tensors live on it.
        censuses: who holds what, one for each of ``devices``, in their order.
        beside_tensors: the names that lead to most of this process's memory that is no tensor's, the largest first.
        modules: what the forward of each module keeps, where a dry run has told it.
        jittor: what Jittor holds, None where the program has not loaded it.
    """

    devices: tuple[DeviceMemory, ...]
    host: HostMemory
    censuses: tuple[Census, ...]
    code: CodeFacts
    beside_tensors: tuple[HostHolding, ...] = ()
    modules: tuple[ModuleMemory, ...] = ()
    jittor: JittorMemory | None = None

    @property
    def device(self) -> DeviceMemory:
        """The device in question: the one that ran out, or that was asked about."""
        return self.devices[0]

    @property
    def census(self) -> Census:
        """Who holds what on the device in question."""
        return self.censuses[0]

    def census_of(self, device: str) -> Census | None:
        """Return who holds what on the device of this name, None where it was not searched."""
        return next((census for census in self.censuses if census.device == device), None)
