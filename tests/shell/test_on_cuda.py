"""CUDA's own build of PyTorch in real kernels: a cell runs out, is diagnosed, healed and taken back, on many cards.

The cards are those of `tests/stubcuda`, which `make test-cuda` builds: PyTorch's allocator is the real one on them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kernel_forks
import pytest
from kernels import Kernel, Reply

MIB = 1 << 20


def has_stub() -> bool:
    try:
        return bool(version("stubcuda"))
    except PackageNotFoundError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_stub(), reason="torch has no stub to run on")]

SETUP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,))), batch_size=4096)
layers = nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
"""
TRAIN = """\
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
for x, y in loader:
    x, y = x.cuda(), y.cuda()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
FEW = """\
%load_ext oomdoctor
%config OomDoctor.forecast_time_s = 90
from oomdoctor import fixes
fixes.catalogue = lambda few={name: fixes.get(name) for name in ("micro_batch", "chunked_forward")}: few
"""
"""Few changes, so that few forecasts are made."""
LAST = "__import__('oomdoctor').last_case().to_dict()"
DIGEST = "[float(p.detach().cpu().double().sum()) for p in model.parameters()] + [len(optimizer.state)]"


@dataclass(frozen=True)
class Card:
    """A card, and what else is set.

    Attributes:
        free: what the program can have of it, in MiB.
        fraction: of the card that this process may have.
        beside: what another process holds, in MiB.
    """

    cc: str
    sms: int
    free: int
    context: int = 0
    fraction: float = 1.0
    beside: int = 0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return int((self.free + self.beside) / self.fraction) + self.context * (2 if self.beside else 1)

    @property
    def env(self) -> dict[str, str]:
        return {
            "STUBCUDA_CC": self.cc,
            "STUBCUDA_SMS": str(self.sms),
            "STUBCUDA_MEM": f"{self.total}MiB",
            "STUBCUDA_CONTEXT": f"{self.context}MiB",
            "STUBCUDA_COMPUTE": "1",
            **self.settings,
        }


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CARDS = {
    "T4": Card(cc="7.5", sms=40, free=208),
    "T4, expandable segments": Card(cc="7.5", sms=40, free=208, settings=EXPANDABLE),
    "A100 with a context": Card(cc="8.0", sms=108, free=208, context=400),
    "A100 that another process uses": Card(cc="8.0", sms=108, free=208, context=100, beside=200),
    "half of an A100": Card(cc="8.0", sms=108, free=208, fraction=0.5),
    "H100, expandable segments": Card(cc="9.0", sms=132, free=272, settings=EXPANDABLE),
}


@contextmanager
def another_process(card: Card, shared: Path) -> Iterator[dict[str, str]]:
    """Hold what the other process holds; give the variables by which both are on one card."""
    env = {**card.env, "STUBCUDA_SHARED": str(shared)}
    code = f"import torch; x = torch.empty({card.beside} << 20, dtype=torch.uint8, device='cuda'); print(1); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, env={**os.environ, **env}, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        yield env
        holder.kill()


def of_oomdoctor(reply: Reply) -> list[str]:
    """What stands on stderr, but for what PyTorch's allocator says of each failed allocation by itself."""
    return [line for line in reply.stderr.splitlines() if "CUDACachingAllocator.cpp" not in line]


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest) -> Card:
    return CARDS[request.param]


@pytest.fixture
def kernel(card: Card, tmp_path: Path) -> Iterator[Kernel]:
    with another_process(card, tmp_path / "cards") as env:
        started = Kernel(env if card.beside else card.env, start=kernel_forks.started)
        yield started
        started.stop()


