"""What the tests of one file keep, tensors and processes, is let go of at its end: those of others count them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Train on one thread: these programs run in this process, small and by hundreds, and beside other tests.

    Threads that wait by spinning for those of others take more than twice the time. Kernels have the user's number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ddp_ranks" in sys.modules:
        sys.modules["ddp_ranks"].close()
    for name in ("running", "promises", request.module.__name__):
        for kept in list(vars(sys.modules.get(name)).values()) if name in sys.modules else ():
            if hasattr(kept, "cache_clear") and getattr(kept, "__module__", None) in ("running", "promises", name):
                kept.cache_clear()
    gc.collect()
