"""Which 16-bit type the device computes in."""

from __future__ import annotations

from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence

__all__ = ["kind_of_device", "native"]


def kind_of_device(evidence: Evidence) -> str:
    """Return the type of the device that tensors are on, ``cpu`` on the virtual accelerator."""
    return evidence.device.tensor_device.partition(":")[0]


def native(evidence: Evidence) -> str | Refused:
    """Return ``bfloat16`` where the device computes in it, else ``float16``, or why neither can be told."""
    kind = kind_of_device(evidence)
    if kind == "cpu":
        return "bfloat16"
    if kind != "cuda":
        return Refused(f"16 bits on {kind} are left to you: which types it computes in differs between its devices")
    if evidence.code.native_bfloat16 is None:
        return Refused("which 16-bit type the device computes in is not known")
    return "bfloat16" if evidence.code.native_bfloat16 else "float16"
