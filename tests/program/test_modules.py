"""The user's own modules are part of the program: found, patched, run as changed, and put back."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oomdoctor import fixes
from oomdoctor.evidence.code import facts
from oomdoctor.evidence.collect import unlooked
from oomdoctor.model.fix import Dose, Edit, Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.objects.named import own_modules
from oomdoctor.program import modules
from oomdoctor.program.definitions import read
from oomdoctor.program.modules import with_modules
from oomdoctor.program.training_loops import training_loops
from oomdoctor.testing import assert_heals

TRAIN = '''\
import torch.nn.functional as F

SEEN = []


def fit(model, loader, optimizer, epochs=1):
    """Train."""
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            SEEN.append(loss.item())
'''
MODEL = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = [(torch.randn(2048, 64), torch.randn(2048, 64)) for _ in range(3)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for name in [name for name in linecache.cache if name.startswith(str(tmp_path))]:
        del linecache.cache[name]


def module(folder: Path, name: str, text: str) -> Any:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    __import__(name)
    return sys.modules[name]


def cells(*sources: str) -> Cells:
    history = tuple(Cell(number=number, source=source) for number, source in enumerate(sources, 1))
    return with_modules(Cells(history=history), own_modules())


def names(found: Cells) -> list[str]:
    return [one.name for one in found.modules]


def edit(of: Any, old: str, new: str) -> Edit:
    before = Path(of.__file__).read_text()
    assert old in before
    return Edit(cell=-1, before=before, after=before.replace(old, new), replay="", file=of.__file__)


@pytest.mark.parametrize(
    "source",
    [
        "import trainer_a",
        "from trainer_a import fit",
        "def run():\n    import trainer_a as t",
        "from trainer_a import *",
    ],
)
def test_a_module_is_reached_by_whatever_import(folder: Path, source: str) -> None:
    module(folder, "trainer_a", TRAIN)
    module(folder, "not_imported", "x = 1\n")
    found = cells(source)
    assert names(found) == ["trainer_a.py"]
    assert found.failing.source == source
    assert found.modules[0].number < 0


def test_modules_of_modules_are_reached_and_installed_ones_are_not(folder: Path) -> None:
    (folder / "parts_b").mkdir()
    (folder / "parts_b" / "__init__.py").write_text("")
    (folder / "parts_b" / "inner.py").write_text("def f():\n    return 1\n")
    (folder / "parts_b" / "outer.py").write_text(
        "import json\nimport torch\nfrom .inner import f\nfrom . import inner\n"
    )
    module(folder, "parts_b.outer", "") if False else __import__("parts_b.outer")
    found = cells("import numpy, torch, oomdoctor\nfrom parts_b.outer import f")
    assert sorted(names(found)) == ["parts_b/__init__.py", "parts_b/inner.py", "parts_b/outer.py"]


def test_a_module_that_was_edited_since_is_left_out(folder: Path) -> None:
    found = module(folder, "trainer_c", TRAIN)
    Path(found.__file__).write_text("# edited\n" + TRAIN)
    assert names(cells("import trainer_c")) == []


def test_the_loop_of_a_module_is_one_of_the_failing_run(folder: Path) -> None:
    module(folder, "trainer_d", TRAIN)
    found = cells("from trainer_d import fit\nfit = fit", "fit(net, data, opt)")
    kinds = {"net": "model", "opt": "optimizer"}
    (loop,) = training_loops(read(found), kinds)
    assert (loop.cell, loop.file, loop.line, loop.function) == (found.modules[0].number, "trainer_d.py", 9, "fit")
    assert loop.in_failing_run
    assert loop.models == ("model",)
    assert dict(loop.stands_for) == {"model": "net", "optimizer": "opt"}


def test_functions_follow_wherever_they_are_bound_and_are_put_back(folder: Path) -> None:
    of = module(
        folder,
        "trainer_e",
        """\
        import functools


        def logged(function):
            @functools.wraps(function)
            def inner(*args):
                return function(*args)
            return inner


        def make(scale):
            def times(x):
                return scale * x
            return times


        @logged
        def wrapped(x):
            return x + 1


        def plain(x, by=2, *, more=0):
            return x * by + more


        class Net:
            @property
            def size(self):
                return 1

            @staticmethod
            def twice(x):
                return 2 * x

            def run(self, x):
                return super().__repr__() and x
        """,
    )
    plain, wrapped, times, net = of.plain, of.wrapped, of.make(10), of.Net()
    run, text = net.run, Path(of.__file__).read_text()
    after = (
        text.replace("scale * x", "scale * x + 1")
        .replace("x + 1\n\n\ndef plain", "helper(x) + 1\n\n\ndef plain")
        .replace("return 1", "return 7")
        .replace("by + more", "by + more + 1")
        .replace("2 * x", "math.floor(20 * x)")
        .replace("and x", "and -x")
        .replace("import functools\n", "import functools\nimport math\n\n\ndef helper(x):\n    return 100 * x\n")
    )
    change = Edit(cell=-1, before=text, after=after, replay="", file=of.__file__)
    seen = lambda: (plain(1), wrapped(1), times(1), net.size, net.twice(1), run(1))  # noqa: E731
    before = seen()
    assert before == (2, 2, 10, 1, 2, 1)
    back = modules.put_in_place(change)
    assert seen() == (3, 101, 11, 7, 20, -1)
    assert names(cells("import trainer_e")) == ["trainer_e.py"]
    assert cells("import trainer_e").modules[0].source == after
    back()
    assert seen() == before
    assert not hasattr(of, "math")
    assert not hasattr(of, "helper")
    assert cells("import trainer_e").modules[0].source == text
    assert Path(of.__file__).read_text() == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SEEN = []", "SEEN = [0]"),
        ("SEEN = []\n", ""),
        ("def fit(", "@staticmethod\ndef fit("),
        ("epochs=1", "epochs=len(SEEN)"),
        ("epochs=1", "epochs=2"),
        ("def fit(", "async def fit("),
        ("import torch.nn.functional as F\n", "import torch.nn.functional as F\nprint(F)\n"),
    ],
)
def test_what_ran_when_the_module_was_imported_is_not_changed(folder: Path, old: str, new: str) -> None:
    del folder
    assert modules.why_not(TRAIN, TRAIN.replace(old, new)) is not None


PRACTICES = """\
import math
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att, dim=-1)
        y = att @ v
        return y.transpose(1, 2).contiguous().view(b, t, c)


