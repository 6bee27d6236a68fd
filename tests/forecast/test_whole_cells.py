"""Plans of cells that make their model, optimizer and data themselves: nothing of it is there, and all is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomdoctor import pipeline, simulate
from oomdoctor.model.fix import Patch
from oomdoctor.model.plan import Candidate, MemPlan, Verdict
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.sizes import MIB

WHOLE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(16384, 512))
loader = DataLoader(data, batch_size=8192)
for (x,) in loader:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
ON_CARD = (
    WHOLE.replace("Adam(", "SGD(")
    .replace("model =", "model = ")
    .replace("optimizer = ", "model.to('cuda')\noptimizer = ")
    .replace("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    x = x.to('cuda')\n")
)


NAMES: dict[str, Any] = {"torch": torch}


def _plan(source: str, memory: int | None, namespace: dict[str, Any], time_s: float = 6.0) -> MemPlan:
    cells = Cells(history=(Cell(number=1, source=source),))
    return pipeline.foresee(namespace, cells, memory=memory, time_s=time_s)


def _offered(found: MemPlan) -> dict[str, Candidate]:
    assert found.plan is not None, found.forecast
    return {one.fix: one for one in found.plan.candidates}


@pytest.fixture(scope="module")
def whole() -> MemPlan:
    return _plan(WHOLE, 180 * MIB, NAMES, 10.0)


def test_a_cell_that_makes_all_of_it_has_its_fixes_priced(whole: MemPlan) -> None:
    assert whole.here.verdict is Verdict.TOO_LARGE
    offered = _offered(whole)
    assert {"micro_batch", "checkpoint_blocks", "smaller_batch"} <= set(offered)
    first = next(iter(offered.values()))
    assert first.forecast.verdict is Verdict.FITS
    assert isinstance(first.patch, Patch)


def test_the_first_of_them_takes_what_it_was_forecast_to(whole: MemPlan) -> None:
    first = next(iter(_offered(whole).values()))
    assert isinstance(first.patch, Patch)
    assert first.forecast.peak is not None
    (edit,) = first.patch.edits
    with simulate(1 << 30) as card:
        exec(edit.after, {})
        assert card.allocator.peak_allocated == pytest.approx(first.forecast.peak, rel=0.02)


def test_what_activations_take_is_known_to_the_fixes(whole: MemPlan) -> None:
    assert whole.plan is not None
    assert "0 B of activations" not in " ".join(reason for _, reason in whole.plan.refusals)


def test_nothing_of_it_is_made_in_this_process(whole: MemPlan) -> None:
    assert whole.plan is not None
    assert list(NAMES) == ["torch"]


def test_a_cell_for_a_card_that_this_machine_lacks_has_them_too() -> None:
    assert {"micro_batch", "checkpoint_blocks"} <= set(_offered(_plan(ON_CARD, 150 * MIB, {})))


def test_what_only_a_function_of_the_cell_holds_is_seen_too() -> None:
    body = "".join(f"    {line}" for line in WHOLE.splitlines(keepends=True))
    found = _plan(f"def main():\n{body}main()\n", 150 * MIB, {})
    assert "smaller_batch" in _offered(found)


def test_a_cell_that_is_larger_than_the_machine_is_planned_for_it() -> None:
    large = WHOLE.replace("512", str(1 << 18)).replace("range(8)", "range(2)").replace("16384", "64")
    found = _plan(large.replace("8192", "64"), None, {})
    assert found.here.place.name == "host memory"
    assert found.here.verdict is Verdict.TOO_LARGE
    assert "lighter_optimizer" in _offered(found)