@pytest.mark.timeout(600)
def test_a_cell_is_diagnosed_healed_and_taken_back(card: Card, kernel: Kernel) -> None:
    kernel.run(FEW, ok=True)
    kernel.run(SETUP, ok=True)
    if card.fraction < 1:
        kernel.run(f"torch.cuda.set_per_process_memory_fraction({card.fraction})", ok=True)
    before = kernel.value(DIGEST)
    failed = kernel.run(TRAIN, timeout=300, ok=False)
    assert failed.errors[0]["ename"] == "OutOfMemoryError"
    assert of_oomdoctor(failed) == []
    case = kernel.value(LAST)
    assert (case["incident"]["family"], case["incident"]["device"]) == ("cuda_oom", "cuda:0")
    (device,) = (one for one in case["evidence"]["devices"] if one["name"] == "cuda:0")
    assert device["total"] == card.total * MIB
    assert device["cap"] == (None if card.fraction == 1 else int(card.total * MIB * card.fraction))
    assert (device["context"], device["elsewhere"]) == (
        card.context * MIB,
        (card.beside + card.context) * MIB if card.beside else 0,
    )
    census = case["evidence"]["census"]
    assert census["accounted_ratio"] > 0.99
    assert census["roles"]["workspace"] > 0
    assert [fix["forecast"]["basis"] for fix in case["fixes"]] == ["dry run"] * len(case["fixes"])
    healed = kernel.run("%oomdoctor retry", timeout=300, ok=True)
    assert of_oomdoctor(healed) == []
    outcome = kernel.value(LAST)["outcome"]
    assert (outcome["kind"], outcome["state"]) == ("healed", "clean")
    assert outcome["checked"].startswith("the same over 2 steps of ")
    assert outcome["peak"] <= card.free * MIB
    assert kernel.value("len(optimizer.state)") == 6
    assert kernel.value(DIGEST) != before
    kernel.run("%oomdoctor undo", ok=True)
    assert kernel.value(DIGEST) == before
    report = kernel.run("%memreport", ok=True)
    assert of_oomdoctor(report) == []
    assert "workspaces of cuBLAS" in report.text
    if card.cc == "8.0":
        return  # a plan of every kind of card, and not of each
    plan = kernel.run(f"%%memplan\n{TRAIN}", timeout=300, ok=True)
    assert of_oomdoctor(plan) == []
    assert "dry run" in plan.text


@pytest.mark.timeout(600)
def test_what_a_trial_in_host_memory_refutes_is_not_made() -> None:
    kernel = Kernel(CARDS["T4"].env, start=kernel_forks.started)
    try:
        kernel.run(FEW.replace('"micro_batch", "chunked_forward"', '"micro_batch",'), ok=True)
        kernel.run(SETUP, ok=True)
        before = kernel.value(DIGEST)
        coupled = "    z = model(x)\n    loss = criterion(z - z.mean(0), y)"
        kernel.run(TRAIN.replace("    loss = criterion(model(x), y)", coupled), timeout=300, ok=False)
        kernel.run("%oomdoctor retry", timeout=300)
        outcome = kernel.value(LAST)["outcome"]
        assert (outcome["kind"], outcome["state"]) == ("refused", "restored")
        assert "results differ" in outcome["why"]
        assert kernel.value(DIGEST) == before
    finally:
        kernel.stop()


PIECES = "import torch\n" + "".join(
    f"passing = torch.zeros({30 + 2 * step} << 18, device='cuda')\ndel passing\n"
    f"kept_{step} = torch.ones(2 << 18, device='cuda')\n"
    for step in range(5)
)
"""A piece of 2 MiB is kept in the first segment of 30 MiB, so that what passes, 38 MiB in the end, needs another."""


@pytest.mark.timeout(300)
def test_a_cell_that_leaves_the_pool_in_pieces_is_healed_by_segments_that_expand() -> None:
    kernel = Kernel(Card(cc="8.0", sms=108, free=64).env, start=kernel_forks.started)
    try:
        kernel.run(FEW.replace('"micro_batch", "chunked_forward"', '"expandable_segments",'), ok=True)
        kernel.run("import torch", ok=True)
        kernel.run(PIECES, ok=False)
        kernel.run("%oomdoctor retry", timeout=150, ok=True)
        case = kernel.value(LAST)
        assert (case["outcome"]["kind"], case["outcome"]["state"]) == ("healed", "clean")
        assert "dry run" in case["fixes"][0]["forecast"]["basis"]
        assert kernel.value("float(sum(kept.sum() for kept in (kept_0, kept_1, kept_2, kept_3, kept_4)))") == 5 << 19
        kernel.run("%oomdoctor undo", ok=True)
        assert kernel.value("[name for name in globals() if name.startswith('kept')]") == []
        assert kernel.value("torch.cuda.memory_allocated()") == 0
    finally:
        kernel.stop()


def test_a_script_is_healed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{SETUP}\ndef train():\n{textwrap.indent(TRAIN, '    ')}\ntrain()\n")
    command = [sys.executable, "-m", "oomdoctor", "run", "--json", str(tmp_path / "case.json"), str(script)]
    env = {**os.environ, **CARDS["T4"].env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "case.json").read_text())["outcome"]
    assert (outcome["kind"], outcome["state"]) == ("healed", "clean")
