"""What it means: a cause, with the numbers that speak for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why the memory ran out. The words are those of the labelled message corpus, and ``memory_cap``.

    A cap is what a setting allows this process to take, where the device itself has more.
    """

    BATCH_OR_ACTIVATION = "batch_or_activation"
    SINGLE_HUGE_TENSOR = "single_huge_tensor"
    MODEL_TOO_LARGE = "model_too_large"
    QUADRATIC_ATTENTION = "quadratic_attention"
    FRAGMENTATION = "fragmentation"
    LEAK_OR_PINNED_GRAPH = "leak_or_pinned_graph"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER_PROCESS = "other_process"
    CUDA_CONTEXT = "cuda_context"
    HOST_RAM = "host_ram"
    WORKER_MEMORY = "worker_memory"
    SHM_TOO_SMALL = "shm_too_small"
    MEMORY_CAP = "memory_cap"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that fired.

    Attributes:
        confidence: the rule author's estimate of how often it is right when it fires, 0 to 1; not measured.
        because: sentences with the user's own numbers.
        fixes: ids of the fixes that the rule suggests, best first.
    """

    rule: str
    title: str
    cause: Cause
    confidence: float
    because: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
