"""A failure inside oomdoctor never hides or changes the user's: a fault in each stage, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kernels import Kernel
from programs import BUDGET, DATA, MODEL, PARAMETERS, TRAIN

STAGES = {
    "recognition": "oomdoctor.incident.find_oom",
    "snapshot": "oomdoctor.retry.transaction.Snapshot",
    "incident": "oomdoctor.incident.from_exception",
    "evidence": "oomdoctor.evidence.collect.collect",
    "census": "oomdoctor.evidence.census.take",
    "devices": "oomdoctor.evidence.host.read",
    "code": "oomdoctor.evidence.collect.facts",
    "rules": "oomdoctor.pipeline.rulebook",
    "release": "oomdoctor.shell.doctor.release",
    "fixes": "oomdoctor.fixes.catalogue",
    "forecast": "oomdoctor.forecast.ranking.Planning",
    "text": "oomdoctor.views.text.render",
    "html": "oomdoctor.views.html.render",
    "panel": "oomdoctor.views.panel.build",
}

BREAK = """\
import importlib
def _break(target, error):
    module, _, name = target.rpartition(".")
    module = importlib.import_module(module)
    kept = getattr(module, name)
    def broken(*args, **kwargs):
        raise error
    setattr(module, name, broken)
    return lambda: setattr(module, name, kept)
"""
SETUP = (BREAK, MODEL, DATA, f"from oomdoctor.allocator.virtual import switch_on; device = switch_on({BUDGET!r})")


def _told(content: dict[str, Any]) -> str:
    """What the user is told, apart from the number of the cell and sizes: an earlier cell leaves a few bytes."""
    told = "\n".join([content["status"], content["ename"], content["evalue"], *content["traceback"]])
    return re.sub(r"In\[\d+|[\d.]+ [KMG]iB", "#", told)


@pytest.fixture(scope="module")
def kernels() -> Iterator[tuple[Kernel, str]]:
    """A kernel with the extension, and what the failing cell answers in one without."""
    plain, loaded = Kernel(), Kernel()
    loaded.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0", ok=True)
    for cell in SETUP:
        plain.run(cell, ok=True)
        loaded.run(cell, ok=True)
    answer = _told(plain.run(TRAIN, ok=False).content)
    plain.stop()
    yield loaded, answer
    loaded.stop()


@pytest.mark.parametrize("error", ["RuntimeError('planted')", "MemoryError()"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_leaves_the_users_failure_as_it_was(kernels: tuple[Kernel, str], stage: str, error: str) -> None:
    kernel, untouched = kernels
    kernel.run(f"mend = _break({STAGES[stage]!r}, {error})", ok=True)
    reply = kernel.run(TRAIN, ok=False)
    kernel.run("mend()", ok=True)
    assert _told(reply.content) == untouched
    assert len(reply.errors) == 1
    # A snapshot that fails is told when it is needed: by a retry, which it makes impossible.
    # What runs out of memory is told in its place.
    in_place = "MemoryError" in error and "no memory left to" in reply.text
    assert "oomdoctor could not finish" in reply.stderr or in_place or stage == "snapshot"
    assert kernel.run("1 + 1", ok=True).data("text/plain") == ["2"]
    assert kernel.run("1 / 0", ok=False).content["ename"] == "ZeroDivisionError"
    assert "Out of memory" in kernel.run(TRAIN, ok=False).text, "the next failure is diagnosed again"


@pytest.mark.parametrize(
    "target", ["oomdoctor.pipeline.heal", "oomdoctor.pipeline.plan", "oomdoctor.views.notice_bundle"]
)
def test_a_fault_on_the_way_of_a_retry_leaves_a_known_state(kernel: Kernel, target: str) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(DATA, ok=True)
    kernel.run(f"%oomdoctor simulate {BUDGET}\n%oomdoctor auto exact", ok=True)
    before = kernel.value(PARAMETERS)
    kernel.run(f"{BREAK}_break({target!r}, RuntimeError('planted'))", ok=True)
    reply = kernel.run(TRAIN)
    assert "planted" in reply.stderr
    if "notice" in target:
        assert reply.status == "ok"
        assert kernel.value("len(losses)") == 4
    else:
        assert reply.content["ename"] == "OutOfMemoryError"
        assert len(reply.errors) == 1
        assert kernel.value(PARAMETERS) == before
    assert kernel.run("1 + 1", ok=True).data("text/plain") == ["2"]


def test_an_error_of_the_users_code_in_the_retry_is_shown_and_the_state_restored(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(DATA, ok=True)
    kernel.run(f"%oomdoctor simulate {BUDGET}\n%oomdoctor auto exact", ok=True)
    before = kernel.value(PARAMETERS)
    reply = kernel.run(TRAIN + "raise LookupError('mine')\n", ok=False)
    assert reply.content["ename"] == "LookupError"
    assert [error["ename"] for error in reply.errors] == ["LookupError"]
    assert kernel.value(PARAMETERS) == before
    assert kernel.value("losses") == []
