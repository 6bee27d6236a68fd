"""Runs a family's cells: as they are, until they fail for want of memory, and with other sources in their place.

What a run left is told by what users look at: parameters and buffers, the list of results, and where the random numbers
stand. Its peak is the most bytes that it held on a virtual accelerator with room for all of it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import linecache
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final
from unittest import mock

import live
import numpy as np
import torch
import tqdm
from models.family import Family

from oomdoctor import pipeline
from oomdoctor.allocator.virtual import VirtualAccelerator, simulate
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.incident import Incident
from oomdoctor.model.session import Accelerator, Cell, Cells, Session

__all__ = [
    *("Failure", "Run", "accelerator_of", "begun", "budget_of", "cells_with"),
    *("fail", "finish", "left", "plain", "run", "session_of"),
]

_ROOMY_BYTES: Final = 1 << 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run left, its peak in bytes, and how many operations its last cell ran."""

    state: dict[str, torch.Tensor]
    results: tuple[float, ...]
    random: tuple[Any, ...]
    peak: int = 0
    operations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of a family's real failure.

    Attributes:
        budget: bytes of memory that it was given.
    """

    cells: Cells
    incident: Incident
    evidence: Evidence
    budget: int


@contextlib.contextmanager
def begun(sources: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give the namespace that all cells but the last leave, the same each time; it is emptied in the end.

    A graph whose recomputation refers to the namespace that holds it is a cycle that no collector sees.
    """
    tqdm.tqdm.monitor_interval = 0  # no thread that would stay behind
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, source in enumerate(sources[:-1], 1):
            run(source, namespace, number)
        yield namespace
    finally:
        namespace.clear()


def run(source: str, namespace: dict[str, Any], number: int) -> None:
    """Run a cell, its output thrown away."""
    filename = _filename(number)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, filename, "exec"), namespace)


def finish(
    family: Family,
    sources: Sequence[str],
    context: Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    look: Callable[[dict[str, Any]], Any] = lambda namespace: None,
    budget: int = _ROOMY_BYTES,
) -> tuple[Run, Any]:
    """Run all cells in a fresh namespace on a device of ``budget`` bytes, the last one within ``context``.

    Returns:
        What it left, and what ``look`` made of the namespace.
    """
    gc.collect(1)
    with contextlib.ExitStack() as stack:
        with accelerator_of(budget) as device, live.Peak() as seen:
            namespace = stack.enter_context(begun(sources))
            before = seen.operations
            with context(namespace):
                run(sources[-1], namespace, len(sources))
            peak = device.read().peak_allocated
        assert isinstance(peak, int)
        found = replace(left(family, namespace), peak=peak, operations=seen.operations - before)
        return found, look(namespace)


def left(family: Family, namespace: dict[str, Any]) -> Run:
    """Return what users would look at."""
    return Run(
        state={f"{name}.{key}": value for name in family.models for key, value in live.values(namespace[name]).items()},
        results=tuple(_numbers(namespace[family.results])),
        random=(
            random.getstate(),
            np.random.get_state()[1].tobytes(),  # type: ignore[union-attr]
            torch.get_rng_state().numpy().tobytes(),
        ),
    )


@cache
def plain(family: Family) -> Run:
    """Return what the family's own cells leave, run once."""
    return finish(family, family.cells())[0]


@cache
def fail(family: Family) -> Failure:
    """Run the family out of memory on the virtual accelerator, and collect the evidence. Done once."""
    sources = family.cells()
    cells = live.cells_of(*sources)
    budget = budget_of(family)
    with accelerator_of(budget), begun(sources) as namespace:
        try:
            run(sources[-1], namespace, len(sources))
        except torch.OutOfMemoryError as error:
            names = {_filename(number): number for number in range(1, len(sources) + 1)}
            case, _ = pipeline.observe(error, lambda accelerator: session_of(namespace, cells, accelerator), names)
            return Failure(cells=cells, incident=case.incident, evidence=case.evidence, budget=budget)
    raise AssertionError(f"{family.name} does not run out of {budget} bytes")


@cache
def budget_of(family: Family) -> int:
    """Return the memory that the family is given: too little for its last cell."""
    sources = family.cells()
    with accelerator_of(_ROOMY_BYTES) as device, begun(sources) as namespace:
        start = device.read().allocated
        run(sources[-1], namespace, len(sources))
        peak = device.read().peak_allocated
    assert isinstance(start, int)
    assert isinstance(peak, int)
    return start + int(family.share * (peak - start))


@contextlib.contextmanager
def accelerator_of(capacity_bytes: int) -> Iterator[VirtualAccelerator]:
    """Put on a virtual accelerator that begins empty: what other tests left in this process is not the program's."""
    with contextlib.ExitStack() as stack:
        with mock.patch("oomdoctor.allocator.device.storages_alive", return_value=()):
            device = stack.enter_context(simulate(capacity_bytes))
        yield device


def session_of(namespace: dict[str, Any], cells: Cells, accelerator: Accelerator | None = None) -> Session:
    """Return the session of a namespace; on an accelerator that nothing lives on where none is given."""
    return pipeline.open_session(namespace, cells, accelerator or VirtualAccelerator(_ROOMY_BYTES))


def cells_with(cells: Cells, sources: dict[int, str]) -> Cells:
    """Return the cells with other texts for some of them."""
    return Cells(
        history=tuple(Cell(number=one.number, source=sources.get(one.number, one.source)) for one in cells.history)
    )


def _filename(number: int) -> str:
    return f"<cell {number}>"


def _numbers(found: Any) -> Iterator[float]:
    for value in found:
        if isinstance(value, tuple):
            yield from map(float, value)
        else:
            yield float(value.detach() if isinstance(value, torch.Tensor) else value)
