"""Programs that look as if their batches could be taken in parts: what would differ is never made, in a real shell.

Each is run out of memory on the virtual accelerator with automatic retries. Where it is healed, it has to leave the
weights of the cell run with memory enough; where it is not, those of its start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from state_shell import besides, cleared, known, run, started

from oomdoctor import fixes
from oomdoctor.model.case import OutcomeKind
from oomdoctor.model.fix import Fix, Patch
from oomdoctor.model.unavailable import Refused

BUDGET: Final = "24MiB"
HEAD: Final = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
"""
DATA: Final = "loader = DataLoader(TensorDataset(X, Y), batch_size=6000)\n"
OPTIMIZER: Final = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
LABELS: Final = "X, Y = torch.randn(12001, 64), torch.randint(0, 10, (12001,))\n"
CLASSES: Final = f"{HEAD}model = nn.Sequential(body, nn.Linear(512, 10))\n{LABELS}{DATA}{OPTIMIZER}"
STEP: Final = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    optimizer.step()
"""
PLAIN: Final = STEP.format(loss="F.cross_entropy(model(x), y)")
TOKENS: Final = (
    f"{HEAD}model = nn.Sequential(body, nn.Linear(512, 10))\n"
    "X, Y = torch.randn(2000, 7, 64), torch.randint(0, 10, (2000, 7))\n"
    "Y[torch.arange(7) >= 1 + torch.randint(0, 7, (2000, 1))] = -100\n"
)

LATER: Final = """\
history = []
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
        optimizer.step()
        history.append(loss.item())
"""
WEIGHTED: Final = """\
def weighted(out, y):
    weight = 1.0 + y
    return (weight * F.cross_entropy(out, y, reduction='none')).sum() / weight.sum()
