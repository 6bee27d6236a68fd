"""The shipped helpers."""

from __future__ import annotations

import pytest
import torch
from programs import BUDGET, DATA, MODEL, TRAIN

from oomdoctor.testing import assert_heals, oom_at


def test_oom_at_fails_just_that_operation() -> None:
    x = torch.ones(2)
    with oom_at(3):
        x.add_(1)
        x.add_(1)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            x.add_(1)
    assert x.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("all_in_sight")
@pytest.mark.parametrize("fix", ["micro_batch", "checkpoint_blocks", "chunked_forward"])
def test_each_fix_heals_the_same_program(fix: str) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    case = assert_heals(fix, MODEL, DATA, TRAIN, budget=BUDGET, namespace=namespace)
    assert len(namespace["losses"]) == 4
    forecast = next(c.forecast for c in case.plan.candidates if c.fix == fix)
    assert forecast.basis == "dry run"
    assert case.outcome.peak is not None
    assert abs(forecast.peak / case.outcome.peak - 1) < 0.05


def test_a_program_that_does_not_fail_is_told() -> None:
    with pytest.raises(AssertionError, match="did not fail"):
        assert_heals("micro_batch", MODEL, DATA, TRAIN, budget="8GiB")
