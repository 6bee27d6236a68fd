"""What several tests of this folder begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel


@pytest.fixture(scope="module")
def ready() -> Iterator[Kernel]:
    """A kernel with a tensor of 8 MiB on a simulated device."""
    kernel = Kernel()
    for cell in ("%load_ext oomdoctor", "import torch", "%oomdoctor simulate 512MiB", "kept = torch.ones(8 << 18)"):
        kernel.run(cell, ok=True)
    yield kernel
    kernel.stop()
