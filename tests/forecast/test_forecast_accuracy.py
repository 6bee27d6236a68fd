"""The forecast against the events of the CPU allocator, as torch.profiler records them."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from covering import each_value
from forecast_lab import (
    MICRO_BATCHED,
    TRAIN,
    check_margin,
    checkpointed_transformer,
    cnn,
    forecast,
    measured_rise,
    mlp,
    namespace,
    rises,
    transformer,
)
from torch import nn

from oomdoctor.allocator.virtual import simulate
from oomdoctor.forecast import cost

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

TOLERANCE = 0.01


SOURCES = {"train": TRAIN, "micro_batched": MICRO_BATCHED}


@pytest.mark.parametrize(
    ("make", "optimizer", "source"),
    each_value([mlp, cnn, transformer, checkpointed_transformer], ["sgd", "adamw"], SOURCES),
)
def test_the_peak_is_that_of_the_real_run(make, optimizer, source):
    check_margin(lambda: namespace(make, optimizer), SOURCES[source])


CELLS = {
    "inference": "with torch.no_grad():\n    out = [model(x) for x, y in loader]\n    out = None",
    "kept_graphs": "kept = [model(x) for x, y in list(loader)[:3]]",
    "half": "big = nn.Linear(1000, 1000)\nbig.bfloat16()\nbig(torch.zeros(2000, 1000).bfloat16())",
    "gru": "nn.GRU(100, 200, batch_first=True)(torch.randn(30, 16, 100))[0].pow(2).sum().backward()",
    "new_model": "big = nn.Linear(2000, 1000)\nbig(torch.randn(64, 2000)).pow(2).sum().backward()",
    "resized": "t = torch.empty(10)\nt.resize_(1_000_000)\nu = t.view(1000, 1000) @ t.view(1000, 1000)",
    "views": "a = torch.randn(1000, 1000)\nb = a.t()[:500]\ndel a\nc = b.contiguous()",
    "batch_kept_by_graph": "x = torch.randn(512, 256)\ny = model(x * 1)\ndel x\nz = torch.ones(100_000)",
    "stateless": (
        "models = [nn.Linear(256, 64) for _ in range(4)]\n"
        "params, buffers = torch.func.stack_module_state(models)\n"
        "base = __import__('copy').deepcopy(models[0]).to('meta')\n"
        "with torch.no_grad():\n"
        "    call = lambda p, b: torch.func.functional_call(base, (p, b), (data,))\n"
        "    out = torch.vmap(call)(params, buffers)"
    ),
    "forward_derivatives": "torch.func.jvp(lambda x: model(x).pow(2).mean(), (data,), (torch.ones_like(data),))",
    "forward_derivatives_of_parameters": (
        "params = dict(model.named_parameters())\n"
        "call = lambda p: F.mse_loss(torch.func.functional_call(model, p, (data,)), torch.ones(512, 10))\n"
        "torch.func.jvp(call, (params,), ({name: torch.ones_like(p) for name, p in params.items()},))"
    ),
    "hessian": "model.eval()\ntorch.func.hessian(lambda x: model(x).pow(2).sum())(data[0, :].clone())",
    "range_loop": "for step in range(20):\n    model(data).sum().backward()\n    optimizer.step()",
}


def with_data():
    return namespace(mlp, "adamw") | {"data": torch.randn(512, 256)}


@pytest.fixture(scope="module")
def rises_of_cells():
    return rises(with_data(), CELLS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp loads what was scripted
@pytest.mark.parametrize("name", CELLS)
def test_the_peak_of_other_cells_is_that_of_the_real_run(name, rises_of_cells):
    assert rises_of_cells[name] == pytest.approx(measured_rise(with_data(), CELLS[name]), rel=TOLERANCE, abs=4096)


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
    "linear": ("nn.Linear(64, 64)(torch.randn(400, 64)).pow(2).sum().backward()", cost.MARGIN_OF_HOST),
    "convolution": (
        "nn.Conv1d(64, 64, 3)(torch.randn(40, 64, 160)).pow(2).sum().backward()",
        cost.MARGIN_OF_HOST_LAYERS,
    ),
    "lstm": (
        "nn.LSTM(100, 200, 2, bidirectional=True)(torch.randn(30, 16, 100))[0].pow(2).sum().backward()",
        cost.MARGIN_OF_HOST_LAYERS,
    ),
    "gru": ("nn.GRU(100, 120, 2)(torch.randn(20, 16, 100))[0].pow(2).sum().backward()", cost.MARGIN_OF_HOST),
}


def layers():
    return {"torch": torch, "nn": nn}


@pytest.mark.parametrize("name", LAYERS)
def test_the_margin_depends_on_the_operations_seen_and_holds(name):
    source, margin = LAYERS[name]
    found = forecast(layers(), source)
    assert found.error_ratio == margin
    assert ("what kernels need inside is an estimate" in found.basis) is (margin > cost.MARGIN_OF_HOST)
    check_margin(layers, source)


def test_the_margins_are_those_that_the_benchmark_measured():
    import forecast_report as benchmark

    found = benchmark.margins(json.loads((benchmark.RESULTS / "forecast.json").read_text())["models"])
    stated = {
        benchmark.NONE: cost.MARGIN_OF_HOST,
        benchmark.CONVOLUTION: cost.MARGIN_OF_HOST_LAYERS,
        benchmark.RECURRENT: cost.MARGIN_OF_HOST_LAYERS,
    }
    assert set(found) == set(stated)
    for kind, low in found.items():
        assert low <= stated[kind], kind


LSTM_RUNS = {
    "backward": "lstm(x)[0].pow(2).sum().backward()",
    "autocast": "with torch.autocast('cpu', torch.bfloat16):\n    y = lstm(x)[0]\ny.float().pow(2).sum().backward()",
    "no_grad": "with torch.no_grad():\n    lstm(x)",
    "checkpointed": "torch.utils.checkpoint.checkpoint(lstm, x, use_reentrant=False)[0].sum().backward()",
    "cells": "c, h = nn.LSTMCell(100, 120), None\nfor step in x:\n    h = c(step, h)\nh[0].sum().backward()",
    "three_steps": "lstm(x[:3].repeat(1, 10, 1))[0].pow(2).sum().backward()",
}


@pytest.mark.parametrize("name", LSTM_RUNS)
def test_ways_to_run_an_lstm_count(name):
    source = f"lstm, x = nn.LSTM(100, 120), torch.randn(40, 16, 100)\n{LSTM_RUNS[name]}"
    try:
        measured_rise(layers(), source)
        missing = ""
    except RuntimeError as error:  # oneDNN has no such layer for this processor
        missing = str(error).splitlines()[0]
    if missing:
        assert missing in (forecast(layers(), source).refused or "")
    else:
        check_margin(layers, source)


@pytest.mark.parametrize(("mode", "gates", "reserve"), [(2, 4, 736_000_000), (3, 3, 864_000_000)], ids=["lstm", "gru"])
def test_the_reserve_of_cudnn_is_the_published_one_and_told_as_an_estimate(mode, gates, reserve):
    # Without a GPU the operation is known by its shapes alone, and those any fake tensor has.
    source = f"""
x, h, c = torch.empty(500, 50, 123), torch.empty(4, 50, 320), torch.empty(4, 50, 320)
weights = [torch.empty({gates} * 320, size) for size in (123, 320, 320, 320, 320, 320, 320, 320)]
options = ({mode}, 320, 0, 4, False, 0.0, True, False, [], None)
out = torch.ops.aten._cudnn_rnn(x, weights, 2, None, h, c if {mode} == 2 else None, *options)
kept = out[3]
del out
"""
    found = forecast({"torch": torch}, source)
    assert found.error_ratio == 0.35
    assert ("workspace of _cudnn_rnn.default", reserve) in found.course.temporaries


@pytest.mark.parametrize("name", LAYERS)
def test_on_the_virtual_accelerator_the_scratch_of_kernels_does_not_count(name):
    source, _ = LAYERS[name]
    ns = {"torch": torch, "nn": nn}
    gc.collect()
    found = forecast(ns, source, simulated=True)
    with simulate("1GiB") as device:
        exec(source, ns)
        assert found.peak == pytest.approx(device.read().peak_allocated, rel=0.02)
    assert found.error_ratio == 0.02
