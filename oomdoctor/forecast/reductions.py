"""The staging buffers of CUDA's reductions: what blocks of threads that share an output hand over to each other.

Where an output has many inputs and there are fewer outputs than the device has room for threads, several blocks work at
one output, and each writes its part into memory of the caching allocator: often many times the result. The sum over
4096 rows of 2048 floats takes 64 MiB beside its 8 KiB. How the work is dealt out follows from the shape, the strides,
the sizes of the elements and the number of multiprocessors.

Source: ``setReduceConfig`` and ``ReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh``, ``reorder_dimensions`` and
``coalesce_dimensions`` in ``aten/src/ATen/TensorIterator.cpp``, of torch 2.14. Names are those used there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from oomdoctor.sandbox.card import Card

_WARP: Final = 32
_MOST_THREADS: Final = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread has to sum up at least, and at most, where blocks share an output."""
_VECTORIZED_FROM: Final = 128
_INDEXED: Final = (1 << 31) - 1
"""Bytes that a kernel can tell apart by 32 bits; what has more is reduced by halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kernel reduces.

    Attributes:
        itemsize: bytes of an input as the kernel reads it.
        partial: bytes of what is handed over for each output: a sum, or a value with its index.
        vector: inputs that a thread loads at once.
    """

    itemsize: int
    partial: int
    vector: int = 4


def staging(card: Card, tensor: torch.Tensor, dims: Sequence[int] | None, kind: Kind) -> tuple[int, ...]:
    """Return the bytes of the buffer and of the semaphores of a reduction; nothing where a block has an output alone.

    Args:
        card: the device.
        tensor: what is reduced.
        dims: over which dimensions; None or none for all.
        kind: what the kernel makes of it.
    """
    if tensor.numel() == 0:
        return ()
    over = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    shape = list(tensor.shape)
    while math.prod(shape) * kind.itemsize > _INDEXED and max(shape) > 1:
        longest = max(range(len(shape)), key=lambda dim: (shape[dim] - 1) * max(int(tensor.stride()[dim]), 1))
        shape[longest] = -(-shape[longest] // 2)
    loops = _coalesced(_ordered(shape, tensor.stride(), over))
    return _buffers(card, loops, kind, int(tensor.storage_offset()))


@dataclass(slots=True)
class _Loop:
    """A dimension: its length, its stride in the input, and that in the output; 0 where it is reduced."""

    length: int
    stride: int
    out: int


def _ordered(shape: list[int], strides: Sequence[int], over: set[int]) -> list[_Loop]:
    loops, step = [], 1
    for dim in range(len(shape) - 1, -1, -1):  # from the innermost outwards, as the iterator begins
        loops.append(_Loop(shape[dim], strides[dim], 0 if dim in over else step))
        step *= 1 if dim in over else shape[dim]

    def compare(one: _Loop, other: _Loop) -> int:
        if (one.out == 0) != (other.out == 0):
            return -1 if one.out == 0 else 1
        for left, right in ((one.out, other.out), (one.stride, other.stride)):
            if left == 0 or right == 0:
                continue
            if left != right:
                return -1 if left < right else 1
            if one.length > other.length:
                return 1
        return 0

    return sorted(loops, key=cmp_to_key(compare))


def _coalesced(loops: list[_Loop]) -> list[_Loop]:
    found: list[_Loop] = []
    for loop in loops:
        last = found[-1] if found else None
        if last is not None and (
            1 in (last.length, loop.length)
            or (loop.stride == last.length * last.stride and loop.out == last.length * last.out)
        ):
            if last.length == 1:
                last.stride, last.out = loop.stride, loop.out
            last.length *= loop.length
        else:
            found.append(_Loop(loop.length, loop.stride, loop.out))
    return found


def _buffers(card: Card, loops: list[_Loop], kind: Kind, offset: int) -> tuple[int, ...]:
    reduced = [loop for loop in loops if loop.out == 0 and (loop.length > 1 or len(loops) == 1)]
    kept = [loop for loop in loops if loop not in reduced]
    outputs = math.prod(loop.length for loop in kept)
    inputs = math.prod(loop.length for loop in reduced)
    is_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    across, along = (inputs, outputs) if is_fastest else (outputs, inputs)
    vector = 1
    fastest = reduced[0].stride if is_fastest and reduced else kept[0].stride if kept else 1
    if fastest == 1 and is_fastest and across >= _VECTORIZED_FROM and len(reduced) == 1:
        across //= kind.vector
    elif fastest == 1 and not is_fastest:
        vector = _output_vector(kept[0], [*reduced, *kept[1:]], offset)
        across //= vector
    most = (256 if kind.itemsize == 16 else _MOST_THREADS) // vector
    width, height = min(_power(across, most), _WARP), _power(along, most)
    height = min(height, most // width)
    width = min(_power(across, most), most // height)
    step_in, step_out = (width, 1) if is_fastest else (1, width)
    splits_warps = -(-inputs // step_in) >= min(height * 16, _MOST_VALUES)
    if splits_warps:
        step_in *= height
    else:
        step_out *= height
    grid = -(-(outputs // vector) // step_out)
    target = card.multiprocessors * (card.threads // (width * height))
    values = -(-inputs // step_in)
    if not splits_warps or values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return ()
    size = kind.partial * outputs * blocks * (1 if is_fastest else width * vector)
    return size, 4 * grid


def _output_vector(first: _Loop, others: list[_Loop], offset: int) -> int:
    vector = 4
    for number in (offset, first.length, *(loop.stride for loop in others)):
        while number % vector:
            vector //= 2
    return vector


def _power(value: int, most: int) -> int:
    """Return the largest power of two that is not above ``value``, or ``most``."""
    return 1 << (max(value, 1).bit_length() - 1) if value < most else most
