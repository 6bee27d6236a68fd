from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader

from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("lighter_optimizer")
patch, propose = FIX.patch, FIX.propose

SGD, ADAFACTOR = Dose.of(optimizer="SGD"), Dose.of(optimizer="Adafactor")
has_adafactor = pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")

SETUP = """
    import torch
    from torch import nn, optim
    from torch.optim import AdamW
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    criterion = nn.CrossEntropyLoss()
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
"""
MADE = """
    # the usual
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
"""
LOOP = """
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
"""
FUNCTION = """
    def train(model, epochs=1):
        optimizer = optim.Adam(model.parameters(), 1e-3, fused=False)
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        return optimizer
"""
GROUPS = """
    params = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}]
    optimizer = AdamW(params, lr=1e-3)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
"""
GUARDED = 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(MADE + LOOP), "    ")
NOTEBOOKS = {
    "guarded": (SETUP, GUARDED),
    "another cell": (SETUP, MADE, LOOP),
    "one cell": (SETUP, MADE + LOOP),
    "groups": (SETUP, GROUPS, LOOP),
}


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def run(sources: list[str], namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    for source in sources:
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), namespace)
    return namespace


def evidence(cells: Cells, namespace: dict[str, Any]) -> Evidence:
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader)
    found = [[(name, value) for name, value in namespace.items() if isinstance(value, kind)] for kind in kinds]
    base = live.evidence(roles=((Role.OPTIMIZER_STATE, 3 << 20),))
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=facts(cells, namespace, *found))


def patched(*sources: str, dose: Dose = SGD) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, run([cell.source for cell in cells.history])), dose)


def changed(made: Patch, sources: tuple[str, ...]) -> list[str]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    return texts


def state(optimizer: torch.optim.Optimizer) -> int:
    held = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for one in optimizer.state.values()
        for value in one.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }
    return sum(held.values())


@pytest.mark.parametrize("dose", [SGD, pytest.param(ADAFACTOR, marks=has_adafactor)], ids=str)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_retry_leaves_what_a_fresh_kernel_leaves_with_less_state(name: str, dose: Dose) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources, dose=dose)
    assert isinstance(made, Patch), made
    plain, fresh = run(list(sources)), run(changed(made, sources))
    retried = run(list(sources[:-1]))
    run([edit.replay for edit in made.edits if edit.cell != len(sources)], retried)
    run(changed(made, sources)[-1:], retried)
    assert type(fresh["optimizer"]).__name__ == dose["optimizer"]
    assert live.same(live.values(fresh["model"]), live.values(retried["model"]))
    assert not live.same(live.values(fresh["model"]), live.values(plain["model"]))
    parameters = sum(parameter.numel() * 4 for parameter in plain["model"].parameters())
    assert state(plain["optimizer"]) == 2 * parameters
    assert state(fresh["optimizer"]) <= {"SGD": 1.0, "Adafactor": 0.6}[str(dose["optimizer"])] * parameters
    if "scheduler" in fresh:
        assert retried["scheduler"].optimizer is retried["optimizer"]
        assert retried["scheduler"].last_epoch == fresh["scheduler"].last_epoch == 4
    assert isinstance(patched(*changed(made, sources), dose=dose), Refused)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,4 +1,4 @@
\x20
 # the usual
-optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
+optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.1, momentum=0.9)
 scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
"""


def test_golden_diff_and_what_runs_again() -> None:
    made = patched(*NOTEBOOKS["another cell"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    assert [line.partition(" =")[0] for line in made.edits[0].replay.splitlines()] == ["optimizer", "scheduler"]


REFUSALS = {
    "unpacked": (MADE.replace("lr=1e-3", "**{'lr': 1e-3}"), LOOP, "unpacks its arguments"),
    "another algorithm": (MADE.replace("lr=1e-3", "amsgrad=True"), LOOP, "asks for `amsgrad`"),
    "by position": (MADE.replace("lr=1e-3, betas=", "1e-3, "), LOOP, "by position"),
    "groups": (
        (
            "optimizer = AdamW([{'params': model.parameters(), 'eps': 1e-6}])\nscheduler = optim.lr_scheduler.StepLR("
            "optimizer, 1)"
        ),
        LOOP,
        "settings of Adam in its groups",
    ),
    "loaded": (
        textwrap.dedent(MADE) + "if False:\n    optimizer.load_state_dict(torch.load('last.pt'))",
        LOOP,
        "was given a state",
    ),
    "another": (MADE.replace("AdamW", "SGD").replace("betas=(0.9, 0.95), ", ""), LOOP, "no Adam or AdamW"),
    "wrapped": (
        textwrap.dedent(MADE) + "class Stepper:\n    def __init__(self, o):\n        self.o = o\n\n"
        "stepper = Stepper(optimizer)",
        LOOP + "    stepper.o.param_groups\n",
        "made something of it that the failing cell needs",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    made, loop, reason = REFUSALS[name]
    found = patched(SETUP, made, loop)
    assert isinstance(found, Refused), found.diff()
    assert reason in found.reason


def proposals(made: str = MADE, loop: str = LOOP) -> Any:
    cells = cells_of(SETUP, made, loop)
    return propose(live.INCIDENT, evidence(cells, run([cell.source for cell in cells.history[:-1]])))


@has_adafactor
def test_proposals() -> None:
    parameters = (8 * 64 + 64 + 64 * 4 + 4) * 4
    sgd, adafactor = proposals()
    assert (sgd.dose, sgd.saves) == (SGD, parameters)
    assert (adafactor.dose, adafactor.saves) == (ADAFACTOR, 2 * parameters)
    assert all(one.effect is Effect.CHANGES_RESULT and "learning rate" in one.caveat for one in (sgd, adafactor))
    assert "the census found 3.00 MiB of state" in sgd.basis
    assert FIX.apply is None


def test_no_proposal() -> None:
    assert "no Adam" in proposals(MADE.replace("AdamW", "SGD").replace("betas=(0.9, 0.95), ", "")).reason
    assert "no training loop" in proposals(loop="model(batches[0][0])").reason
    cells = cells_of(SETUP, MADE, LOOP)
    known = evidence(cells, run([cell.source for cell in cells.history[:-1]]))
    steppers = tuple(replace(one, parameter_bytes=0) for one in known.code.steppers)
    refused = propose(live.INCIDENT, replace(known, code=replace(known.code, steppers=steppers)))
    assert isinstance(refused, Refused)
    assert "no parameters" in refused.reason


def test_an_optimizer_that_a_function_keeps_to_itself_is_said_to_be_unknown() -> None:
    cells = cells_of(SETUP, FUNCTION, "optimizer = train(model, epochs=2)")
    refused = propose(live.INCIDENT, evidence(cells, run([cell.source for cell in cells.history[:-1]])))
    assert isinstance(refused, Refused)
    assert refused.reason == "`optimizer` is not among the notebook's objects, so what its state takes is not known"