"""
IN_A_FUNCTION: Final = """\
def train():
    for x, y in loader:
        loss = weighted(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
train()
"""
DECEIVERS: Final = {
    "MSELoss of (N, 1) against (N,)": (
        (
            f"{HEAD}model = nn.Sequential(body, nn.Linear(512, 1))\nX = torch.randn(12001, 64)\nY = X.sum(1)\n"
            f"criterion = nn.MSELoss()\n{DATA}{OPTIMIZER}"
        ),
        STEP.format(loss="criterion(model(x), y)"),
    ),
    "labels to be passed over that come from a file": (
        (
            f"{TOKENS}torch.save(Y, FILE)\nloader = DataLoader(TensorDataset(X, torch.load(FILE)), batch_size=1000)\n"
            f"criterion = nn.CrossEntropyLoss()\n{OPTIMIZER}"
        ),
        STEP.format(loss="criterion(model(x).flatten(0, 1), y.flatten())"),
    ),
    "negatives of the batch, by distances": (
        (
            f"{CLASSES}def contrast(z, y):\n    apart = torch.cdist(z, z)\n"
            "    return (apart * (y[:, None] == y)).mean() + (1 - apart).clamp(min=0).mean()\n"
        ),
        STEP.format(loss="contrast(model(x), y)"),
    ),
    "uniformity of all pairs": (
        (
            f"{CLASSES}def uniformity(z):\n"
            "    near = torch.pdist(F.normalize(z, dim=1)).square()\n    return (-2 * near).exp().mean().log()\n"
        ),
        STEP.format(loss="F.cross_entropy(model(x), y) + uniformity(model(x))"),
    ),
    "a hook that clamps gradients": (
        f"{CLASSES}for p in model.parameters():\n    p.register_hook(lambda g: g.clamp(-1e-4, 1e-4))\n",
        PLAIN,
    ),
    "a hook that logs gradients": (
        (
            f"{CLASSES}norms = []\n"
            "for p in model.parameters():\n    p.register_hook(lambda g: norms.append(float(g.norm())))\n"
        ),
        PLAIN,
    ),
    "a hook that normalises what is accumulated": (
        (
            f"{CLASSES}def normalise(p):\n    p.grad = p.grad / (p.grad.norm() + 1e-8)\n\n\n"
            "for p in model.parameters():\n    p.register_post_accumulate_grad_hook(normalise)\n"
        ),
        PLAIN,
    ),
    "a backward that couples the batch": (
        (
            f"{HEAD}class Centred(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, x):\n        return x.clone()\n\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g - 0.5 * g.mean(0)\n\n\n"
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.body, self.head = body, nn.Linear(512, 10)\n\n"
            "    def forward(self, x):\n        return self.head(Centred.apply(self.body(x)))\n\n\n"
            f"model = Net()\n{LABELS}{DATA}{OPTIMIZER}"
        ),
        PLAIN,
    ),
    "experts with a capacity": (
        (
            f"{HEAD}class Experts(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.router = nn.Linear(64, 4)\n"
            "        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n\n"
            "    def forward(self, x):\n        share, chosen = self.router(x).softmax(-1).max(-1)\n"
            "        out, capacity = torch.zeros_like(x), len(x) // 4\n"
            "        for at, expert in enumerate(self.experts):\n"
            "            rows = (chosen == at).nonzero().squeeze(1)[:capacity]\n"
            "            out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])\n        return out\n\n\n"
            f"model = nn.Sequential(Experts(), body, nn.Linear(512, 10))\n{LABELS}{DATA}{OPTIMIZER}"
        ),
        PLAIN,
    ),
    "mse_loss bound to something else": (
        (
            f"{HEAD}model = nn.Sequential(body, nn.Linear(512, 10))\n"
            f"X, Y = torch.randn(12001, 64), torch.randn(12001, 10)\n{DATA}{OPTIMIZER}"
            "F.mse_loss = lambda out, target: (out - target).square().mean().sqrt()\n"
        ),
        STEP.format(loss="F.mse_loss(model(x), y)"),
    ),
    "a weight for each sample": (f"{CLASSES}{WEIGHTED}", STEP.format(loss="weighted(model(x), y)")),
    "a warm-up from nothing": (
        (
            f"{CLASSES}{WEIGHTED}from torch.optim.lr_scheduler import LambdaLR\n"
            "scheduler = LambdaLR(optimizer, lambda step: float(step > 1))\n"
        ),
        IN_A_FUNCTION,
    ),
    "a penalty over the batch after a warm-up": (
        f"{CLASSES}def penalty(out, n):\n    return out.logsumexp(0).mean() if n > 2 else 0.0\n",
        LATER.format(loss="(lambda out: F.cross_entropy(out, y) + penalty(out, len(history)))(model(x))"),
    ),
    "a weight that grows after a warm-up": (
        (
            f"{CLASSES}class Ramp:\n    def __call__(self):\n        return max(0, len(history) - 2) / 2\n\n\n"
            "ramp = Ramp()\n"
            "def balance(out):\n    share = out.softmax(1).mean(0)\n    return (share * share.log()).sum()\n"
        ),
        LATER.format(loss="(lambda out: F.cross_entropy(out, y) + ramp() * balance(out))(model(x))"),
    ),
    "a model that standardises later": (
        (
            f"{HEAD}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.body, self.head = body, nn.Linear(512, 10)\n\n"
            "    def forward(self, x):\n        h = self.body(x)\n"
            "        if len(history) > 2:\n            h = h / (1 + h.std(0, unbiased=False))\n"
            "        return self.head(h)\n\n\n"
            f"history = []\nmodel = Net()\n{LABELS}{DATA}{OPTIMIZER}"
        ),
        LATER.format(loss="F.cross_entropy(model(x), y)"),
    ),
    "a corpus beside the model": (
        (
            f"{CLASSES}{WEIGHTED}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)\n"
            "all_docs = [torch.randint(0, 9999, (50,)).tolist() for _ in range(2000)]\n"
        ),
        IN_A_FUNCTION,
    ),
    "a mean over tokens in ragged parts": (
        (
            f"{TOKENS}loader = DataLoader(TensorDataset(X, Y), batch_size=1000)\n{OPTIMIZER}"
            "def token_mean(out, y):\n    kept = y != -100\n    return F.cross_entropy(out[kept], y[kept])\n"
        ),
        STEP.format(loss="token_mean(model(x), y)"),
    ),
}


@pytest.fixture(scope="module")
def module_shell() -> Iterator[InteractiveShell]:
    with started("micro_batch") as made:
        yield made


@pytest.fixture
def shell(module_shell: InteractiveShell) -> Iterator[InteractiveShell]:
    mse_loss = torch.nn.functional.mse_loss
    with cleared(module_shell):
        yield module_shell
    torch.nn.functional.mse_loss = mse_loss


def weights(shell: InteractiveShell) -> list[Any]:
    return [parameter.detach().clone() for parameter in shell.user_ns["model"].parameters()]


def ends(shell: InteractiveShell, setup: str, cell: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the weights at the start, those that the cell leaves with memory enough, and those after its failure."""
    assert run(shell, setup)[0].success
    start = weights(shell)
    assert run(shell, cell)[0].success
    wanted = weights(shell)
    shell.run_cell("del loader, optimizer, model")
    assert run(shell, setup)[0].success
    run(shell, f"%oomdoctor simulate {besides(BUDGET)}")
    run(shell, "%oomdoctor auto exact")
    run(shell, cell)
    return start, wanted, weights(shell)


def alike(one: list[Any], other: list[Any]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("program", DECEIVERS)
def test_a_program_that_deceives_is_not_healed_into_a_wrong_state(
    shell: InteractiveShell, program: str, tmp_path: Path
) -> None:
    setup, cell = DECEIVERS[program]
    start, wanted, found = ends(shell, setup.replace("FILE", repr(str(tmp_path / "labels.pt"))), cell)
    assert known().incident.is_oom
    assert alike(found, wanted if known().outcome.kind is OutcomeKind.HEALED else start)


def test_an_honest_program_is_healed(shell: InteractiveShell) -> None:
    """And what was compared is told."""
    _, wanted, found = ends(shell, CLASSES, PLAIN)
    assert known().outcome.kind is OutcomeKind.HEALED, known().outcome
    assert known().outcome.checked.startswith("the same over 2 steps of ")
    assert alike(found, wanted)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ("torch.einsum('i->', F.cross_entropy(model(x), y, reduction='none'))", ""),
        ("F.cross_entropy(model(x), y)", " * (counted / (y != -100).sum())"),
    ],
    ids=["a sum", "a mean over what counts"],
)
def test_what_the_loss_of_a_part_weighs_is_found_by_trying(shell: InteractiveShell, loss: str, weight: str) -> None:
    """And the diff is that of what was found."""
    setup = f"{CLASSES}Y[::3] = -(10**2)\n".replace("lr=0.1", "lr=1e-5")
    _, wanted, found = ends(shell, setup, STEP.format(loss=loss))
    assert known().outcome.kind is OutcomeKind.HEALED, known().outcome
    (made,) = (one for one in known().plan.candidates if one.label in known().outcome.fixes)
    weighed = re.findall(r"loss = loss(.*)\n", made.patch.edits[-1].after)
    assert weighed == ([weight] if weight else []), made.patch.edits[-1].after
    assert alike(found, wanted)


