"""Shadow runs in a process that was started anew say what those in a forked copy say, and what cannot be sent is named.

Every fresh process takes seconds to load torch, so the cases that can share one do.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forecast_lab import TRAIN, forecast, mlp, namespace, nothing, open_descriptors, session
from planned import INCIDENT, MIB, besides, evidence, program, shrinking
from test_forecast_isolation import VANDAL, _digest

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import child, fresh, fresh_parcel, fresh_storages, price
from oomdoctor.forecast.nursery import Nursery
from oomdoctor.forecast.planning import make_plan
from oomdoctor.forecast.reading import Reading
from oomdoctor.model.plan import Forecast
from oomdoctor.model.session import Attempt
from oomdoctor.sandbox import walls
from oomdoctor.sandbox.card import Card

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from forecast_models import FAMILIES

BASIS = "shadow run, in a fresh process"
CHOSEN = ("MLP", "ResNet", "U-Net", "DCGAN", "LSTM", "Llama")


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = open_descriptors(), _children(), threading.active_count()
    yield
    assert (open_descriptors(), _children(), threading.active_count()) == before


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")


def _both(
    ns: dict[str, Any], cells: list[str], monkeypatch: pytest.MonkeyPatch, *, history: str = "", simulated: bool = False
) -> list[tuple[Forecast, Forecast]]:
    """Forecast each of the cells in a forked copy and in a fresh process."""
    asked, attempts = session(ns, history, simulated=simulated), [Attempt(source=cell) for cell in cells]
    gc.collect()  # garbage is collected in a forked copy, and counts in the other way
    forked = price(asked, attempts, budget=None, prepare=nothing, timeout_s=90.0)
    with monkeypatch.context() as patch:
        patch.delattr(os, "fork")
        found = price(asked, attempts, budget=None, prepare=nothing, timeout_s=90.0)
    return list(zip(forked, found, strict=True))


def _assert_alike(forked: Forecast, found: Forecast) -> None:
    assert (forked.refused, found.refused) == (None, None)
    assert (found.peak, found.reserved) == (forked.peak, forked.reserved)
    assert (found.peak_line, found.error_ratio) == (forked.peak_line, forked.error_ratio)
    assert found.course is not None
    assert forked.course is not None
    assert (found.course.at_peak, found.course.points) == (forked.course.at_peak, forked.course.points)
    assert found.basis.startswith(BASIS)
    assert "fresh" not in forked.basis


def test_six_families_need_what_they_need_in_a_forked_copy(monkeypatch):
    torch.manual_seed(0)
    ns: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    cells = []
    for number, name in enumerate(CHOSEN):
        family = FAMILIES[name]
        renamed = {}
        for role, module in family.make(False).items():
            renamed[role] = f"{role}_{number}"
            ns[renamed[role]] = module
            stem = "" if role == "model" else f"{role}_"
            ns[f"{stem}optimizer_{number}"] = torch.optim.AdamW(module.parameters(), lr=1e-3)
        ns[f"data_{number}"] = [family.data(max(family.batch // 8, 2)) for _ in range(2)]
        body = ""
        for phase in family.phases:
            optimizer, loss = f"{phase.optimizer}_{number}", phase.loss
            for role, named in renamed.items():
                loss = loss.replace(f"{role}(", f"{named}(")
            body += f"    {optimizer}.zero_grad()\n    loss = {loss}\n    loss.backward()\n    {optimizer}.step()\n"
        cells.append(f"for x, y in data_{number}:\n{body}")
    pairs = _both(ns, cells, monkeypatch)
    assert len({forked.peak for forked, _ in pairs}) == len(CHOSEN)
    for pair in pairs:
        _assert_alike(*pair)


NOTEBOOK = """
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(600, 64)
        self.head = torch.nn.Linear(64, 600, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(64, 64))

    def forward(self, tokens):
        return self.head(self.embedding(tokens) @ self.table)

