"""Planted causes, live: in a real kernel on a simulated device, the right cause must come first.

All cases share one kernel, as the experiments of a long notebook do: what a case left in the history must not be blamed
for the next. The last case replaces the kernel's /dev/shm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from capabilities import tells_saved
from kernels import Kernel
from planted import CASE_NUMBER, CASES, QUIET, SETUP, Planted

FINDINGS = "[[f.rule, f.confidence, list(f.because)] for f in __import__('oomdoctor').last_case().findings]"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run(QUIET, ok=True)
    yield kernel
    kernel.stop()


def test_there_are_causes_enough() -> None:
    assert len(CASES) >= 20
    assert len({one.name for one in CASES}) == len(CASES)


def named(planted: Planted) -> Any:
    marks = tells_saved if planted.name == "losses summed with their graphs" else ()
    return pytest.param(planted, id=planted.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("planted", [named(planted) for planted in CASES])
def test_the_planted_cause_comes_first(planted: Planted, notebook: Kernel) -> None:
    notebook.run("%oomdoctor simulate off", ok=True)
    notebook.run("%reset -f", ok=True)
    for cell in (SETUP, *planted.cells):
        notebook.run(cell, ok=True)
    if planted.budget:
        notebook.run(f"%oomdoctor simulate {planted.budget}", ok=True)
    before = notebook.value(CASE_NUMBER)
    for cell in planted.filling:
        filled = notebook.run(cell)
        assert filled.status == "ok" or cell == planted.breaks, filled.text
    notebook.run(planted.failing, ok=False)
    assert notebook.value(CASE_NUMBER) == before + 1
    (rule, _, because), *others = notebook.value(FINDINGS)
    assert rule in planted.rules, (rule, others)
    assert because
