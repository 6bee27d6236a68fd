"""Staging buffers of reductions are those that PyTorch asks its allocator for on the card."""

import pytest
import torch
from forecast_lab import forecast

from oomdoctor.forecast.reductions import Kind, staging
from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox.card import Card

SUM = Kind(itemsize=4, partial=4)
SUM_OF_HALVES = Kind(itemsize=2, partial=4)
VARIANCE = Kind(itemsize=4, partial=16, vector=2)
EXTREME = Kind(itemsize=4, partial=16)
FLAGS = Kind(itemsize=1, partial=1)


@pytest.mark.parametrize(
    ("shape", "dims", "kind", "expected"),
    [
        ((4096, 2048), [0], SUM, (64 * MIB, 64)),
        ((4096, 2048), [0], SUM_OF_HALVES, (64 * MIB, 64)),
        ((4096, 2048), [0], VARIANCE, (256 * MIB, 64)),
        ((4096, 2048), [0], EXTREME, (256 * MIB, 64)),
        ((4096, 2048), [0], FLAGS, (16 * MIB, 64)),
        ((4096, 2048), [1], SUM, ()),
        ((4096, 2048), None, SUM, (1728, 4)),
        ((4096, 2048), None, VARIANCE, (6912, 4)),
        ((64, 64, 2048), [0, 1], SUM, (64 * MIB, 64)),
        ((64, 64, 2048), [1], SUM, ()),
        ((2048, 256), [0], SUM, (4 * MIB, 8)),
        ((2048, 1000), None, SUM, (1000, 4)),
        ((0, 3), [0], SUM, ()),
    ],
)
def test_the_buffers_are_those_of_a_trace(shape, dims, kind, expected):
    """Source: allocator traces of torch 2.14 for CUDA, capability 8.0 with 108 multiprocessors."""
    assert staging(Card(), torch.empty(shape, device="meta"), dims, kind) == expected


def test_a_forecast_knows_the_buffer_and_that_it_is_gone_afterwards():
    found = forecast({"torch": torch}, "x = torch.ones(4096, 2048, device='cuda')\ny = x.sum(0)")
    assert found.peak == 32 * MIB + 2048 * 4 + 64 * MIB + 512
    assert dict(found.course.temporaries)["scratch of sum"] == 64 * MIB + 64
