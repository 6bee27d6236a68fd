"""A training loop in a module that the notebook imports, in a real kernel: from the failure to the healed cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernels import Kernel
from programs import BUDGET, DATA, PARAMETERS

MODEL = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 4096), nn.Tanh(), nn.Flatten(), nn.Linear(32 * 4096, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
TRAIN = """\
import torch.nn.functional as F


def fit(model, loader, optimizer, losses):
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
CELL = "from train import fit\nfit(model, loader, optimizer, losses)"
CODE = "(fit.__code__.co_code.hex(), fit.__code__.co_firstlineno, sorted(fit.__code__.co_names))"


DROPS = "model = nn.Sequential(*model[:2], nn.Dropout(0.2), *model[2:])"


def begin(kernel: Kernel, folder: Path) -> None:
    kernel.run(f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(folder)!r})", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(DATA, ok=True)


@pytest.fixture
def ready(kernel: Kernel, tmp_path: Path) -> Kernel:
    (tmp_path / "train.py").write_text(TRAIN)
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run("%config OomDoctor.forecast_time_s = 120", ok=True)
    begin(kernel, tmp_path)
    kernel.run(f"%oomdoctor simulate {BUDGET}", ok=True)
    return kernel


@pytest.mark.parametrize("more", ["", DROPS], ids=["as it is", "dropout"])
def test_the_loop_of_a_module_is_healed_as_the_changed_file_would_run(
    ready: Kernel, start_kernel: Callable[..., Kernel], tmp_path: Path, more: str
) -> None:
    ready.run(more, ok=True)
    ready.run(CELL, ok=False)
    case = "__import__('oomdoctor').last_case()"
    diff = ready.run("%oomdoctor diff 1", ok=True).stdout
    assert diff.startswith("--- train.py\n+++ train.py fixed\n"), diff
    ready.run("%oomdoctor fix 1", ok=True)
    assert ready.value(f"{case}.outcome.kind.value") == "healed"
    assert ready.value(f"{case}.outcome.state.value") == "clean"
    assert ready.value("len(losses)") == 4
    assert (tmp_path / "train.py").read_text() == TRAIN
    after = ready.value(f"{case}.plan.candidates[0].patch.edits[0].after")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "train.py").write_text(after)
    fresh = start_kernel()
    begin(fresh, changed)
    fresh.run(more, ok=True)
    fresh.run(CELL, ok=True)
    assert ready.value(PARAMETERS) == fresh.value(PARAMETERS)
    assert ready.value("losses") == fresh.value("losses")
    assert ready.value(CODE) == fresh.value(CODE)


def test_a_module_that_gives_tensors_other_memory_is_taken_back(ready: Kernel, tmp_path: Path) -> None:
    update = "def update(mean, new):\n    for one, other in zip(mean, new):\n        one.data = one.data + other.data\n"
    (tmp_path / "average.py").write_text(update)
    ready.run("import average, copy\nfrom train import fit\nmean, first = map(copy.deepcopy, [model] * 2)", ok=True)
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run("average.update(mean.parameters(), model.parameters())\nfit(model, loader, optimizer, losses)", ok=True)
    assert ready.value("__import__('oomdoctor').last_case().outcome.state.value") == "clean"
    assert ready.value("all(torch.equal(a, b + b) for a, b in zip(mean.parameters(), first.parameters()))")


def test_undo_puts_the_functions_back(ready: Kernel, tmp_path: Path) -> None:
    ready.run("from train import fit; own = fit.__code__", ok=True)
    before = ready.value(PARAMETERS)
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run(CELL, ok=True)
    assert ready.value("fit.__code__ is own") is False
    assert ready.value("__import__('train').fit is fit") is True
    ready.run("%oomdoctor undo", ok=True)
    assert ready.value("fit.__code__ is own") is True
    assert ready.value(PARAMETERS) == before
    assert ready.value("losses") == []
    assert (tmp_path / "train.py").read_text() == TRAIN


def test_a_retry_that_fails_puts_the_functions_back(ready: Kernel) -> None:
    ready.run("import train; own = train.fit.__code__", ok=True)
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run("train.fit(model, loader, optimizer, losses); 1 / 0", ok=False)
    case = "__import__('oomdoctor').last_case().outcome"
    assert ready.value(f"({case}.kind.value, {case}.state.value)") == ["failed", "restored"]
    assert ready.value("train.fit.__code__ is own") is True
    assert ready.value("losses") == []