def fit(model, epochs):
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = criterion(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

criterion = torch.nn.CrossEntropyLoss()
tied = Tied()
optimizer = torch.optim.AdamW(tied.parameters())
tokens = torch.randint(0, 600, (8, 64))
fit(tied, 2)
big = torch.zeros(1 << 18)
views = [big[: 1 << 17], big[1 << 17 :].view(2, -1)]
lengths = torch.tensor([9, 5, 7])
earlier = (big * tied.table.flatten()[0].requires_grad_(False)).sum() + tied.head.weight.sum()
"""

STATEFUL = {
    "a function of the notebook whose loop is cut": "fit(tied, 10_000)",
    "a class of the notebook": "other = Tied()\nother(tokens).sum().backward()",
    "tied weights": "assert tied.head.weight is tied.embedding.weight\ntied.to(torch.bfloat16)(tokens)",
    "views of one storage": "big = None\nviews.pop()\nmore = torch.zeros(1 << 18)",
    "views that are the last": "big = None\nviews.clear()\nmore = torch.zeros(1 << 18)",
    "values of few integers": "kept = torch.zeros(sum(lengths.tolist()) << 14)",
    "names that are bound anew": "tied = optimizer = None\nmore = torch.zeros(1 << 18)",
    "names that are bound anew, and a graph": "tied = optimizer = earlier = None\nmore = torch.zeros(1 << 18)",
    "a global that is rebound": "tokens = torch.zeros(64, 64, dtype=torch.long)\nfit(tied, 1)",
    "what is drawn": "import random\nkept = torch.zeros(random.randint(1, 1 << 20) + np.random.randint(1 << 20))",
    "a bool that nobody knows": "kept = torch.zeros(1 << 20) if (torch.rand(3) > 0.5).any() else torch.zeros(1 << 22)",
    "a device that is not there": "kept = tied.cuda()(tokens.cuda())",
}


def _notebook() -> dict[str, Any]:
    """Return the namespace of a notebook: its code has no file, and its classes are those of ``__main__``."""
    torch.manual_seed(0)
    ns: dict[str, Any] = {"__name__": "__main__", "torch": torch, "np": np}
    name = "<a cell of the tests of fresh processes>"
    linecache.cache[name] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(keepends=True), name)
    exec(compile(NOTEBOOK, name, "exec"), ns)
    return ns


def test_what_the_notebook_made_is_made_again(monkeypatch):
    pairs = _both(_notebook(), list(STATEFUL.values()), monkeypatch, history=NOTEBOOK, simulated=True)
    assert len({forked.peak for forked, _ in pairs}) > len(STATEFUL) - 3
    for title, (forked, found) in zip(STATEFUL, pairs, strict=True):
        try:
            _assert_alike(forked, found)
        except AssertionError as error:
            raise AssertionError(title) from error


def test_what_stayed_behind_ends_the_forecast_where_it_is_asked_for(no_fork):
    ns = _notebook() | {"pixels": torch.zeros(1 << 16)}
    cells = {
        "values = pixels.tolist()": "the values of a tensor of 256 KiB, which a fresh process is not sent",
        "earlier.backward()": "goes back through a graph that an earlier cell recorded, which is not sent",
        "kept = earlier.detach(), pixels.sum().item()": None,
        "1 / 0": "the shadow run of the cell stopped at line 1 with ZeroDivisionError: division by zero",
    }
    attempts = [Attempt(source=cell) for cell in cells]
    found = price(session(ns, ""), attempts, budget=None, prepare=nothing, timeout_s=60.0)
    for one, why in zip(found, cells.values(), strict=True):
        assert (one.refused is None) if why is None else (why in (one.refused or ""))


ON_CARD = """
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).to("{0}")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(256, 512).to("{0}")
"""
ON_CARD_STEP = """
for i in range(3):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_lies_on_a_card_is_forecast_as_what_the_cell_puts_there(no_fork, monkeypatch):
    ns: dict[str, Any] = {"torch": torch}
    whole = forecast(dict(ns), ON_CARD.format("cuda") + ON_CARD_STEP)
    exec(ON_CARD.format("cpu"), ns)
    described = fresh_storages.Storages.described
    there = [*ns["model"].parameters(), ns["x"]]
    held, keys = sum(tensor.nbytes for tensor in there), {tensor.untyped_storage()._cdata for tensor in there}

    def on_card(storages: Any) -> Iterator[Any]:
        for one, storage in zip(described(storages), storages._found, strict=True):
            yield replace(one, device="cuda:0", data=None) if storage._cdata in keys else one

    monkeypatch.setattr(fresh_storages.Storages, "described", on_card)
    found = forecast(ns, ON_CARD_STEP, card=Card(held=held))
    assert (found.refused, found.peak, found.reserved) == (None, whole.peak, whole.reserved)
    with_library = forecast(ns, ON_CARD_STEP, card=Card(held=held + MIB))
    assert with_library.peak is not None
    assert found.peak is not None
    assert with_library.peak >= found.peak
    assert with_library.course is not None
    assert ("held by libraries", MIB) in with_library.course.temporaries


