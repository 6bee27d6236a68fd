"""What cells have open, shared or parallel, in real kernels with the threads that users have."""

from __future__ import annotations

from typing import Any

import pytest
from kernels import Kernel

LOADED = "%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 60.0"
MODEL = """\
import torch
def block(inner, outer):
    return torch.nn.Sequential(torch.nn.Conv2d(inner, outer, 3, padding=1), torch.nn.ReLU())
model = torch.nn.Sequential(
    torch.nn.Unflatten(1, (3, 32, 32)), block(3, 32), block(32, 32), torch.nn.Flatten(), torch.nn.Linear(32 << 10, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(256, 3072), torch.randint(0, 10, (256,)))
loader = torch.utils.data.DataLoader(data, batch_size=64)
"""
TRAIN = """\
for x, y in {batches}:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TOO_LITTLE = "%oomdoctor simulate 24MiB"
"""For the activations of a batch."""


def forecasts(kernel: Kernel) -> list[dict[str, Any]]:
    """Return what was forecast for the fixes of the last failure."""
    case = kernel.value("__import__('oomdoctor').last_case().to_dict()")
    assert case["fixes"]
    return [fix["forecast"] for fix in case["fixes"]]


def failed(kernel: Kernel, cell: str) -> None:
    kernel.run(cell, ok=False)
    kernel.run("%oomdoctor status", ok=True)  # which waits for the forecasts


@pytest.mark.thorough
def test_a_batch_that_is_copied_in_parallel_is_forecast(kernel: Kernel) -> None:
    for cell in (LOADED, MODEL, "next(iter(loader))[0].clone()", TOO_LITTLE):
        kernel.run(cell, ok=True)
    failed(kernel, TRAIN.format(batches="loader"))
    assert any(found["basis"] == "dry run" and found["peak"] for found in forecasts(kernel)), forecasts(kernel)


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["auto", "notebook", "std"])
def test_a_progress_bar_does_not_end_the_forecast(kernel: Kernel, module: str) -> None:
    for cell in (LOADED, MODEL, f"from tqdm.{module} import tqdm\nfor _ in tqdm(range(2)): pass", TOO_LITTLE):
        kernel.run(cell, ok=True)
    failed(kernel, TRAIN.format(batches="tqdm(loader)"))
    assert any(found["basis"] == "dry run" and found["peak"] for found in forecasts(kernel)), forecasts(kernel)


FRAMES = """\
import os, subprocess
frames = subprocess.Popen(["seq", "1000"], stdout=subprocess.PIPE, bufsize=0).stdout
with open("numbers", "w") as written:
    written.write("".join(f"{number:3}" for number in range(1000)))
numbers = open("numbers", "rb", buffering=0)
"""
READS = "frames.readline(), int(numbers.read(3))"


@pytest.mark.thorough
def test_a_diagnosis_takes_nothing_from_a_pipe_or_a_file(kernel: Kernel) -> None:
    for cell in (LOADED, MODEL, FRAMES, f"first = {READS}", TOO_LITTLE):
        kernel.run(cell, ok=True)
    failed(kernel, f"second = {READS}\n" + TRAIN.format(batches="loader"))
    kernel.run(f"third = {READS}", ok=True)
    assert kernel.value("[[int(one), other] for one, other in (first, second, third)]") == [[1, 0], [2, 1], [3, 2]]
    said = [found.get("refused") or "" for found in forecasts(kernel)]
    assert any("cannot be read in a copy" in why for why in said), forecasts(kernel)
