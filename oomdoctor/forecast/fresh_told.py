"""What a process that was started anew is told of the one that asks: plain data, which stands for live objects.

It stands alone, without torch, because the asking process must not load it for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomdoctor.allocator.settings import AllocatorSettings
    from oomdoctor.model.memory import DeviceMemory, Role
    from oomdoctor.sandbox.card import Card

__all__ = ["Described", "Parcel", "Surroundings", "Told"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An accelerator as it stood when it was asked, in the place of the one that it is.

    Attributes:
        memory: its last reading.
        settings: those of its caching allocator, None where they could not be read or are those of the environment.
    """

    name: str
    measure: str
    memory: DeviceMemory
    settings: AllocatorSettings | None = None

    def read(self) -> DeviceMemory:
        """Return the memory as it stood."""
        return self.memory

    def holds(self, tensor: Any) -> bool:
        """Return False: no tensor of another process has memory of that device."""
        del tensor
        return False

    def reset_peak(self) -> None:
        """Do nothing: the device is another process's."""

    def empty_cache(self) -> None:
        """Do nothing: the device is another process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The memory behind tensors.

    Attributes:
        nbytes: its size.
        device: where it lies.
        data: what is in it, None where that stays behind.
    """

    nbytes: int
    device: str
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a forked process inherits beside the namespace, and a fresh one has to be told.

    Attributes:
        argv: of the program.
        is_main: whether the namespace is that of ``__main__``.
        flags: those of the shell's compiler, for what earlier cells took from ``__future__``.
        sources: of functions that no file holds: the entries of ``linecache`` by name.
        random: states of the generators of Python, numpy and torch; None for one that is not loaded.
        torch: threads, default dtype, whether gradients are on; None where torch is not loaded.
        calibration: what is applied to forecasts.
    """

    argv: tuple[str, ...]
    is_main: bool
    flags: int
    sources: dict[str, Any]
    random: tuple[Any, Any, bytes | None]
    torch: tuple[int, str, bool] | None
    calibration: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """All that a fresh process is sent.

    Attributes:
        job: pickle of the session without its namespace, what brings its start back, and the work; where ``way`` is
            told, an attempt in its place.
        names: pickle of the namespace.
        storages: what is alive, in the order in which a survey of the asking process has found it.
        roles: what storages are there for, by their number.
        pinned: numbers of storages that something leads to which was not sent.
        graphs: numbers of the storages that the graph of a tensor keeps, by the number of the graph.
        way: which answer to give to what nobody knows, in a process that runs one shadow; None in a nursery.
        budget, cached, timeout_s, workers, card: see ``Shadows``.
    """

    job: bytes
    names: bytes
    storages: tuple[Described, ...]
    roles: tuple[tuple[int, Role], ...]
    pinned: tuple[int, ...]
    graphs: tuple[tuple[int, ...], ...]
    surroundings: Surroundings
    budget: int | None
    cached: bool
    timeout_s: float
    workers: int
    card: Card | None
    way: bool | None = None