@pytest.mark.parametrize(
    "effect",
    [
        "global bank\n    bank = torch.cat([bank, loss.detach()[None]])",
        "logging.getLogger('training').warning('loss %s', loss.item())",
        "os.environ['LOSSES'] = os.environ.get('LOSSES', '') + '.'",
    ],
    ids=["a tensor that grows", "a log", "the environment"],
)
def test_what_is_done_for_each_part_is_seen_wherever_it_is_left(shell: InteractiveShell, effect: str) -> None:
    function = f"def measured(out, y):\n    loss = F.cross_entropy(out, y)\n    {effect}\n    return loss\n"
    setup = f"import logging, os\n{CLASSES}bank = torch.zeros(1)\n{function}"
    start, _, found = ends(shell, setup, STEP.format(loss="measured(model(x), y)"))
    assert known().outcome.kind is OutcomeKind.REFUSED, known().outcome
    assert alike(found, start)


DROPS: Final = CLASSES.replace("nn.Linear(512, 10)", "nn.Dropout(0.2), nn.Linear(512, 10)")


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("F.cross_entropy(model(x), y)", OutcomeKind.HEALED),
        ("F.cross_entropy(model(x) - model(x).mean(0), y)", OutcomeKind.REFUSED),
    ],
)
def test_dropout_is_that_of_the_whole_batch(shell: InteractiveShell, loss: str, kind: OutcomeKind) -> None:
    start, wanted, found = ends(shell, DROPS, STEP.format(loss=loss))
    assert known().outcome.kind is kind, known().outcome
    assert alike(found, wanted if kind is OutcomeKind.HEALED else start)


def test_beside_random_numbers_that_fall_otherwise_nothing_may_differ(shell: InteractiveShell) -> None:
    few = {"chunked_forward": fixes.get("chunked_forward")}
    with mock.patch.object(fixes, "catalogue", return_value=few):
        ends(shell, DROPS, PLAIN)
        assert known().outcome.kind is OutcomeKind.OFFERED, "it changes results, which nobody has asked for"
        run(shell, "%oomdoctor fix chunked_forward")
    assert known().outcome.kind is OutcomeKind.HEALED, known().outcome
    assert "without dropout" in known().outcome.checked


SABOTAGE: Final = {
    "the weight of the last part": lambda text: text.replace("len(micro_x) / len(x)", "1 / len(x.chunk(32))"),
    "a scheduler's step": lambda text: text.replace("    scheduler.step()\n", ""),
    "a print": lambda text: text.replace("        loss.backward()", "        loss.backward()\n        print('step')"),
}


@pytest.mark.parametrize("kind", SABOTAGE)
def test_a_fix_that_is_made_wrong_on_purpose_is_caught(shell: InteractiveShell, kind: str) -> None:
    spoil: Callable[[str], str] = SABOTAGE[kind]
    true = fixes.get("micro_batch")

    def patch(*terms: Any) -> Patch | Refused:
        found = true.patch(*terms)
        if isinstance(found, Refused):
            return found
        spoilt = [replace(edit, after=spoil(edit.after), replay=spoil(edit.replay)) for edit in found.edits]
        assert any(one.after != edit.after for one, edit in zip(spoilt, found.edits, strict=True))
        return Patch(edits=tuple(spoilt))

    wrong: Fix = replace(true, patch=patch, ways=())
    setup = f"{CLASSES}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"
    with (
        mock.patch.object(fixes, "catalogue", return_value={"micro_batch": wrong}),
        mock.patch.object(fixes, "get", return_value=wrong),
    ):
        start, _, found = ends(shell, setup, f"{PLAIN}    scheduler.step()\n    print('batch')\n")
    assert known().outcome.kind is OutcomeKind.REFUSED, known().outcome
    assert "results differ" in known().outcome.why
    assert alike(found, start)
