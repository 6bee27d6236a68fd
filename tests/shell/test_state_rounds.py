"""A hundred failures and retries in one kernel leave no more behind than ten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernels import Kernel

PROGRAM = """\
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters())
batches = list(torch.randn(4, 4096, 64))
criterion = nn.MSELoss()
losses = []
def spend():
    if sys.rounds[0]:
        sys.rounds[0] -= 1
        torch.empty(13 << 20)
"""
ROUND = """\
for x in batches:
    optimizer.zero_grad()
    loss = criterion(model(x), x[:, :8])
    if len(losses) % 4 == 2:
        spend()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_hundred_rounds_leave_no_more_than_the_first_ones(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel(PYTHONPATH=str(Path(__file__).parent))
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0\n%xmode Minimal", ok=True)
    kernel.run(PROGRAM, ok=True)
    kernel.value("__import__('state_held').know_only('chunked_forward')")
    kernel.run("%oomdoctor simulate 64MiB\n%oomdoctor auto exact", ok=True)
    seen = []
    for number in range(1, 101):
        kernel.value("setattr(__import__('sys'), 'rounds', [1])")
        assert "Healed" in kernel.run(ROUND, ok=True).text
        if number in (30, 65, 100):
            seen.append(kernel.value("__import__('state_held').held(model)"))
    assert kernel.value("len(losses)") == 400
    assert kernel.value("len(__import__('oomdoctor').pipeline.cases())") == 100
    first, middle, last = seen
    resident = [one.pop("resident") for one in seen]
    assert first == middle == last, seen
    assert max(resident[1:]) - resident[0] < 24 << 20, "a few MiB come and go"
