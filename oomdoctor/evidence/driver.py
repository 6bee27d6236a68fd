"""NVIDIA cards as their driver tells them: the card, its memory, every process on it, and who of them is this one.

The driver sees what torch cannot: other processes, and what this one uses beside torch's segments. AMD's and Intel's
cards are not told here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from oomdoctor.model.memory import DeviceProcess, Measured
from oomdoctor.model.sizes import GIB
from oomdoctor.model.unavailable import Unavailable

_WORDS: Final = {
    "LibraryNotFound": "this machine has no NVIDIA driver",
    "DriverNotLoaded": "the NVIDIA driver is installed but not loaded",
    "LibRmVersionMismatch": "the NVIDIA driver was updated while its old kernel module is still loaded: restart the "
    "machine (or the container)",
    "NotSupported": "the NVIDIA driver does not tell this of this card",
    "NoPermission": "the NVIDIA driver does not tell this to this user",
    "FunctionNotFound": "the NVIDIA driver is too old to tell this",
    "ArgumentVersionMismatch": "the NVIDIA driver is too old to tell this",
    "Deprecated": "the NVIDIA driver is too new for this version of nvidia-ml-py",
    "GpuIsLost": "the card was lost: the driver cannot reach it until the machine restarts",
    "ResetRequired": "the card must be reset before it can be used",
    "OperatingSystem": "the operating system, or the container, blocks the question to the NVIDIA driver",
    "Uninitialized": "NVML was shut down by another part of this process",
}
"""What pynvml's errors mean for the reader where their names alone do not tell it.

Source: ``nvmlReturn_t`` in the NVML API reference.
"""


@contextmanager
def _opened() -> Iterator[Any]:
    """Lend ``pynvml``, initialised, or why it cannot be had."""
    try:
        import pynvml
    except ImportError:
        yield Unavailable("the Python package nvidia-ml-py is not installed")
        return
    started = ask(pynvml, "nvmlInit")
    if isinstance(started, Unavailable):
        yield started
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def ask(nvml: Any, function: str, *args: Any, **options: Any) -> Any:
    """Return what a function of ``pynvml`` answers, or ``Unavailable`` with what it refused for."""
    misfit = getattr(nvml, "NVMLLibraryMismatchError", AttributeError)  # nvidia-ml-py 12 has it not everywhere
    try:
        return getattr(nvml, function)(*args, **options)
    except nvml.NVMLError as error:
        kind = type(error).__name__.removeprefix("NVMLError_")
        words = re.sub(r"(?<!^)(?=[A-Z])", " ", kind).lower()  # ``FreqNotSupported`` as ``freq not supported``
        return Unavailable(_WORDS.get(kind, f"the NVIDIA driver refused ({words})"))
    except (misfit, AttributeError):
        return Unavailable("the NVIDIA driver and the installed nvidia-ml-py do not fit together")
    except UnicodeDecodeError:
        return Unavailable("the NVIDIA driver answered in bytes that are no text")


_LISTS: Final = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # Source: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, or one part of a card that is divided (MIG), in bytes.

    Attributes:
        uuid: ``GPU-…`` or ``MIG-…``; ``label``: its name with the version of the driver.
        used: what all processes use; memory that the driver keeps for itself is left out where it tells it apart.
        processes: the largest first; none is marked as this process's own.
    """

    uuid: str | Unavailable
    label: str | Unavailable
    total: Measured
    free: Measured
    used: Measured
    processes: tuple[DeviceProcess, ...] | Unavailable


def card(uuid: str) -> Card | Unavailable:
    """Return the card of this UUID, given as torch prints it (without ``GPU-``), or why it cannot be told."""
    with _opened() as nvml:
        handle = nvml if isinstance(nvml, Unavailable) else _handle_of(nvml, uuid)
        return handle if isinstance(handle, Unavailable) else _card(nvml, handle)


