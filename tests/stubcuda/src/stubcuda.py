"""What torch loads at the end of its import in an environment with the stub (entry point `torch.backends`)."""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from pathlib import Path

_values: ctypes.CDLL | None = None


def start() -> None:
    """Give operators true values where STUBCUDA_COMPUTE says so."""
    # torch 2.14.1 aborts now and then where the interpreter ends within milliseconds of a backward: a thread of
    # autograd still lets go of the graph, and asks for the GIL. A real device is slower than that.
    atexit.register(time.sleep, 0.05)
    if os.environ.get("STUBCUDA_COMPUTE", "0") not in {"", "0"}:
        compute()


def compute() -> int:
    """Give operators true values from now on; return how many operators that concerns."""
    global _values
    if _values is None:
        _values = ctypes.CDLL(str(Path(__file__).with_name("libstubcuda_values.so")))
    return int(_values.stubcuda_compute())


def untrue() -> list[str]:
    """Tell the operators that ran in this process, and whose values were garbage."""
    if _values is None:
        return []
    names = ctypes.create_string_buffer(1 << 16)
    _values.stubcuda_untrue(names, len(names))
    return names.value.decode().split()
