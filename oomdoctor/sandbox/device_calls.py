"""What Python code can ask of a device besides tensors, answered for the emulated one.

Streams and events do nothing, for everything happens in order.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.sandbox.restrictions import do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomdoctor.sandbox.card import Card

_torch: Any = torch
_accelerator: Any = getattr(torch, "accelerator", None)  # torch has it from 2.6 on
_raw_generator: Any = torch.Generator

_SILENT: Final = (
    *("_lazy_init", "init", "synchronize", "empty_cache", "ipc_collect"),
    *("set_device", "set_device_index", "set_stream"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "empty_host_cache"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction", "_record_memory_history", "_dump_snapshot"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("set_sync_debug_mode", "_set_allocator_settings", "_sleep", "check_error", "_lazy_call"),
)
"""Functions that do something to a device, of one or the other module."""
_RNG_STATE_BYTES: Final = 16
"""Source: ``CUDAGeneratorImpl::get_state``: a seed and an offset."""


class Memory(Protocol):
    """How many bytes the program holds there, and has held at most."""

    live: int
    peak: int


def replace(memory: Memory, card: Card) -> None:
    """Put the answers into the modules of this process."""
    answers = _answers(memory, card)
    _install(torch.cuda, answers)
    names = ("memory", "random", "streams", "graphs", "nvtx")
    for module in [sys.modules.get(f"torch.cuda.{name}") for name in names]:
        if module is not None:
            _install(module, answers)
    for module in (_accelerator, getattr(_accelerator, "memory", None)):
        if module is not None:
            _install(module, answers)
    _torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    _torch.backends.cuda.is_built = lambda: True
    _torch.Generator = _generator(card)
    _read_files(card)


def _install(module: Any, answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        if hasattr(module, name):
            setattr(module, name, answer)


def _answers(memory: Memory, card: Card) -> dict[str, Any]:
    def live(*_args: Any, **_kwargs: Any) -> int:
        return memory.live

    def peak(*_args: Any, **_kwargs: Any) -> int:
        return memory.peak

    def free_and_total(*_args: Any) -> tuple[int, int]:
        return max(card.total - memory.live, 0), card.total

    found: dict[str, Any] = dict.fromkeys(_SILENT, do_nothing)
    found |= dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), live)
    found |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak)
    found |= dict.fromkeys(("mem_get_info", "get_memory_info"), free_and_total)
    found |= dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), _always(True))
    found |= dict.fromkeys(("current_device", "current_device_index"), _always(card.index))
    found |= dict.fromkeys(("current_stream", "default_stream", "stream", "Stream", "ExternalStream", "Event"), _Idle)
    found |= dict.fromkeys(("device", "device_of", "device_index", "range"), _Idle)
    never = ("_is_in_bad_fork", "can_device_access_peer", "is_current_stream_capturing")
    found |= dict.fromkeys(never, _always(False))
    found |= dict.fromkeys(("range_push", "range_pop", "mark", "initial_seed"), _always(0))
    return found | {
        "is_bf16_supported": _is_bf16_supported(card),
        "_in_bad_fork": False,
        "device_count": _always(1),
        "current_accelerator": _always(torch.device("cuda")),
        "get_device_name": _always(card.name),
        "get_device_capability": _always(card.capability),
        "get_device_properties": _always(_properties(card)),
        "get_arch_list": _always([f"sm_{card.capability[0]}{card.capability[1]}"]),
        "memory_stats": lambda *_args: {"allocated_bytes.all.current": live(), "allocated_bytes.all.peak": peak()},
        "memory_summary": _always(""),
        "memory_snapshot": _always([]),
        "get_rng_state": _rng_state,
        "get_rng_state_all": lambda: [_rng_state()],
    }


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _is_bf16_supported(card: Card) -> Callable[..., bool]:
    """Return the answer for the card: every one computes with bfloat16, those before Ampere by way of float32.

    Source: ``is_bf16_supported`` in ``torch/cuda/__init__.py``, which ``torch.autocast`` asks too.
    """

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or card.capability >= (8, 0)

    return is_supported


def _rng_state(*_args: Any) -> torch.Tensor:
    with _disable_current_modes():
        return torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")


def _properties(card: Card) -> Any:
    """Return what ``get_device_properties`` tells; an attribute that only a real card could answer is not there."""
    major, minor = card.capability
    return SimpleNamespace(name=card.name, total_memory=card.total, major=major, minor=minor, gcnArchName="")


class _Idle(contextlib.AbstractContextManager[Any]):
    """A stream, an event, and every other thing of a device that one can enter: all work is done at once."""

    stream_id = cuda_stream = device_index = idx = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, function: Any) -> Any:
        return function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Idle)

    def __hash__(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        kind = torch.device("cuda") if _accelerator is None else _accelerator.current_accelerator()
        return torch.device("cpu") if kind is None else torch.device(kind.type, 0)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _end: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Idle()

    wait_event = wait_stream = synchronize = record = wait = do_nothing


def _generator(card: Card) -> Any:
    class Generator(_raw_generator):  # type: ignore[misc]
        """A generator of the CPU that says to be where it was asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, device="cpu")
            made.asked = card.resolve(device)
            return made

        @property
        def device(self) -> torch.device:
            asked: torch.device = self.__dict__["asked"]
            return asked

    return Generator


def _read_files(card: Card) -> None:
    """Read tensors from files without their bytes, and then let them move to where they are mapped to."""
    load = torch.load

    def mapped_load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, (str, torch.device)) or torch.device(map_location).type == "cpu":
            return load(file, map_location, *args, **kwargs)
        target = card.resolve(map_location)
        loaded = load(file, "cpu", *args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(target), loaded)

    _torch.load = mapped_load
