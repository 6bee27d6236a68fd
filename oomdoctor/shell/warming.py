"""Loads what diagnoses a failure and shows it before there is one, while the kernel has nothing to do.

The first failure would wait for it by more than a second. It is loaded step by step on the kernel's own loop, between
cells, once a cell has loaded torch, and only where somebody looks at the notebook. No thread does it, because a process
that the user's program forks meanwhile would inherit the locks of the modules that are being loaded. The longest step,
the reading of the rules, takes about 0.3 s of CPU.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from oomdoctor.shell.borders import quietly

__all__ = ["warm"]

_MODULES: Final = (
    *("yaml", "pydantic", "rule_engine", "oomdoctor.rulebook", "oomdoctor.incident", "oomdoctor.evidence"),
    *("oomdoctor.retry.release", "oomdoctor.views", "oomdoctor.views.panel", "ipywidgets"),
    *("oomdoctor.forecast.planning", "stack_data", "pygments.formatters.terminal256"),
)
"""The last two are what IPython renders its first traceback with, from IPython 8 on."""
_PAUSE_S: Final = 0.05
"""Time that the loop gets for other things between two steps."""


async def warm(rule_paths: list[str]) -> None:
    """Load all of it; what cannot be loaded says so when it is needed."""
    for step in _steps(rule_paths):
        await asyncio.sleep(_PAUSE_S)
        quietly(step)


def _steps(rule_paths: list[str]) -> Iterator[Callable[[], Any]]:
    for name in _MODULES:
        yield partial(importlib.import_module, name)
    from oomdoctor import fixes, pipeline

    for fix in fixes.ids():
        yield partial(fixes.get, fix)
    yield partial(pipeline.rulebook, tuple(map(Path, rule_paths)))
    # The objects of so many modules have the collector go through all that there are, 0.2 s for a large program: it
    # would do so at the next burst of new objects, which is the first traceback.
    if gc.isenabled():
        yield gc.collect
