"""A cell that builds its own model: what the failed run built is gone before the next run builds it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from oomdoctor.model.case import State
from oomdoctor.testing import assert_heals

CELL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    x, y = torch.randn(512, 256), torch.randn(512, 256)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""
KEPT_MIB = 36
"""Parameters and the two moments of AdamW: what one model and its optimizer keep."""


def test_the_failed_runs_model_is_neither_forecast_nor_kept() -> None:
    # In a process of its own: what other tests have left would be forecast as well.
    heals = [sys.executable, "-c", "import test_one_cell; test_one_cell.heal()"]
    run = subprocess.run(heals, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def heal() -> None:
    budget = 80
    case = assert_heals("micro_batch", CELL, budget=f"{budget}MiB")
    peak = case.outcome.peak
    assert peak is not None
    assert peak >> 20 > budget - KEPT_MIB, "with the failed run's model beside it, it would not have fitted"
    assert case.outcome.state is State.CLEAN
    used = next(one for one in case.plan.candidates if one.fix == "micro_batch")
    assert used.forecast.peak is not None
    assert used.forecast.peak < budget << 20