class _Stubborn:
    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_what_cannot_be_sent_is_named(no_fork):
    held = {
        "lock": threading.Lock(),
        "items": (item for item in range(3)),
        "stubborn": _Stubborn(),
        "large": b"x" * (257 << 20),
        "sparse": torch.eye(3).to_sparse(),
    }
    for name in held:
        found = forecast(held, f"print({name})")
        assert found.refused is not None
        assert found.refused.startswith(f"`{name}` cannot be sent to a fresh process: "), found.refused
    # Nothing was started for these. What the cell does not read may stay, and what it has counts to the end.
    x = torch.zeros(1 << 20)
    holding = (lambda kept: (kept for _ in range(1)))(x)
    cells = ["x = 1\ny = torch.zeros(1 << 20)", "holding = x = 1\ny = torch.zeros(1 << 20)"]
    asked = session(held | {"torch": torch, "x": x, "holding": holding}, "holding = lock = x = 2")
    del x, holding
    found, freeing = price(asked, [Attempt(source=one) for one in cells], budget=None, prepare=nothing, timeout_s=60.0)
    assert (found.refused, found.basis) == (None, BASIS)
    assert found.peak is not None
    assert found.peak >= 8 << 20
    assert found.peak == freeing.peak


def test_without_a_way_back_to_the_start_there_is_no_fresh_forecast(no_fork):
    class Past:
        def restore(self) -> None: ...

    found = forecast({}, "pass", prepare=Past().restore)
    assert "the start of the cell cannot be brought back in a fresh process" in (found.refused or "")


def test_the_process_stays_as_it_was(no_fork):
    ns = namespace(mlp, "adamw") | {"random": random, "np": np, "keep": [1, 2, 3], "raw": torch.zeros(10)}
    exec(TRAIN, ns)
    before, loaded = _digest(ns), set(sys.modules)
    assert forecast(ns, VANDAL).refused is None
    assert _digest(ns) == before
    assert {name.partition(".")[0] for name in set(sys.modules) - loaded} <= {"oomdoctor", "cloudpickle"}


def test_a_cell_that_hangs_is_an_answer_in_time(no_fork, monkeypatch):
    monkeypatch.setattr("oomdoctor.forecast.nursery._LOADING_S", 0.0)
    for cell, timeout_s in (("while True: pass", 4.0), ("import os; os.read(os.pipe()[0], 1)", 0.1)):
        begin = time.monotonic()
        assert forecast({}, cell, timeout_s=timeout_s).refused == f"not priced within {timeout_s:g} s"
        assert time.monotonic() - begin < 5 * (timeout_s + 1)


