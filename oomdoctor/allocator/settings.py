"""The settings of PyTorch's CUDA caching allocator, read from the text of ``PYTORCH_CUDA_ALLOC_CONF``.

They are those that decide which memory is taken and kept. Options that change only how fast or with what locks that is
done, or that concern pinned host memory, are accepted and have no effect on the model; nor has
``garbage_collection_threshold``, which is idle without a memory fraction below 1.

Where CUDA's own reader is lenient (a number followed by letters, a missing colon, an unknown option on a machine
without CUDA), this one refuses: a setting that has no effect without anybody saying so helps nobody.

Source: ``c10/core/AllocatorConfig.cpp`` and ``c10/cuda/CUDAAllocatorConfig.h`` of PyTorch 2.13.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIN_BLOCK_SIZE: Final = 512
"""Every block is a multiple of this. Source: ``kMinBlockSize``."""
SMALL_SIZE: Final = 1 * MIB
"""Largest request that the small pool serves. Source: ``kSmallSize``."""
SMALL_BUFFER: Final = 2 * MIB
"""Segment of the small pool. Source: ``kSmallBuffer``."""
MIN_LARGE_ALLOC: Final = 10 * MIB
"""Requests from here on get a segment of their own size. Source: ``kMinLargeAlloc``."""
LARGE_SEGMENT: Final = 20 * MIB
"""Segment for the requests in between, unless it is set otherwise. Source: ``large_segment_size_``."""
ROUND_LARGE: Final = 2 * MIB
"""Segments of large requests are multiples of this. Source: ``kRoundLarge``."""

VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where the settings are read from; the first that is there counts, even an empty one."""

