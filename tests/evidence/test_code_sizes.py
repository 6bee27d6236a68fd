"""Facts of sizes and precision: what a batch has, what a model takes, and what the device computes in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.evidence.code import float32_only, native_bfloat16
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.session import Cell, Cells


def read(**namespace: object) -> CodeFacts:
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    return facts(Cells(history=(Cell(number=1, source="pass"),)), namespace, *found)


def test_batch_sizes_are_those_of_loaders_that_batch() -> None:
    data = TensorDataset(torch.zeros(8, 2))
    found = read(train=DataLoader(data, batch_size=4), test=DataLoader(data), rows=DataLoader(data, batch_size=None))
    assert found.batch_sizes == (("train", 4), ("test", 1))


def test_layers_that_take_any_size_and_linear_weights() -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    fixed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Bilinear(8, 8, 4))
    by_path = {model.path: model for model in read(pooled=pooled, fixed=fixed).models}
    assert by_path["pooled"].any_size == ("1",)
    assert by_path["pooled"].linear_bytes == (8 * 4 + 4) * 4
    assert (by_path["fixed"].any_size, by_path["fixed"].linear_bytes) == ((), 0)


def test_what_lighter_architectures_would_take() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.LazyConv2d(4, 3))
    deep = nn.Sequential(nn.ModuleList(Block() for _ in range(6)), nn.ModuleList(Block() for _ in range(2)))
    by_path = {model.path: model for model in read(layers=layers, deep=deep).models}
    assert by_path["layers"].convolution_bytes == 8 * 4 * 9 * 4
    assert by_path["layers"].separable_bytes == (4 * 9 + 4 * 8) * 4
    one = (8 * 16 + 16 + 16 * 8 + 8) * 4
    assert (by_path["deep"].repeats, by_path["deep"].repeated_bytes) == (6, 6 * one)


def test_the_models_that_an_optimizer_steps() -> None:
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
    found = read(student=student, teacher=teacher, optimizer=torch.optim.SGD(student.parameters(), lr=0.1))
    assert {model.path: model.stepped for model in found.models} == {"student": True, "teacher": False}


@pytest.mark.parametrize(
    ("capability", "hip", "native"),
    [((7, 5), None, False), ((8, 0), None, True), ((9, 0), None, True), ((7, 0), "6", True)],
)
def test_bfloat16_by_capability(
    capability: tuple[int, int], hip: str | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert native_bfloat16() is native


def test_a_device_not_in_use_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pytest.fail("it was asked"))
    assert native_bfloat16() is None


KERNELS = """
import torch
from oomdoctor.evidence.code import float32_only
from torch import nn
layers = {"LSTM": nn.LSTM(4, 4), "GRU": nn.GRU(4, 4), "Linear": nn.Linear(4, 4), "Conv2d": nn.Conv2d(4, 4, 3)}
given = dict.fromkeys(layers, torch.zeros(2, 2, 4)) | {"Conv2d": torch.zeros(1, 4, 8, 8)}
lacking = []
for name, layer in layers.items():
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            layer(given[name])
    except RuntimeError:
        lacking.append(name)
print(float32_only([nn.ModuleDict(layers)]) == tuple(sorted(lacking)), "LSTM" in lacking)
"""


@pytest.mark.parametrize("isa", ["DEFAULT", "AVX2"])
def test_what_this_processor_has_no_kernel_for_is_found_by_trying(isa: str) -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, env=env, check=True)
    found_alike, lacks_lstm = done.stdout.split()
    assert found_alike == "True"
    assert lacks_lstm == "True" or isa == "DEFAULT"


def test_what_cannot_be_tried_is_not_told() -> None:
    class Own(nn.Linear):
        """A layer of the user's."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pytest.fail("it was run")

    with torch.device("meta"):
        elsewhere = nn.LSTM(4, 4)
    assert float32_only([nn.ModuleList([Own(4, 4), elsewhere, nn.LazyLinear(4), nn.MultiheadAttention(4, 2)])]) == ()
