"""What a forecast did not see, or saw otherwise than it will be, it says; and then nothing is said to fit."""

import time

import pytest
import torch
from forecast_lab import forecast, mlp, namespace
from torch import nn

from oomdoctor.model.plan import Verdict

PLENTY = 1 << 40
COMPILED = """
@torch.compile
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss
for x, y in loader:
    step(x, y)
"""
SPARSE = """
table = nn.Embedding(5000, 64, sparse=True)
optimizer = torch.optim.SparseAdam(table.parameters())
for step in range(3):
    optimizer.zero_grad()
    table(torch.randint(0, 5000, (256, 20))).sum().backward()
    optimizer.step()
"""
FIT = """
def fit(steps):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
torch, keep["fit"] = keep["torch"], fit
"""
TRAINED = """
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    model(torch.ones(4096, 512)).sum().backward()
    optimizer.step()
sample, drawn = torch.ones(1, 512), []
while True:
    sample = torch.relu(sample @ model.weight.detach())
    {kept}
"""


def test_what_goes_on_for_long_after_a_training_is_not_waited_for():
    begun = time.monotonic()
    found = forecast({"torch": torch}, TRAINED.format(kept=""), timeout_s=100.0)
    assert time.monotonic() - begun < 50.0
    assert found.peak > 2 * (4096 * 512 * 4)
    assert found.peak_line == 6
    assert not found.at_least
    assert "may be larger in steps that were not seen" in found.basis


def test_where_it_needs_more_and_more_the_training_is_the_least():
    found = forecast({"torch": torch}, TRAINED.format(kept="drawn.append(torch.ones(1 << 20))"), timeout_s=6.0)
    assert found.peak > 2 * (4096 * 512 * 4)
    assert found.at_least
    assert "what comes after the training is not seen" in found.basis


def test_what_is_compiled_is_said_to_count_as_if_it_were_not():
    assert "what is compiled counts as if it were not" in forecast(namespace(mlp), COMPILED).basis


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch._dynamo loads what was scripted
def test_so_is_what_an_earlier_cell_compiled_where_it_runs():
    ns = namespace(mlp)
    exec("@torch.compile\ndef twice(x):\n    return x * 2\nfaster = torch.compile(model)", ns)
    for cell in ("out = twice(torch.ones(1000))", "out = faster(torch.ones(100, 256))"):
        found = forecast(ns, cell)
        assert found.refused is None
        assert "what is compiled" in found.basis
    assert "what is compiled" not in forecast(ns, "out = model(torch.ones(100, 256))").basis


def test_what_is_only_decorated_and_never_runs_is_not_mentioned():
    cell = "@torch.compile\ndef twice(x):\n    return x * 2\nout = torch.ones(1000)"
    assert "compiled" not in forecast({"torch": torch}, cell).basis
    ns = {"torch": torch, "kept": torch.compiler.disable(torch.relu)}
    assert "compiled" not in forecast(ns, "out = kept(torch.ones(1000))").basis


def test_with_sparse_gradients_nothing_is_said_to_fit():
    found = forecast({"torch": torch, "nn": nn}, SPARSE, budget=PLENTY)
    assert "sparse" in found.basis
    assert found.verdict is Verdict.UNKNOWN


def test_a_library_that_was_left_in_its_training_is_not_said_to_fit():
    ns = {"torch": torch}
    exec(FIT, {"__name__": "library", "keep": ns})
    found = forecast(ns, "fit(10)", budget=PLENTY)
    assert "is not seen" in found.basis
    assert found.verdict is Verdict.UNKNOWN
    assert forecast(ns, "fit(10)", budget=10).verdict is Verdict.TOO_LARGE
    assert forecast(ns, "fit(1)", budget=PLENTY).verdict is Verdict.FITS