ORPHANED = """
import os, sys, time
sys.path[:] = {path!r}
from types import SimpleNamespace
from oomdoctor.forecast import fresh
from oomdoctor.forecast.nursery import Nursery
from oomdoctor.model.session import Cell, Cells, Session
fresh.is_needed = lambda *_: True
bench = SimpleNamespace(name="bench", measure="", read=lambda: SimpleNamespace(simulated=False))
session = Session(namespace={{}}, cells=Cells(history=(Cell(number=1, source="pass"),)), accelerator=bench)
def nothing():
    pass
def work(shadows):
    yield "begun"
    time.sleep(60)
nursery = Nursery(session, nothing, work, budget=None, timeout_s=60.0)
coming = nursery.wait()
print(next(coming), open("/proc/self/task/%d/children" % os.getpid()).read(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_whose_parent_is_gone_ends():
    done = subprocess.run([sys.executable, "-c", ORPHANED.format(path=sys.path)], stdout=subprocess.PIPE, text=True)
    said, pid = done.stdout.split()
    assert (done.returncode, said) == (-signal.SIGKILL, "begun")
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_beside_metal_a_fresh_process_is_taken_where_that_can_be(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not fresh.is_needed(nothing)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert fresh.is_needed(nothing)
    assert not fresh.is_needed([].clear)
    monkeypatch.setattr(sys, "executable", "")
    assert not fresh.is_needed(nothing)
    monkeypatch.delattr(os, "fork")
    assert fresh.is_needed([].clear)
    assert "has neither" in (forecast({}, "pass").refused or "")


def test_a_process_that_the_system_does_not_fork_is_replaced(monkeypatch):
    def refused() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", refused)
    assert forecast({"torch": torch}, "x = torch.zeros(100 << 10)").basis == BASIS
    found = forecast({"lock": threading.Lock()}, "print(lock)")
    assert (found.refused or "").startswith("this process cannot be forked: Cannot allocate memory; `lock` cannot")


def test_a_forked_copy_that_crashes_is_replaced(monkeypatch):
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGTRAP)  # of which faulthandler says nothing

    monkeypatch.setattr(walls, "raise_limits", crash)  # the nursery's, before it has said anything
    monkeypatch.setattr(fresh, "_is_distrusted", False)
    expected = 400 << 10
    found = forecast({"torch": torch}, "x = torch.zeros(100 << 10)")
    assert (found.basis, found.refused) == (BASIS, None)
    assert found.peak is not None
    assert found.peak >= expected
    assert fresh.is_needed()


def test_a_shadow_that_crashes_is_tried_again_for_who_listens_on_the_loop(monkeypatch):
    def crash(*_args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTRAP)  # of which faulthandler says nothing

    monkeypatch.setattr(child, "_put_in_place", crash)  # of forked copies alone

    def work(shadows: Any) -> Any:
        shadows.begin(1, Attempt(source="x = 1"))
        yield shadows.next()

    async def listened() -> list[Any]:
        nursery = Nursery(session({}, "x = 1"), nothing, work, budget=None, timeout_s=30.0)
        return [message async for message in nursery.listen()]

    ((key, reading),) = asyncio.run(listened())
    assert key == 1
    assert isinstance(reading, Reading)
    assert reading.is_fresh
    assert not fresh.is_needed()


def test_a_plan_is_made_with_the_fixes_as_they_are(monkeypatch):
    fixes = [shrinking("smaller", "first", (20, 10)), shrinking("smallest", "second", (5,))]
    terms: dict[str, Any] = {"budget": besides(60 * MIB), "prepare": nothing, "time_budget_s": 60.0}
    forked = make_plan(program(), INCIDENT, evidence(), fixes, **terms)
    monkeypatch.delattr(os, "fork")
    found = make_plan(program(), INCIDENT, evidence(), fixes, **terms)
    assert [(one.label, one.forecast.peak) for one in found.candidates] == [
        (one.label, one.forecast.peak) for one in forked.candidates
    ]
    assert found.unchanged.basis.startswith(BASIS)
    assert all(one.forecast.basis.startswith(BASIS) for one in found.candidates)


BARE = """
import os, signal, sys
for name in ("fork", "forkpty", "setpgid", "killpg", "set_blocking", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "ITIMER_REAL", "setitimer", "getitimer"):
    delattr(signal, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
"""


def test_it_needs_nothing_that_posix_alone_has(no_fork, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cell = STATEFUL["a bool that nobody knows"]
    found = forecast({"torch": torch}, cell)
    assert (found.basis, found.refused) == (BASIS, None)
    assert found.peak is not None
    assert found.peak >= 4 << 22
    with pytest.raises(ForecastError, match="that no name leads to"):
        fresh_parcel.attempted(session({}, ""), nothing, Attempt(source="", live=(torch.zeros(1).zero_,)))
