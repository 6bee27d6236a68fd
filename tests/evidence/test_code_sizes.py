"""Facts of sizes and precision: what a batch has, what a model takes, and what the device computes in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.evidence._precision import native_bfloat16
from oomdoctor.evidence.code import facts
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
