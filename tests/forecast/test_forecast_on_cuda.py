"""Forecasts beside what PyTorch's CUDA allocator then counts, on cards as the stub of NVIDIA's libraries pretends them.

`make test-cuda` runs these; `benchmarks/cuda.py` has all programs.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

# By its path: NVIDIA's packages, which come with torch for CUDA, have the name ``cuda`` as well.
_SPEC = spec_from_file_location("benchmark_of_cuda", Path(__file__).parents[2] / "benchmarks" / "cuda.py")
_BENCHMARK = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_BENCHMARK)
run = _BENCHMARK.run


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


@pytest.mark.gpu
@pytest.mark.skipif(not has_stub(), reason="torch has no stub to run on")
def test_a_device_that_is_not_in_use_yet_is_forecast_and_not_touched():
    cell = "x = torch.ones(512, 512, requires_grad=True).cuda()\n(x @ x).sum().backward()"
    code = f"import torch; from forecast_lab import forecast; f = forecast({{'torch': torch}}, {cell!r}); "
    code += "assert f.refused is None, f.refused; assert f.peak > 1 << 20; assert not torch.cuda.is_initialized()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