def visible_cards() -> tuple[tuple[int | None, Card], ...] | Unavailable:
    """Return the cards that CUDA would show to this process, each with the index that CUDA would give it.

    The index is None where it cannot be told without starting CUDA: unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``,
    CUDA puts the fastest card first and says not how it ranks the others; of a divided card it takes one part.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    with _opened() as nvml:
        count = nvml if isinstance(nvml, Unavailable) else ask(nvml, "nvmlDeviceGetCount")
        if isinstance(count, Unavailable):
            return count
        return tuple((index, _card(nvml, handle)) for index, handle in _visible_handles(nvml, count))


def _handle_of(nvml: Any, uuid: str) -> Any:
    """Return the handle of the card, or of the part of it that this process uses."""
    part = ask(nvml, "nvmlDeviceGetHandleByUUID", f"MIG-{uuid}")
    if not isinstance(part, Unavailable):
        return part
    whole = ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    parts = [] if isinstance(whole, Unavailable) else _parts(nvml, whole)
    if not parts:
        return whole
    # CUDA may give a part the UUID of the whole card; the environment then tells which part it is.
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if wanted.startswith("MIG-") and "," not in wanted:
        parts = [part for part in parts if _is_named(nvml, part, wanted)] or [
            ask(nvml, "nvmlDeviceGetHandleByUUID", wanted)
        ]
    if len(parts) == 1:
        return parts[0]
    return Unavailable("the card is divided (MIG), and which part this process uses cannot be told")


def _visible_handles(nvml: Any, count: int) -> Iterator[tuple[int | None, Any]]:
    """Yield the cards that ``CUDA_VISIBLE_DEVICES`` leaves, and for a divided one its parts."""
    wholes = [ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    devices: list[tuple[int, Any]] = []
    for index, whole in enumerate(wholes):
        if not isinstance(whole, Unavailable):
            devices += [(index, device) for device in _parts(nvml, whole) or [whole]]
    in_order = len(devices) == count and _in_order(nvml, wholes)
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        yield from ((index if in_order else None, device) for index, device in devices)
        return
    for place, entry in enumerate(map(str.strip, wanted.split(","))):
        found = [device for index, device in devices if entry == str(index) or _is_named(nvml, device, entry)]
        if not found:  # CUDA goes no further than the first entry that it does not know
            return
        certain = len(found) == 1 and (in_order or not entry.isdigit())
        yield from ((place if certain else None, device) for device in found)


def _in_order(nvml: Any, handles: list[Any]) -> bool:
    """Return whether CUDA counts the cards as the driver does, by their place on the bus."""
    alike = len({ask(nvml, "nvmlDeviceGetName", handle) for handle in handles}) == 1
    return alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _is_named(nvml: Any, handle: Any, entry: str) -> bool:
    """Return whether an entry of ``CUDA_VISIBLE_DEVICES`` is the UUID of this device or begins it."""
    uuid = ask(nvml, "nvmlDeviceGetUUID", handle)
    return isinstance(uuid, str) and entry.startswith(("GPU-", "MIG-")) and uuid.startswith(entry)


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """Return the handles of the parts of a card that is divided; none where it is whole."""
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if isinstance(mode, Unavailable) or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    count = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)
    places = range(0 if isinstance(count, Unavailable) else count)
    parts = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place) for place in places]
    return [part for part in parts if not isinstance(part, Unavailable)]


def _card(nvml: Any, handle: Any) -> Card:
    memory = _memory(nvml, handle)
    name, version = ask(nvml, "nvmlDeviceGetName", handle), ask(nvml, "nvmlSystemGetDriverVersion")
    told = isinstance(name, str) and isinstance(version, str)
    unknown = isinstance(memory, Unavailable)
    return Card(
        uuid=ask(nvml, "nvmlDeviceGetUUID", handle),
        label=f"{name}, driver {version}" if told else name,
        total=memory if unknown else int(memory.total),
        free=memory if unknown else int(memory.free),
        used=memory if unknown else int(memory.used),
        processes=_processes(nvml, handle),
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Return the totals; only the second version of the question (driver 510) leaves out the driver's own share."""
    newer = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=nvml.nvmlMemory_v2)
    return ask(nvml, "nvmlDeviceGetMemoryInfo", handle) if isinstance(newer, Unavailable) else newer


def _processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...] | Unavailable:
    """Return who uses the card; a process that computes and draws stands in two lists and is told once."""
    compute, *further = (ask(nvml, name, handle) for name in _LISTS)
    if isinstance(compute, Unavailable):
        return compute
    sizes: dict[int, Measured] = {}
    for entry in [*compute, *(entry for found in further if not isinstance(found, Unavailable) for entry in found)]:
        seen, size = sizes.get(entry.pid), _size(entry.usedGpuMemory)
        if not isinstance(seen, int) or (isinstance(size, int) and size > seen):
            sizes[entry.pid] = size
    found = [DeviceProcess(pid=pid, bytes=size, name=_program(nvml, pid)) for pid, size in sizes.items()]
    return tuple(
        sorted(found, key=lambda process: process.bytes if isinstance(process.bytes, int) else -1, reverse=True)
    )


def _size(used: int | None) -> Measured:
    if used is None:
        return Unavailable("the driver tells no memory per process here, as always under Windows and WSL")
    if used == 0:  # seen in containers: https://github.com/Project-HAMi/HAMi-core/issues/112
        return Unavailable("the driver counts no memory for this process, which cannot be, as it is on the card")
    return used


