"""The memory of well-known cards, as torch reports it on them.

A card's name tells less than a program can have: part of it is kept for error correction and by the driver. Each
capacity here is the least that was found reported for that card, in the unit that torch prints; a card at hand may
report some MiB more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oomdoctor.model.sizes import GIB, MIB

CONTEXT_BYTES: Final = 512 * MIB
"""What is set aside on a card for the CUDA context, beside torch's allocator: an estimate on the safe side.

Source: "uses around 400MB if CUDA >= 11.7 is used and lazy module loading enabled (default in PyTorch)",
https://github.com/pytorch/pytorch/issues/109888.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One kind of accelerator.

    Attributes:
        name: with the size that it is sold with.
        total_bytes: what torch reports as its ``total_memory``.
        source: where that was reported, in words.
    """

    name: str
    total_bytes: int
    source: str


def _properties(name: str, sold: str, total_mib: int) -> Card:
    """Return a card by what ``torch.cuda.get_device_properties`` printed in a public log."""
    return Card(
        name=sold,
        total_bytes=total_mib * MIB,
        source=f"torch.cuda.get_device_properties: {name}, total_memory={total_mib}MB",
    )


def _failure(sold: str, total_gib: float, source: str) -> Card:
    """Return a card by the total capacity in torch's message of a failure on it."""
    return Card(name=sold, total_bytes=int(total_gib * GIB), source=f"torch's message, {total_gib} GiB: {source}")


CARDS: Final = (
    _properties("Tesla T4", "T4 16 GB", 14930),
    _failure("L4 24 GB", 22.03, "https://github.com/ArcInstitute/evo2/issues/190"),
    _failure("RTX 4090 24 GB", 23.61, "https://github.com/pinokiofactory/flux-webui/issues/11"),
    _properties("NVIDIA GeForce RTX 3090", "RTX 3090 24 GB", 24259),
    Card(
        name="V100 32 GB",
        total_bytes=32494 * MIB,
        source="yolov5, which prints total_memory of torch.cuda.get_device_properties: Tesla V100-SXM2-32GB, 32494MiB",
    ),
    Card(
        name="A100 40 GB",
        total_bytes=42298834944,
        source="CUDA's deviceQuery, A100-SXM4-40GB: https://github.com/bottlerocket-os/bottlerocket/pull/3873",
    ),
    _failure("A100 80 GB", 79.15, "https://github.com/vllm-project/vllm/issues/4408"),
    _properties("NVIDIA H100 80GB HBM3", "H100 80 GB", 81082),
    _properties("NVIDIA H200", "H200 141 GB", 143156),
    _properties("AMD Instinct MI300X", "MI300X 192 GB", 196592),
)
"""Smallest first."""
