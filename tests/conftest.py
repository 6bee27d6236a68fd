"""What the tests share: real kernels."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

import file_forks
import kernel_forks
import pytest
from kernels import Kernel

# A shell starts what is to run in the background with interrupts ignored, and tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["LANGUAGE"] = "en"  # whoever runs the tests: what they hold texts to is English


_ROOT = Path(__file__).parents[1]
_LOOK_AROUND = ("allocator", "evidence", "fixes", "forecast", "objects", "retry", "shell", "trial")
"""Folders whose tests take snapshots, censuses or forecasts of their process."""
_THOROUGH_S = 5
_OF_TESTS = tuple(str(_ROOT / name) for name in ("tests", "benchmarks", "tools"))


def pytest_configure(config: pytest.Config) -> None:
    """Give the files that ask for it a process of their own."""
    config.pluginmanager.register(file_forks.Files())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what was measured to take long, see ``tools/slow_tests.py``, and what looks at all that is alive."""
    lines = (_ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    seconds = {name: int(told) for told, name in (line.split(" ", 1) for line in lines)}
    for item in items:
        # A fork cannot use a device where the process that it is of may have asked for one.
        if item.path.parent.name in _LOOK_AROUND and not item.get_closest_marker("gpu"):
            item.add_marker(file_forks.MARKER)
        if item.nodeid in seconds:
            item.add_marker(pytest.mark.thorough if seconds[item.nodeid] >= _THOROUGH_S else pytest.mark.slow)


def _with_models() -> Generator[None, object, object]:
    """Skip what asks for models of transformers, which takes an older torch for none."""
    try:
        return (yield)
    except ImportError as error:
        if "requires the PyTorch library" not in str(error) and "requires PyTorch >=" not in str(error):
            raise
        pytest.skip("this transformers asks for a newer torch")


pytest_pyfunc_call = pytest.hookimpl(wrapper=True)(_with_models)
pytest_fixture_setup = pytest.hookimpl(wrapper=True)(_with_models)


class OfTests(ModuleType):
    """What tests share, or a file whose tests are not running: not taken for a module of the user's own."""


@pytest.fixture(autouse=True, scope="module")
def put_away(request: pytest.FixtureRequest) -> None:
    """Put what libraries and other tests have made out of sight: each look at all objects and modules is long.

    A census would find it as well, and tell memory that no name of the test leads to.
    """
    # What the tests have imported themselves plays the user's: classes of objects that answer oddly, and programs.
    own = {request.module.__name__} | {getattr(value, "__module__", None) for value in vars(request.module).values()}
    for name, module in list(sys.modules.items()):
        if type(module) in (ModuleType, OfTests) and (getattr(module, "__file__", None) or "").startswith(_OF_TESTS):
            module.__class__ = ModuleType if name in own else OfTests
    gc.collect()
    gc.freeze()


@pytest.fixture
def all_in_sight() -> None:
    """Bring back what was put away: a forked copy sees all of it, and so must what its forecast is held to."""
    gc.unfreeze()


@pytest.fixture
def start_kernel() -> Iterator[Callable[..., Kernel]]:
    """Start real kernels; they are shut down at the end of the test."""
    started: list[Kernel] = []

    def start(**env: str) -> Kernel:
        started.append(Kernel(env))
        return started[-1]

    yield start
    for kernel in started:
        kernel.stop()


@pytest.fixture
def cold_kernel() -> Iterator[Kernel]:
    """A real kernel that has imported nothing of what others begin with."""
    kernel = Kernel(start=kernel_forks.started)
    yield kernel
    kernel.stop()


@pytest.fixture
def kernel(start_kernel: Callable[..., Kernel]) -> Kernel:
    """A real kernel of this interpreter."""
    return start_kernel()