def _program(nvml: Any, pid: int) -> str | None:
    """Return the name of a process's program; the system's own list serves where the driver tells none."""
    name = ask(nvml, "nvmlSystemGetProcessName", pid)
    if isinstance(name, Unavailable) or not name.strip():
        if not pids_agree():
            return None
        try:
            return psutil.Process(pid).name()
        except psutil.Error:
            return None
    return re.split(r"[\\/]", name.strip())[-1]


def pids_agree() -> bool:
    """Return whether this process counts process ids as the driver does: it is in no PID namespace of its own.

    Some drivers tell a container its own ids, some the host's: https://github.com/NVIDIA/nvidia-docker/issues/1483
    """
    if os.name == "nt":
        return True
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


_MOST_CONTEXT_BYTES: Final = GIB * 3 // 2
"""What a process with torch uses beside its segments, at most.

Source: CUDA's own out-of-memory messages in public reports, where one process had the card to itself: total - free -
reserved is 0.3 to 1.5 GiB.
"""


class Shares(NamedTuple):
    """What ``DeviceMemory`` says of the same names."""

    processes: tuple[DeviceProcess, ...] | Unavailable
    context: Measured
    elsewhere: Measured


def shares(card: Card | Unavailable, reserved: Measured, *, in_use: bool = True) -> Shares:
    """Share out a card's memory between this process, whose allocator holds ``reserved``, and the others.

    ``in_use``: torch has a context there; else this process is taken to use what the driver lists for it, or nothing.
    """
    if isinstance(card, Unavailable):
        return Shares(processes=card, context=card, elsewhere=card)
    agree = pids_agree()
    processes = card.processes
    if not isinstance(processes, Unavailable):
        processes = _with_own(processes, reserved, agree)
    own = _own_bytes(processes, in_use)
    elsewhere = _elsewhere(card, processes, own, agree)
    return Shares(processes=processes, context=_context(own, reserved), elsewhere=elsewhere)


def _with_own(processes: tuple[DeviceProcess, ...], reserved: Measured, agree: bool) -> tuple[DeviceProcess, ...]:
    """Mark this process: by its id where the driver counts as it does, else by a size that can be no other's."""
    own = next((process for process in processes if process.pid == os.getpid()), None)
    basis = "by its process id"
    if own is not None and not agree and isinstance(own.bytes, int) and isinstance(reserved, int):
        own = own if own.bytes >= reserved else None  # else another container's process, by chance of the same number
    if own is None and not agree:
        fitting = [process for process in processes if _has_size_of(process, reserved)]
        own = fitting[0] if len(fitting) == 1 else None
        basis = "by its size alone: it is what this process holds and a CUDA context"
    return tuple(replace(process, is_own=True, basis=basis) if process is own else process for process in processes)


def _has_size_of(process: DeviceProcess, reserved: Measured) -> bool:
    if not isinstance(process.bytes, int) or not isinstance(reserved, int) or not reserved:
        return False
    return reserved <= process.bytes <= reserved + _MOST_CONTEXT_BYTES


def _own_bytes(processes: tuple[DeviceProcess, ...] | Unavailable, in_use: bool) -> Measured:
    """Return what the driver counts for this process."""
    listed = () if isinstance(processes, Unavailable) else processes
    own = next((process for process in listed if process.is_own), None)
    if own is not None:
        return own.bytes
    if not in_use:
        return 0
    if isinstance(processes, Unavailable):
        return processes
    if not processes:
        return Unavailable("the driver lists no process on this device, not even this one")
    return Unavailable("the driver numbers processes in its own way here, and none can be told to be this one")


def _context(own: Measured, reserved: Measured) -> Measured:
    if isinstance(own, Unavailable) or isinstance(reserved, Unavailable):
        return own if isinstance(own, Unavailable) else reserved
    if own < reserved:
        return Unavailable("the driver counts less for this process than its allocator holds")
    return own - reserved


def _elsewhere(card: Card, processes: tuple[DeviceProcess, ...] | Unavailable, own: Measured, agree: bool) -> Measured:
    """Return what others use: what their processes do, else all that is used less what this one does.

    From inside a container the list may lack the processes of others, so that there the totals are taken.
    """
    if isinstance(own, Unavailable):
        return own
    others = [] if isinstance(processes, Unavailable) else [process for process in processes if not process.is_own]
    known = [process.bytes for process in others if isinstance(process.bytes, int)]
    if agree and len(known) == len(others):
        return sum(known)
    return card.used if isinstance(card.used, Unavailable) else max(card.used - own, 0)
