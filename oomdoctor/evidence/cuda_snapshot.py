"""torch's own snapshot of the CUDA allocator, for its memory visualiser.

Nothing is recorded by itself: without ``torch.cuda.memory._record_memory_history`` a snapshot has the segments and
blocks as they stand, and not where they were allocated. Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, Final

from oomdoctor.errors import NotAvailable

_VIEWER: Final = "https://docs.pytorch.org/memory_viz"


def check() -> None:
    """Refuse where there is no allocator to take a snapshot of.

    Raises:
        NotAvailable: this process uses no CUDA device.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise NotAvailable("there is no snapshot: this process uses no CUDA device, whose allocator keeps one")


def dump(path: Path) -> str:
    """Write the snapshot and return in one line what it has.

    Raises:
        NotAvailable: this process uses no CUDA device, or the file cannot be written.
    """
    check()
    import torch

    # What ``torch.cuda.memory._dump_snapshot`` does, with a look at what there is to dump.
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    try:
        with path.open("wb") as file:
            pickle.dump(found, file)
    except OSError as exc:
        raise NotAvailable(f"{path} cannot be written: {exc.strerror}") from None
    opens = f"the allocator's snapshot, for {_VIEWER}"
    if any(found.get("device_traces", ())):
        return f"{opens}, with the traces recorded so far"
    return f"{opens}, without traces: torch.cuda.memory._record_memory_history() must be on before the allocations"