def evaluate(model, loader):
    correct = 0
    for x, y in loader:
        out = model(x)
        correct += (out.argmax(-1) == y).sum().item()
    return correct


def fit(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x).view(-1, 64), y.view(-1))
        loss.backward(retain_graph=True)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("fix", "dose", "line"),
    [
        ("chunked_loss", {"chunks": 2}, "loss = chunked_loss("),
        ("sdpa_attention", {}, "y = F.scaled_dot_product_attention(q, k, v)"),
        ("drop_retain_graph", {}, "loss.backward()"),
        ("no_grad_eval", {}, "with torch.no_grad():"),
        ("set_to_none", {}, "optimizer.zero_grad(set_to_none=True)"),
        ("autocast", {"dtype": "bfloat16"}, "with torch.autocast("),
        ("chunked_forward", {"chunks": 2}, "in_parts(model, 2)(x)"),
    ],
)
def test_practices_of_a_module_are_mended_in_its_file(folder: Path, fix: str, dose: dict[str, Any], line: str) -> None:
    of = module(folder, f"practices_{fix}", PRACTICES)
    model = of.Attention(64, 4)
    optimizer = torch.optim.Adam(model.parameters())
    found = cells(
        f"import practices_{fix} as p\nmodel = p.Attention(64, 4)\nopt = make()",
        "p.fit(model, data, opt)\np.evaluate(model, data)",
    )
    objects = [("model", model)], [("opt", optimizer)]
    code = facts(found, {"model": model, "opt": optimizer}, *objects, detectors=fixes.detectors())
    patch = fixes.get(fix).patch(found, replace(unlooked(), code=code), Dose.of(**dose))
    assert isinstance(patch, Patch), patch
    (edit,) = patch.edits
    assert edit.name == f"practices_{fix}.py"
    assert any(one.startswith("+") and line in one for one in patch.diff().splitlines())
    x, before = torch.randn(2, 8, 64), of.fit.__code__
    there = model(x)
    back = modules.put_in_place(edit)
    torch.testing.assert_close(model(x), there)
    back()
    assert of.fit.__code__ is before


def test_micro_batch_of_a_module_heals(folder: Path) -> None:
    of = module(folder, "trainer_f", TRAIN)
    own = of.fit.__code__
    namespace: dict[str, Any] = {"__name__": "__main__"}
    case = assert_heals(
        "micro_batch",
        MODEL,
        "from trainer_f import fit\nfit(model, loader, optimizer)",
        budget="64MiB",
        namespace=namespace,
    )
    assert case.incident.inner is not None
    assert case.incident.inner.file == "trainer_f.py"
    patch = next(one.patch for one in case.plan.candidates if one.fix == "micro_batch")
    diff = patch.diff()  # type: ignore[union-attr]
    assert diff.startswith("--- trainer_f.py\n+++ trainer_f.py fixed\n")
    assert of.fit.__code__ is not own
    assert len(of.SEEN) == 3
    assert (folder / "trainer_f.py").read_text() == TRAIN


def test_a_module_that_the_cell_imports_itself_is_imported_as_changed(folder: Path) -> None:
    path = folder / "trainer_g.py"
    path.write_text(TRAIN)
    with modules.importing({str(path): TRAIN.replace("SEEN = []", "SEEN = [1]")}):
        import trainer_g

    assert trainer_g.SEEN == [1]
    assert type(trainer_g.__spec__.loader).__name__ == "SourceFileLoader"
    del sys.modules["trainer_g"]
    import trainer_g as again

    assert again.SEEN == []
