"""These tests need Jittor, which compiles its operators when they are used first: see ``make test-jittor``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
from kernels import Kernel

HAS_JITTOR = "jittor" in packages_distributions()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "jittor":
            item.add_marker(pytest.mark.jittor)
            if not HAS_JITTOR:
                item.add_marker(pytest.mark.skip(reason="Jittor is not installed here"))


@pytest.fixture
def lazy_kernel() -> Iterator[Kernel]:
    """A kernel with oomdoctor loaded; what Jittor compiles stays for the next."""
    kernel = Kernel()
    kernel.run("%load_ext oomdoctor", ok=True)
    yield kernel
    kernel.stop()
