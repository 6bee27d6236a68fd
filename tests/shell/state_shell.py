"""IPython's own shell in this process, with the extension, which retries by itself."""

from __future__ import annotations

import atexit
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import tqdm
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from oomdoctor import fixes, pipeline
from oomdoctor.model.case import Case
from oomdoctor.model.sizes import parse_size
from oomdoctor.testing import held_already

__all__ = ["besides", "cleared", "differing", "known", "run", "said", "seed", "started"]


@contextmanager
def started(*few: str) -> Iterator[InteractiveShell]:
    """Give a shell that knows the fixes ``few`` alone; other files try the rest."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.InteractiveTB.set_mode("Minimal")
    tqdm.tqdm.monitor_interval = 0  # no thread that would stay behind
    shell.run_cell("%load_ext oomdoctor\n%config OomDoctor.auto = 'exact'\n%config OomDoctor.forecast_time_s = 0")
    catalogue = {name: fixes.get(name) for name in few}
    try:
        with mock.patch.object(fixes, "catalogue", return_value=catalogue):
            yield shell
    finally:
        shell.run_cell("%unload_ext oomdoctor")
        shell.reset()
        atexit.unregister(shell.atexit_operations)
        shell.restore_sys_module_state()
        InteractiveShell.clear_instance()


@contextmanager
def cleared(shell: InteractiveShell) -> Iterator[InteractiveShell]:
    """Give the shell with nothing in it, no automatic retry, no forecasts and nothing remembered."""
    shell.run_cell("%reload_ext oomdoctor")
    shell.reset(new_session=True)
    shell.rl_next_input = None
    pipeline.failure._cases.clear()
    shell.run_cell("%config OomDoctor.auto = 'off'\n%config OomDoctor.forecast_time_s = 0")
    gc.collect()
    seed()
    yield shell
    shell.run_cell("%oomdoctor simulate off")


def known() -> Case:
    """Return the last failure."""
    case = pipeline.last_case()
    assert case is not None
    return case


def said(shell: InteractiveShell, line: str) -> str:
    """Run a line; return what it put out."""
    shown = run(shell, line)[1]
    return str(shown.stdout + shown.stderr)


def besides(size: str) -> int:
    """Return the memory of a device that has so many bytes besides what this process holds, for other tests too."""
    return parse_size(size) + held_already()


def seed() -> None:
    """Begin all global random streams anew."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def run(shell: InteractiveShell, cell: str) -> tuple[Any, Any]:
    """Run a cell; return its result and what it put out."""
    with capture_output() as shown:
        result = shell.run_cell(cell, store_history=True)
    return result, shown


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names whose digests are not the same."""
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
