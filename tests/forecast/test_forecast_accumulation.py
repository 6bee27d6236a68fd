"""Gradients of what was used more than once are added up in place, where nobody else holds them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forecast_lab import measured_rise, rises
from torch import nn

from oomdoctor.forecast import fake_tensors

BEGIN = """
table = nn.Embedding(4000, 64)
layer = nn.Linear(64, 64)
data = torch.randn(10_000, 64)
"""
USES = {
    "tied": "F.linear(table(torch.randint(9, (8,))), table.weight).sum().backward()",
    "tied_under_autocast": (
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    y = F.linear(table(torch.randint(9, (8,))), table.weight)\n"
        "y.float().sum().backward()"
    ),
    "of_operations": "x = data.requires_grad_() * 1\nz = x.sin() + x.relu() + x.cos()\n(z * z).sum().backward()",
    "of_leaves": "x = data.requires_grad_()\nz = x.sin() + x.relu() + x.cos()\n(z * z).sum().backward()",
    "of_blocks": "x = data\nfor _ in range(3):\n    x = x + layer(x).relu()\nx.pow(2).sum().backward()",
    "held_by_a_hook": (
        "held = []\nx = data.requires_grad_() * 1\nz = x.sin() + x.cos()\n"
        "a = z * 1\na.register_hook(held.append)\n((a + z) * z).sum().backward()"
    ),
    "that_are_kept": (
        "x = data.requires_grad_() * 1\nz = x.sin() + x.cos()\nz.retain_grad()\nw = z.sin() + z.cos() + z.exp()\n"
        "(w * w).sum().backward()"
    ),
    "of_graphs": "x = data.requires_grad_() * 1\nz = x.sin() + x.cos()\n(z * z).sum().backward(create_graph=True)",
    "by_grad": "x = data.requires_grad_()\nz = x.sin() + x.relu()\nfound = torch.autograd.grad((z * z).sum(), x)",
    "of_own_functions": (
        "class Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        return grad + grad.sin()\n"
        "x = data.requires_grad_() * 1\nz = Twice.apply(x) + x.cos() + Twice.apply(x)\n(z * z).sum().backward()"
    ),
    "inside_of_nodes": (
        "x = data.requires_grad_() * 1\nz = torch.logaddexp(x, x.sin()) + x.lerp(x.cos(), x)\nz.sum().backward()"
    ),
}


def program() -> dict[str, Any]:
    return {"torch": torch, "nn": nn, "F": nn.functional}


@pytest.fixture(scope="module")
def rises_of_uses():
    return rises(program(), {name: BEGIN + use for name, use in USES.items()})


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", USES)
def test_the_peak_is_that_of_the_real_run(name, rises_of_uses):
    ns = program()
    assert rises_of_uses[name] == pytest.approx(measured_rise(ns, BEGIN + USES[name]), rel=0.01)
    # A gradient with a graph leads to what it is of, and a function of one's own to the names that it is defined among:
    # by ways that no collector sees.
    ns["data"].grad = None
    ns.clear()


def test_it_is_known_what_a_gradient_that_nobody_else_holds_looks_like():
    assert fake_tensors.counts_alone() is not None


FIRST = """
import sys
sys.path[:0] = [{tests!r}]
import torch
from forecast_lab import nothing, session
from oomdoctor.forecast.dry_runs import DryRuns
from oomdoctor.model.session import Attempt

def work(dry_runs):
    dry_runs.begin(None, Attempt(source="x = torch.randn(9, requires_grad=True)\\n(x * x).sum().backward()"))
    yield dry_runs.next()[1].forecast.refused

assert "oomdoctor.forecast.dry_run" not in sys.modules
runs = DryRuns(session({{"torch": torch}}, ""), nothing, budget=None, timeout_s=60)
copy = runs.in_copy(work, waits=False)
assert list(copy.wait()) == [None], copy.failed
assert copy.finished, copy.failed
"""


def test_a_copy_loads_by_itself_what_it_needs():
    script = FIRST.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
