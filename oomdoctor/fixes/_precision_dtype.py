"""Which 16-bit type the device computes in."""

from __future__ import annotations

from typing import Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence

ROUNDS: Final = {
    "bfloat16": "matrix products and convolutions are rounded to bfloat16, 8 significant bits in place of 24",
    "float16": "matrix products and convolutions are rounded to float16, 11 significant bits in place of 24, and a "
    "step is left out where its gradients overflow",
}
"""What mixed precision changes, in words."""


def kind_of_device(evidence: Evidence) -> str:
    """Return the type of the device that tensors are on, ``cpu`` on the virtual accelerator."""
    return evidence.device.tensor_device.partition(":")[0]


def native(evidence: Evidence) -> str | Refused:
    """Return ``bfloat16`` where the device computes in it, else ``float16``, or why neither can be told."""
    kind = kind_of_device(evidence)
    if kind == "cpu":
        if only := evidence.code.float32_only:
            return Refused(f"this processor has no kernel for {' and '.join(only)} in bfloat16")
        return "bfloat16"
    if kind != "cuda":
        return Refused(f"16 bits on {kind} are left to you: which types it computes in differs between its devices")
    if evidence.code.native_bfloat16 is None:
        return Refused("which 16-bit type the device computes in is not known")
    return "bfloat16" if evidence.code.native_bfloat16 else "float16"
