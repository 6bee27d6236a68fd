"""Staging buffers of reductions are those that PyTorch asks its allocator for on the card."""

import pytest
import torch
from forecast_lab import forecast

from oomdoctor.forecast.device_scratch import staging
from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox.card import Card

SUM, VARIANCE, EXTREME, FLAGS = 4, 16, 16, 1
"""Bytes that blocks hand over for each output."""


@pytest.mark.parametrize(
    ("shape", "dims", "partial", "expected"),
    [
        ((4096, 2048), [0], SUM, (64 * MIB, 64)),
        ((4096, 2048), [0], VARIANCE, (256 * MIB, 64)),
        ((4096, 2048), [0], EXTREME, (256 * MIB, 64)),
        ((4096, 2048), [0], FLAGS, (16 * MIB, 64)),
        ((4096, 2048), [1], SUM, ()),
        ((4096, 2048), None, SUM, ()),  # 1728 bytes in all
        ((64, 64, 2048), [0, 1], SUM, (64 * MIB, 64)),
        ((64, 64, 2048), [1], SUM, ()),
        ((2048, 256), [0], SUM, (4 * MIB, 8)),
        ((2048, 1000), None, VARIANCE, ()),
        ((0, 3), [0], SUM, ()),
    ],
)
def test_the_buffers_are_those_of_a_trace(shape, dims, partial, expected):
    """Source: allocator traces of torch 2.14 for CUDA, capability 8.0 with 108 multiprocessors."""
    assert staging(Card(), torch.empty(shape, device="meta"), dims, partial) == expected


def test_a_forecast_knows_the_buffer_and_that_it_is_gone_afterwards():
    found = forecast({"torch": torch}, "x = torch.ones(4096, 2048, device='cuda')\ny = x.sum(0)")
    assert found.peak == 32 * MIB + 2048 * 4 + 64 * MIB + 512
    assert dict(found.course.temporaries)["scratch of sum"] == 64 * MIB + 64
