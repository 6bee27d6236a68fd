"""A fake NVML: cards, processes and refusals of the NVIDIA driver, on a machine without any.

The C library below ``pynvml`` is replaced and not ``pynvml`` itself: its own wrappers run, raise their own exceptions
and return their own structures, and what the fake does not know is refused as by a driver too old for it. Memory,
names, processes and MIG are played; clocks, power and temperatures are not.
"""

# ruff: noqa: N802 - the library's functions go by their names in C

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

_NO_INSTANCE: Final = 0xFFFFFFFF  # of a process that is in no part of a divided card


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeProcess:
    """A process on a card.

    Attributes:
        bytes: None where the driver does not tell, as under Windows.
        name: path of its program, None where the driver does not know the process.
        kind: in which of the driver's lists it stands.
    """

    pid: int
    bytes: int | None
    name: str | None = "python"
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """A card, or a part of a divided one.

    Attributes:
        uuid: ``GPU-…``, or ``MIG-…`` of a part.
        total: bytes; of them ``kept_by_driver`` are the driver's own.
        used: bytes used by processes; their sum where None.
        mig: parts that the card is divided into, empty where it could be, None where it cannot.
        errors: what a function refuses for this card, by the names of NVML:
            ``{"nvmlDeviceGetMemoryInfo": "NVML_ERROR_GPU_IS_LOST"}``.
    """

    name: str = "NVIDIA A100-SXM4-40GB"
    uuid: str = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    total: int = 40 << 30
    kept_by_driver: int = 512 << 20
    used: int | None = None
    processes: tuple[FakeProcess, ...] = ()
    mig: tuple[FakeGpu, ...] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)

    def listed(self) -> tuple[FakeProcess, ...]:
        """Return the processes on the card and on its parts."""
        return (*self.processes, *(process for part in self.mig or () for process in part.listed()))

    def in_use(self) -> int:
        """Return the bytes that processes use."""
        return sum(process.bytes or 0 for process in self.listed()) if self.used is None else self.used


