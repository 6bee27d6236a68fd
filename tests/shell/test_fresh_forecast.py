"""A kernel that cannot fork: ``%%memplan`` and ``oomdoctor.plan`` forecast all the same, and say how."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kernels import Kernel

BASIS = "shadow run, in a fresh process"
SETUP = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    def forward(self, x):
        return self.layers(x)
def fit(steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(2048, 256)
"""
SIMULATE = "%oomdoctor simulate 64MiB"
NO_FORK = "import os\nfork = os.fork\ndel os.fork"


@pytest.fixture
def ready() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        for cell in ("%load_ext oomdoctor", SETUP, SIMULATE, "%config OomDoctor.forecast_time_s = 60.0"):
            kernel.run(cell, ok=True)
        yield kernel
    finally:
        kernel.stop()


@pytest.mark.slow
def test_a_kernel_without_fork_plans_a_cell(ready):
    def planned(cell: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(ready.run(f"%%memplan --json -\n{cell}", ok=True).stdout)
        return found

    forked = planned("fit(10_000)")
    ready.run(NO_FORK, ok=True)
    found = planned("fit(10_000)")
    assert found["forecast"]["basis"] == BASIS
    told = ("peak", "reserved", "peak_line")
    assert [found["forecast"][name] for name in told] == [forked["forecast"][name] for name in told]
    ready.run("lock = __import__('threading').Lock()", ok=True)
    refused = ready.run("%%memplan\nfit(2)\nprint(lock)", ok=True)
    assert "`lock` cannot be sent to a fresh process" in " ".join(refused.text.split())
    value = ready.run("import oomdoctor\nprint(oomdoctor.plan('fit(10_000)'))", ok=True)
    assert BASIS in " ".join(value.text.split())
    left = "import pathlib\nprint(repr(pathlib.Path(f'/proc/self/task/{os.getpid()}/children').read_text()))"
    assert ready.run(left, ok=True).stdout.strip() == "''"


def test_a_failure_says_why_it_is_estimated(ready):
    ready.run(NO_FORK, ok=True)
    reply = ready.run("x = [torch.ones(1 << 20) for _ in range(64)]", ok=False)
    assert "cannot be brought back in a fresh process" in " ".join(reply.text.split())
