"""Packed sequences: how many of them still run at each step decides what the layers over them make.

The batch sizes of a packed sequence stay a real tensor, because compiled code reads them from memory. They follow from
the lengths, which are known where they are small integers that no forward has made; where they are not, every sequence
is taken to be as long as the longest.

Source: ``_pack_padded_sequence`` and ``_pad_packed_sequence`` in ``aten/src/ATen/native/PackedSequence.cpp``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_torch: Any = torch


def _packed(_func: Any, args: Any, kwargs: Any) -> Any:
    padded, lengths = args[:2]
    batch_first = kwargs.get("batch_first", args[2] if len(args) > 2 else False)
    steps = padded.shape[1 if batch_first else 0]
    with _disable_current_modes():
        known = lengths.constant
        each = torch.full((lengths.numel(),), steps) if known is None else known
        sizes = (each[None, :] > torch.arange(int(each.max()))[:, None]).sum(1)
        count = int(sizes.sum())
    return padded.new_empty((count, *padded.shape[2:])), sizes


def _packed_backward(_func: Any, args: Any, _kwargs: Any) -> Any:
    grad, size, _sizes, _batch_first = args
    return grad.new_zeros(size)


def replace_unpacking() -> None:
    """Unpack in Python, by the operations that the compiled code would use; it writes lengths into memory."""
    _torch._VF._pad_packed_sequence = _padded


def _padded(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with _disable_current_modes():
        counts = sizes.tolist()
        lengths = (sizes[:, None] > torch.arange(counts[0])[None, :]).sum(0)
    steps = max(total, len(counts))
    padded = data.new_full((steps, counts[0], *data.shape[1:]), padding)
    begin = offset = 0
    for step in range(1, len(counts) + 1):
        if step == len(counts) or counts[step] != counts[begin]:
            number = (step - begin) * counts[begin]
            part = data[offset : offset + number].view(step - begin, counts[begin], *data.shape[1:])
            padded[begin:step, : counts[begin]].copy_(part)
            begin, offset = step, offset + number
    return (padded.transpose(0, 1) if batch_first else padded), lengths


PACKING: Final = {
    _aten._pack_padded_sequence.default: _packed,
    _aten._pack_padded_sequence_backward.default: _packed_backward,
}
"""Operations to be run on fake tensors by a function of their own, ``(func, args, kwargs)``."""