_INTERVALS: Final = 16
"""Intervals of sizes with divisions of their own: up to 2 MiB, 2 to 4 MiB, and so on to 32 GiB and more."""
_FIRST_INTERVAL: Final = SMALL_SIZE.bit_length()
_LONGEST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says; the defaults are those of an unset variable. Sizes are in bytes.

    Attributes:
        expandable_segments: segments are ranges of addresses into which memory is mapped page by page.
        max_split_size: blocks of this size or more are never split; None: all may be.
        max_non_split_rounding_size: such a block may be larger than the request that it serves by less than this.
        large_segment_size: segment for requests of more than 1 and less than 10 MiB, and page of expandable segments.
        roundup_power2_divisions: into how many steps the way from one power of two to the next is divided to round
            requests up, for each of sixteen intervals of sizes; 0 and 1: they are not.
        per_process_memory_fraction: share of the device's memory that may be reserved.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding_size: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = field(default=(0,) * _INTERVALS)
    per_process_memory_fraction: float = 1.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """Return the settings that a process started with ``environ`` would use.

        Raises:
            UsageError: the text of the variable that counts cannot be used.
        """
        name = next((name for name in VARIABLES if name in environ), None)
        return cls() if name is None else cls.parse(environ[name], name=name)

    @classmethod
    def parse(cls, text: str, *, name: str = VARIABLES[0]) -> AllocatorSettings:
        """Return the settings in ``text``: ``option:value`` pairs with commas between; of several the last counts.

        Args:
            text: such as ``"expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"``.
            name: of the variable, for the message.

        Raises:
            UsageError: an option is not known, or its value is not one of those that it takes.
        """
        values: dict[str, Any] = {}
        for option, value in _pairs(text, name):
            if option in _WITHOUT_EFFECT:
                continue
            if option not in _OPTIONS:
                raise UsageError(
                    f"{name} has no option {_shown(option)}: there are {', '.join(_OPTIONS)}, "
                    "and those of CUDA for pinned memory and locks, which change nothing here"
                )
            attribute, read, accepted = _OPTIONS[option]
            try:
                values[attribute] = read(value)
            except (KeyError, ValueError):
                raise UsageError(f"{name}: {option}:{_shown(value)} cannot be used: it takes {accepted}") from None
        for read_alone in ("backend", "garbage_collection_threshold"):
            values.pop(read_alone, None)
        large = values.setdefault("large_segment_size", LARGE_SEGMENT)
        values.setdefault("max_non_split_rounding_size", large)
        for option in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size = values.get(_OPTIONS[option][0], large)
            if size < large:
                raise UsageError(f"{name}: {option}:{size // MIB} cannot be used: it takes {large // MIB} or more")
        return cls(**values)

    def __str__(self) -> str:
        told = [entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default]
        return ", ".join(f"{name} {getattr(self, name)}" for name in told) or "defaults"

    def round_size(self, nbytes: int) -> int:
        """Return the size of the block that serves a request of ``nbytes``. Source: ``round_size``."""
        divisions = self.roundup_power2_divisions[min(max(nbytes.bit_length() - _FIRST_INTERVAL, 0), _INTERVALS - 1)]
        step = MIN_BLOCK_SIZE
        if divisions > 1 and nbytes > MIN_BLOCK_SIZE * divisions:
            step = (1 << nbytes.bit_length() - 1) // divisions
        return max(-(-nbytes // step), 1) * step

    def segment_size(self, size: int) -> int:
        """Return the size of a new segment for a block of ``size``. Source: ``get_allocation_size``."""
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def least_asked(self, segment: int) -> int:
        """Return the bytes that were asked for at least where a segment of this size could not be had.

        It is the segment that "Tried to allocate" tells, and it can be much larger than the tensor.
        """
        if segment == SMALL_BUFFER:
            return 1
        below = SMALL_SIZE if segment == self.large_segment_size else max(segment - ROUND_LARGE, 0)
        return max(bisect_right(range(below + 1), below, key=self.round_size), 1)


def _pairs(text: str, name: str) -> list[tuple[str, str]]:
    packed, at = "".join(text.split()), 0
    pairs: list[tuple[str, str]] = []
    while at < len(packed):
        pair = _PAIR.match(packed, at)
        if pair is None:
            raise UsageError(
                f"{name}: {_shown(packed[at:])} is no option: write option:value pairs with commas between, "
                "such as expandable_segments:True,garbage_collection_threshold:0.8"
            )
        pairs.append((pair["option"], pair["value"]))
        at = pair.end()
    return pairs


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _checked(read: Callable[[str], Any], is_allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return what reads a value that only some are allowed of, and raises ``ValueError`` for others."""

    def checked(text: str) -> Any:
        value = read(text)
        if not is_allowed(value):
            raise ValueError
        return value

    return checked


def _whole(text: str) -> int:
    return int(text if text.isascii() and text.isdigit() else "")


def _mebibytes(text: str) -> int:
    return _whole(text) * MIB


_power_of_two: Final = _checked(_whole, lambda number: number.bit_count() == 1)


def _divisions(value: str) -> tuple[int, ...]:
    """Return the divisions of each interval; of a list, intervals that it skips keep none, as CUDA has it."""
    if not value.startswith("["):
        return (_power_of_two(value),) * _INTERVALS
    divisions, last, first = [0] * _INTERVALS, 0, True
    for entry in filter(None, value[1:-1].split(",")):
        size, _, count = entry.partition(":")
        divided = 0 if count == "0" else _power_of_two(count)
        if size == ">":
            divisions[last + 1 :] = [divided] * (_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(size).bit_length() - 1, _INTERVALS - 1)
        if first:
            divisions[:last] = [divided] * last
            first = False
        divisions[last] = divided
    return tuple(divisions)


_PAIR: Final = re.compile(r"(?P<option>[^,:\[\]]+):(?P<value>\[[^\[\]]*\]|[^,:\[\]]+)(?:,|\Z)")
_SPLIT: Final = "a whole number of MiB, no less than large_segment_size_mb (20 unless set)"
_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__, "True or False"),
    "max_split_size_mb": ("max_split_size", _mebibytes, _SPLIT),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _mebibytes, _SPLIT),
    "large_segment_size_mb": (
        "large_segment_size",
        _checked(_mebibytes, lambda size: size > MIN_LARGE_ALLOC),
        "a whole number of MiB above 10",
    ),
    "garbage_collection_threshold": (
        "garbage_collection_threshold",
        _checked(float, lambda share: 0 < share < 1),
        "a number above 0 and below 1",
    ),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _divisions,
        "a power of two, or a list of them by size in MiB such as [256:1,512:2,1024:4,>:8], 0 there for no rounding",
    ),
    "per_process_memory_fraction": (
        "per_process_memory_fraction",
        _checked(float, lambda share: 0 <= share <= 1),
        "a number from 0 to 1",
    ),
    "backend": (
        "backend",
        {"native": "native"}.__getitem__,
        "native: the model is of PyTorch's own allocator, not of cudaMallocAsync",
    ),
}
_WITHOUT_EFFECT: Final = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