@contextmanager
def fake_nvml(*gpus: FakeGpu, driver: str = "570.86.15", errors: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let this process see these cards through ``pynvml``, in this order, and no others.

    For tests of what a program does with what the driver tells it::

        with fake_nvml(FakeGpu(total=24 << 30, processes=(FakeProcess(pid=4711, bytes=20 << 30),))):
            ...
        with fake_nvml(errors={"nvmlInit": "NVML_ERROR_LIBRARY_NOT_FOUND"}):  # a machine without a driver
            ...

    Args:
        driver: version of the driver.
        errors: what a function refuses for every card, by the names of NVML.

    CUDA itself sees none of it: ``torch.cuda`` goes on as before.
    """
    import pynvml

    known = pynvml._nvmlGetFunctionPointer_cache
    before = pynvml.nvmlLib, dict(known), pynvml._nvmlLib_refcount
    pynvml.nvmlLib, pynvml._nvmlLib_refcount = _Library(pynvml, gpus, driver, errors or {}), 0
    known.clear()
    try:
        yield
    finally:
        known.clear()
        pynvml.nvmlLib, functions, pynvml._nvmlLib_refcount = before
        known.update(functions)


@contextmanager
def recorded_nvml(path: Path) -> Iterator[None]:
    """Play a recording: a JSON file whose fields are the arguments of ``fake_nvml`` (``gpus``, ``driver``, ``errors``).

    A field ``source`` says where the figures come from.
    """
    recording = json.loads(path.read_text(encoding="utf-8"))
    gpus = [_gpu(fields) for fields in recording["gpus"]]
    with fake_nvml(*gpus, driver=recording["driver"], errors=recording.get("errors", {})):
        yield


def _gpu(fields: dict[str, Any]) -> FakeGpu:
    processes = tuple(FakeProcess(**process) for process in fields.pop("processes", ()))
    parts = fields.pop("mig", None)
    return FakeGpu(**fields, processes=processes, mig=None if parts is None else tuple(map(_gpu, parts)))


class _Refusal(Exception):
    """The name of an error of NVML."""


class _Library:
    """The functions of libnvidia-ml by their names in C, each of which does its work or refuses it."""

    def __init__(self, nvml: Any, gpus: tuple[FakeGpu, ...], driver: str, errors: Mapping[str, str]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._devices = [device for gpu in gpus for device in (gpu, *(gpu.mig or ()))]
        self._driver = driver
        self._errors = errors
        self._opened = 0
        for name, function in vars(type(self)).items():
            if name.startswith("nvml"):
                setattr(self, name, self._played(name, function))

    def _played(self, name: str, function: Callable[..., bytes | None]) -> Callable[..., Any]:
        """Return a function that refuses what it shall refuse, and what comes before ``nvmlInit``."""
        called = re.sub(r"(_v\d+|WithFlags)$", "", name)

        def play(*args: Any) -> Any:
            about = self._device(args[0]) if args and isinstance(args[0], self._nvml.c_nvmlDevice_t) else None
            refused = self._errors.get(called) or (about.errors.get(called) if about is not None else None)
            try:
                if refused is not None:
                    raise _Refusal(refused)
                if not self._opened and called not in ("nvmlInit", "nvmlErrorString"):
                    raise _Refusal("NVML_ERROR_UNINITIALIZED")
                answer = function(self, *args)
            except _Refusal as refusal:
                return int(getattr(self._nvml, str(refusal)))
            return int(self._nvml.NVML_SUCCESS) if answer is None else answer

        return play

    def _device(self, handle: Any) -> FakeGpu:
        return self._devices[ctypes.cast(handle, ctypes.c_void_p).value - 1]  # type: ignore[operator]

    def _hand_out(self, found: FakeGpu | None, reference: Any) -> None:
        """Write the handle of a device: its place among all, counted from one."""
        if found is None:
            raise _Refusal("NVML_ERROR_NOT_FOUND")
        number = next(place for place, device in enumerate(self._devices, 1) if device is found)
        ctypes.cast(ctypes.pointer(reference._obj), ctypes.POINTER(ctypes.c_void_p))[0] = number

    def nvmlInitWithFlags(self, flags: int) -> None:
        self._opened += 1

    def nvmlShutdown(self) -> None:
        self._opened -= 1

    def nvmlErrorString(self, code: int) -> bytes:
        return f"error {code} of the fake NVML".encode()

    def nvmlSystemGetDriverVersion(self, text: Any, room: Any) -> None:
        text.value = self._driver.encode()

    def nvmlSystemGetProcessName(self, pid: Any, text: Any, room: Any) -> None:
        names = [process.name for gpu in self._gpus for process in gpu.listed() if process.pid == pid.value]
        name = next((name for name in names if name is not None), None)
        if name is None:
            raise _Refusal("NVML_ERROR_NOT_FOUND")
        text.value = name.encode()

    def nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self._gpus)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> None:
        if index.value >= len(self._gpus):
            raise _Refusal("NVML_ERROR_INVALID_ARGUMENT")
        self._hand_out(self._gpus[index.value], device)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> None:
        wanted = uuid.value.decode()
        self._hand_out(next((found for found in self._devices if found.uuid == wanted), None), device)

    def nvmlDeviceGetName(self, handle: Any, text: Any, room: Any) -> None:
        text.value = self._device(handle).name.encode()

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, room: Any) -> None:
        text.value = self._device(handle).uuid.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        gpu = self._device(handle)
        memory._obj.total, memory._obj.used = gpu.total, gpu.in_use() + gpu.kept_by_driver
        memory._obj.free = max(gpu.total - memory._obj.used, 0)

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> None:
        self.nvmlDeviceGetMemoryInfo(handle, memory)
        memory._obj.reserved = self._device(handle).kept_by_driver
        memory._obj.used -= memory._obj.reserved

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, room: Any) -> None:
        self._list("compute", handle, count, room)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, room: Any) -> None:
        self._list("graphics", handle, count, room)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, room: Any) -> None:
        self._list("mps", handle, count, room)

    def _list(self, kind: str, handle: Any, count: Any, room: Any) -> None:
        found = [process for process in self._device(handle).listed() if process.kind == kind]
        offered, count._obj.value = count._obj.value, len(found)
        if offered < len(found):
            raise _Refusal("NVML_ERROR_INSUFFICIENT_SIZE")
        for place, process in enumerate(found):
            unknown = self._nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
            room[place].pid = process.pid
            room[place].usedGpuMemory = unknown if process.bytes is None else process.bytes
            room[place].gpuInstanceId = room[place].computeInstanceId = _NO_INSTANCE

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        parts = self._device(handle).mig
        if parts is None:
            raise _Refusal("NVML_ERROR_NOT_SUPPORTED")
        current._obj.value = pending._obj.value = int(bool(parts))

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:
        count._obj.value = 7 if self._device(handle).mig is not None else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, device: Any) -> None:
        parts = self._device(handle).mig or ()
        self._hand_out(parts[index.value] if index.value < len(parts) else None, device)
