"""Forecasts beside what PyTorch's CUDA allocator then counts, on cards as the stub of NVIDIA's libraries pretends them.

`make test-cuda` runs these; `benchmarks/cuda.py` has all programs.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cuda import run


def has_stub():
    try:
        return bool(version("stubcuda"))
    except PackageNotFoundError:
        return False


CHOSEN = ["mlp, AdamW", "gpt", "gpt, bf16", "gpt, fp16 with scaler", "resnet", "lstm"]
EXACT = {"mlp, AdamW", "gpt", "resnet"}


@pytest.mark.gpu
@pytest.mark.skipif(not has_stub(), reason="torch has no stub to run on")
@pytest.mark.parametrize("card", ["7.5", "8.0x", "9.0"])
def test_a_forecast_is_within_its_margin(card):
    rows = run(card, CHOSEN)
    assert [row[0] for row in rows] == CHOSEN
    for name, told, measured, margin, refused in rows:
        assert refused is None, name
        assert told[0] == pytest.approx(measured[0], rel=0.001 if name in EXACT else margin), name
