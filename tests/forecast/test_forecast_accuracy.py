"""The forecast against the events of the CPU allocator, as torch.profiler records them."""

import gc

import pytest
import torch
from forecast_lab import (
    MICRO_BATCHED,
    TRAIN,
    checkpointed_transformer,
    cnn,
    forecast,
    measured_rise,
    mlp,
    namespace,
    rise,
    transformer,
)
from torch import nn

from oomdoctor.allocator.virtual import simulate

TOLERANCE = 0.01


@pytest.mark.parametrize("source", [TRAIN, MICRO_BATCHED], ids=["train", "micro_batched"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("make", [mlp, cnn, transformer, checkpointed_transformer])
def test_the_peak_is_that_of_the_real_run(make, optimizer, source):
    ns = namespace(make, optimizer)
    assert rise(ns, source) == pytest.approx(measured_rise(ns, source), rel=TOLERANCE)


CELLS = {
    "inference": "with torch.no_grad():\n    out = [model(x) for x, y in loader]\n    out = None",
    "kept_graphs": "kept = [model(x) for x, y in list(loader)[:3]]",
    "half": "big = nn.Linear(1000, 1000)\nbig.bfloat16()\nbig(torch.zeros(2000, 1000).bfloat16())",
    "gru": "nn.GRU(100, 200, batch_first=True)(torch.randn(30, 16, 100))[0].pow(2).sum().backward()",
    "new_model": "big = nn.Linear(2000, 1000)\nbig(torch.randn(64, 2000)).pow(2).sum().backward()",
    "resized": "t = torch.empty(10)\nt.resize_(1_000_000)\nu = t.view(1000, 1000) @ t.view(1000, 1000)",
    "views": "a = torch.randn(1000, 1000)\nb = a.t()[:500]\ndel a\nc = b.contiguous()",
    "batch_kept_by_graph": "x = torch.randn(512, 256)\ny = model(x * 1)\ndel x\nz = torch.ones(100_000)",
    "range_loop": "for step in range(20):\n    model(data).sum().backward()\n    optimizer.step()",
}


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_of_other_cells_is_that_of_the_real_run(name):
    ns = namespace(mlp, "adamw") | {"data": torch.randn(512, 256)}
    assert rise(ns, CELLS[name]) == pytest.approx(measured_rise(ns, CELLS[name]), rel=TOLERANCE, abs=4096)


def test_allocated_and_reserved_are_those_of_the_virtual_accelerator():
    ns = namespace(transformer, "adamw")
    found = forecast(ns, TRAIN, simulated=True)
    gc.collect()
    with simulate("2GiB") as device:
        exec(TRAIN, ns)
        after = device.read()
    assert found.peak == pytest.approx(after.peak_allocated, rel=TOLERANCE)
    assert found.reserved == pytest.approx(after.peak_reserved, rel=0.05)


def test_it_works_while_a_virtual_accelerator_is_on_and_does_not_disturb_it():
    ns = namespace(mlp)
    gc.collect()
    with simulate("1GiB") as device:
        before = device.read()
        found = forecast(ns, TRAIN, simulated=True, budget=1 << 30)
        assert device.read() == before
        exec(TRAIN, ns)
        assert found.peak == pytest.approx(device.read().peak_allocated, rel=TOLERANCE)


def test_what_only_an_earlier_graph_keeps_alive_counts():
    ns = namespace(mlp)
    before = forecast(ns, "pass").peak
    exec("loss = model(torch.randn(4096, 256)).sum()", ns)
    kept = forecast(ns, "pass").peak - before
    del ns["loss"]
    assert forecast(ns, "pass").peak == before
    assert kept > 4096 * (256 + 512) * 4


def test_reserved_is_what_stays_within_the_budget_where_the_allocator_can_give_back():
    # 40 MiB, freed, then 60 MiB: without a limit both segments stay, with one the first is given back.
    source = "a = torch.empty(10 << 20)\ndel a\nb = torch.empty(15 << 20)"
    ns = {"torch": torch}
    idle = forecast(ns, "pass", simulated=True).reserved
    free = forecast(ns, source, simulated=True).reserved
    tight = forecast(ns, source, simulated=True, budget=idle + (70 << 20)).reserved
    assert free - idle == 100 << 20
    assert tight - idle <= 70 << 20


def test_the_line_of_the_peak_is_named():
    source = "a = torch.ones(10)\nb = torch.ones(5_000_000)\ndel b\nc = torch.ones(10)\n"
    assert forecast({"torch": torch}, source).peak_line == 2


LAYERS = {
    "linear": ("nn.Linear(64, 64)(torch.randn(400, 64)).pow(2).sum().backward()", 0.02),
    "convolution": ("nn.Conv1d(64, 64, 3)(torch.randn(40, 64, 160)).pow(2).sum().backward()", 0.15),
    "lstm": ("nn.LSTM(100, 200, 2, bidirectional=True)(torch.randn(30, 16, 100))[0].pow(2).sum().backward()", 0.35),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_margin_depends_on_the_operations_seen_and_holds(name):
    source, margin = LAYERS[name]
    ns = {"torch": torch, "nn": nn}
    assert forecast(ns, source).error_ratio == margin
    assert rise(ns, source) <= measured_rise(ns, source) <= rise(ns, source) * (1 + margin)


@pytest.mark.parametrize("name", LAYERS)
def test_on_the_virtual_accelerator_the_scratch_of_kernels_does_not_count(name):
    source, _ = LAYERS[name]
    ns = {"torch": torch, "nn": nn}
    gc.collect()
    found = forecast(ns, source, simulated=True)
    with simulate("1GiB") as device:
        exec(source, ns)
        assert found.peak == pytest.approx(device.read().peak_allocated, rel=found.error_ratio)
    assert found.error_ratio == 0.02
