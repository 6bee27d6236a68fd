"""Branches that a loop takes every so often and that leave something behind: each time counts."""

import collections
import copy
import gc

import pytest
import torch
from forecast_lab import STEP, forecast, measured_rise, rise
from torch import nn
from torch.nn import functional

from oomdoctor.forecast import windows

KEEP = "kept.append(functional.mse_loss(model(x), y))"
ONCE, TWICE = STEP.format(indent=" " * 4), STEP.format(indent=" " * 8)

CELLS = {
    "every tenth step": f"for s in range(100):{ONCE}    if s % 10 == 0:\n        {KEEP}",
    "the end of every tenth step": f"for s in range(100):{ONCE}    if s % 10 == 9:\n        {KEEP}",
    "of a long loop": f"for s in range(600):{ONCE}    if s % 10 == 0:\n        {KEEP}",
    "every other step": f"for s in range(600):{ONCE}    if s % 2 == 0:\n        {KEEP}",
    "from some step on": f"for s in range(400):{ONCE}    if s >= 250:\n        {KEEP}",
    "some steps and all": (
        f"for s in range(300):{ONCE}    if s % 4 == 0:\n        {KEEP}\n    kept.append(out.detach())"
    ),
    "two periods": (
        f"for s in range(600):{ONCE}    if s % 10 == 0:\n        {KEEP}\n"
        "    if s % 30 == 0:\n        kept.append(torch.zeros(20_000))"
    ),
    "in every epoch": (
        f"for epoch in range(6):\n    for s in range(100):{TWICE}        if s % 10 == 0:\n            {KEEP}"
    ),
    "over all epochs": (
        f"done = 0\nfor epoch in range(12):\n    for s in range(40):{TWICE}"
        f"        done += 1\n        if done % 10 == 0:\n            {KEEP}"
    ),
    "some epochs": (f"for epoch in range(40):\n    for s in range(2):{TWICE}    if epoch % 5 == 0:\n        {KEEP}"),
    "the last three": f"for s in range(200):{ONCE}    if s % 10 == 0:\n        {KEEP}\n        kept = kept[-3:]",
    "as many as a deque holds": (
        f"kept = collections.deque(maxlen=3)\nfor s in range(200):{ONCE}"
        "    if s % 10 == 0:\n        kept.append(torch.zeros(50_000))"
    ),
    "a copy that the next one replaces": (
        f"for s in range(600):{ONCE}    if s % 10 == 0:\n        best = copy.deepcopy(model)"
    ),
}


def program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return {
        "torch": torch,
        "collections": collections,
        "copy": copy,
        "functional": functional,
        "kept": [],
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "x": torch.randn(32, 64),
        "y": torch.randn(32, 64),
    }


@pytest.mark.parametrize("name", CELLS)
def test_what_a_branch_leaves_behind_counts_each_time_that_it_is_taken(name, monkeypatch):
    monkeypatch.setattr(windows, "_MOST_OPERATIONS", 600)  # of a loop that is longer than can be followed
    found, ns = rise(program(), CELLS[name]), program()
    gc.collect()
    assert found == pytest.approx(measured_rise(ns, CELLS[name]), rel=0.04)


def test_of_a_loop_of_unknown_length_it_says_how_fast_it_grows():
    cell = f"s = 0\nwhile True:{ONCE}    s += 1\n    if s % 10 == 0:\n        kept.append(torch.zeros(2_560))"
    found = forecast(program(), cell)
    assert found.at_least
    assert "grows by 1.00 KiB per step" in found.basis
