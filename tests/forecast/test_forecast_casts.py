"""Operations on the CPU cast operands of another type into copies: these count, by the events of the allocator."""

import gc
from itertools import product

import pytest
import torch
from forecast_lab import forecast, measured_rise, rise
from torch import nn
from torch.nn import functional

from oomdoctor.allocator.virtual import simulate
from oomdoctor.forecast.casts import cast_bytes
from oomdoctor.forecast.kernels import _changes, _highest

SIZE = 1 << 12
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
_aten = torch.ops.aten
OPERATIONS = {
    2: (
        *(_aten.add.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.pow.Tensor_Tensor, _aten.atan2.default),
        *(_aten.lt.Tensor, _aten.eq.Tensor, _aten.maximum.default, _aten.bitwise_and.Tensor, _aten.add_.Tensor),
        *(_aten.mul_.Tensor, _aten.logical_and.default, _aten.logical_and_.default, _aten.masked_fill.Tensor),
        *(_aten.sigmoid_backward.default, _aten.copy_.default),
    ),
    1: (
        *(_aten.sin.default, _aten.exp.default, _aten.neg.default, _aten.abs.default, _aten.isnan.default),
        *(_aten.logical_not.default, _aten.sum.default, _aten.prod.default, _aten.mean.default, _aten.any.default),
        *(_aten.all.default, _aten.sqrt_.default, _aten.clone.default),
    ),
}


@pytest.mark.parametrize("operation", [one for many in OPERATIONS.values() for one in many], ids=str)
def test_copies_in_another_type_are_those_that_the_kernel_makes(operation):
    count, compared = (2 if operation in OPERATIONS[2] else 1), 0
    for types in product(TYPES, repeat=count):
        args = [(torch.rand(SIZE) * 3).to(dtype) for dtype in types]
        if operation is _aten.masked_fill.Tensor:
            args = [args[0], args[1].bool(), torch.ones((), dtype=types[0])]
        kept = []
        try:
            changes = _changes(lambda args=args, kept=kept: kept.append(operation(*args)))
        except RuntimeError:
            continue  # there is no such kernel
        out, compared = kept[0], compared + 1
        made = 0 if any(out is one for one in args) else out.untyped_storage().nbytes()
        assert cast_bytes(operation, args, out) == pytest.approx(_highest(changes) - made, abs=64), types
    assert compared


CELLS = {
    "a mask": "out = torch.randn(300, 1000) * mask",
    "a mask in place": "x = torch.randn(300, 1000)\nx *= mask",
    "a mask of one row": "out = torch.randn(300, 1000) * mask[0]",
    "a mask that is counted": "count = mask.sum()",
    "one type and another": "out = torch.randn(300, 1000) - torch.zeros(300, 1000, dtype=torch.float64)",
    "a number of another type": "out = torch.randn(300, 1000) * torch.tensor(2.0, dtype=torch.float64)",
    "images of bytes": "images = torch.zeros(300, 1000, dtype=torch.uint8)\nout = images / 255",
    "a comparison": "out = torch.randn(300, 1000) < torch.zeros(300, 1000, dtype=torch.float64)",
    "a choice": "x = torch.randn(300, 1000)\nout = torch.where(mask, x, x.double())",
    "a mean over what is not masked": (
        "x = torch.randn(300, 1000, requires_grad=True)\nloss = (x * mask).sum() / mask.sum()\nloss.backward()"
    ),
    "infinities": "out = torch.isinf(torch.randn(300, 1000))",
    "a median": "out = torch.randn(300, 1000).median()",
    "a distance": "x, y = torch.randn(2, 300, 1000)\nout = torch.dist(x, y)",
    "binary cross entropy": (
        "x, y = torch.rand(2, 300, 1000)\nfunctional.binary_cross_entropy(x.requires_grad_(), y).backward()"
    ),
    "bf16 beside float32": "out = torch.randn(300, 1000).bfloat16() + torch.randn(300, 1000)",
}


def program():
    return {"torch": torch, "nn": nn, "functional": functional, "mask": torch.rand(300, 1000) > 0.5}


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_that_of_the_real_run(name):
    assert rise(program(), CELLS[name]) == pytest.approx(measured_rise(program(), CELLS[name]), rel=0.001)


def test_they_are_told_by_their_name():
    found = forecast(program(), CELLS["a mask"])
    assert ("operands of mul in the type that it computes in", 1_200_000) in found.course.temporaries


def test_on_a_device_nothing_is_copied():
    ns, cell = program(), CELLS["a mask"]
    gc.collect()
    found = forecast(ns, cell, simulated=True)
    with simulate("1GiB") as device:
        exec(cell, ns)
        assert found.peak == device.read().peak_allocated
