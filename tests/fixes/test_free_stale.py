from __future__ import annotations

import gc
import textwrap
import weakref
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts

from oomdoctor.fixes.free_stale import FIX, guard, patch, propose
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.named import find
from oomdoctor.testing import assert_heals

BUILD = """
    import torch
    from torch import nn

    torch.manual_seed(1)
    # a wider one
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""
TRAIN = """
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    del loss
"""
HELD = (
    Holding(bytes=4 << 20, device="cuda:0", role=Role.PARAMETER, path="model[0].weight"),
    Holding(bytes=4 << 20, device="cuda:0", role=Role.GRADIENT, path="model[0].weight.grad"),
    Holding(bytes=8 << 20, device="cuda:0", role=Role.OPTIMIZER_STATE, path="optimizer.state"),
    Holding(bytes=1 << 30, device="cuda:0", role=Role.PARAMETER, path="models[0]"),
    Holding(bytes=1 << 30, device="cuda:0", role=Role.ACTIVATION, path="model.out"),
)


def trained() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(BUILD), namespace)
    exec(textwrap.dedent(TRAIN), namespace)
    return namespace


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, line: int, namespace: dict[str, Any], *holdings: Holding) -> Evidence:
    return replace(live.evidence(holdings=holdings), code=facts(cells, namespace, line=line))


def patched(source: str, line: int) -> Patch | Refused:
    cells = cells_of(source)
    return patch(cells, evidence(cells, line, trained()), Dose())


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,9 +1,12 @@
|
 import torch
 from torch import nn
+import gc
|
 torch.manual_seed(1)
 # a wider one
+model = optimizer = scheduler = None  # let go of the old before the new is built
+gc.collect()
 model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
 optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
 scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
""".replace("|", " ")


def second_run(source: str, *, in_cycle: bool = False) -> tuple[dict[str, Any], int, Any]:
    """Build and train, then run ``source`` and train again: the state, and the peak while building."""
    with live.Peak() as seen:
        namespace = trained()
        if in_cycle:
            vars(namespace["model"])["whole"] = [namespace["model"]]
        seen.peak = 0
        exec(textwrap.dedent(source), namespace)
        peak = seen.peak
    exec(textwrap.dedent(TRAIN), namespace)
    return namespace, peak, torch.get_rng_state()


def test_the_new_model_is_the_same_and_stands_alone() -> None:
    made = patched(BUILD, 7)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    plain, before, plain_rng = second_run(BUILD)
    fixed, after, fixed_rng = second_run(made.edits[0].after)
    assert live.same(live.values(plain["model"]), live.values(fixed["model"]))
    assert torch.equal(plain_rng, fixed_rng)
    own = sum(p.nbytes for p in plain["model"].parameters())
    assert before >= 4.9 * own  # old weights, gradients and two moments beside the new weights
    assert after <= 1.1 * own
    fresh: dict[str, Any] = {}
    exec(made.edits[0].after, fresh)
    assert isinstance(patched(made.edits[0].after, 10), Refused)


def test_a_model_in_a_cycle_goes_at_once_by_the_collection_alone() -> None:
    made = patched(BUILD, 7)
    assert isinstance(made, Patch)
    own = sum(p.nbytes for p in trained()["model"].parameters())
    _, peak, _ = second_run(made.edits[0].after, in_cycle=True)
    assert peak <= 1.1 * own
    _, peak, _ = second_run(made.edits[0].after.replace("gc.collect()\n", ""), in_cycle=True)
    assert peak >= 1.9 * own


def test_an_optimizer_of_another_cell_is_named_and_has_to_be_made_anew() -> None:
    source = "model = nn.Linear(64, 64)\n"
    cells = cells_of(source)
    known = evidence(cells, 1, trained(), *HELD)
    (proposal,) = propose(live.INCIDENT, known)  # type: ignore[misc]
    assert proposal.dose == Dose.of(names="model, optimizer, scheduler")
    assert proposal.caveat == (
        "deletes `model`, `optimizer` and `scheduler` as they stand, for good: save what you still need of them; "
        "the cell does not make `optimizer` and `scheduler` anew, do so afterwards"
    )
    made = patch(cells, known, proposal.dose)
    assert isinstance(made, Patch)
    assert made.edits[0].after.startswith("import gc\n\nmodel = optimizer = scheduler = None  #")


def test_each_pass_of_a_loop_lets_go() -> None:
    source = "for n in (64, 128):\n    model = nn.Linear(64, n)\n    optimizer = torch.optim.SGD(model.parameters())\n"
    space = trained()
    del space["scheduler"]
    cells = cells_of(source)
    made = patch(cells, evidence(cells, 2, space), Dose())
    assert isinstance(made, Patch)
    assert (
        "    model = optimizer = None  # let go of the old before the new is built\n    gc.collect()\n"
        in made.edits[0].after
    )
    exec(made.edits[0].after, space)


def test_proposal_is_never_made_by_itself_and_measured() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(BUILD), 7, trained(), *HELD))  # type: ignore[misc]
    assert (proposal.effect, proposal.saves) == (Effect.CHANGES_RESULT, 16 << 20)
    assert "deletes `model`, `optimizer` and `scheduler`" in str(proposal.caveat)
    assert "anew" not in str(proposal.caveat)
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("source", "line", "holdings", "part"),
    [
        (BUILD, 7, HELD[3:], "no parameters or optimizer state"),
        (BUILD + "    model(torch.randn(4, 64))\n", 10, HELD, "no old model"),
        ("optimizer.step()\n" + textwrap.dedent(BUILD), 8, HELD, "no old model"),
        ("x = torch.randn(3)", 1, HELD, "no old model"),
    ],
)
def test_no_proposal_without_evidence(source: str, line: int, holdings: tuple[Holding, ...], part: str) -> None:
    cells = cells_of(source)
    refused = propose(live.INCIDENT, evidence(cells, line, trained(), *holdings))
    assert isinstance(refused, Refused)
    assert part in refused.reason
    if part == "no old model":
        assert isinstance(patch(cells, evidence(cells, line, trained()), Dose()), Refused)


WIDE = """
torch.manual_seed(1)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
"""


def test_heals_a_second_run_on_the_virtual_accelerator() -> None:
    gc.collect()
    imports, step = (
        "import torch\nfrom torch import nn\n",
        "model(torch.randn(4, 512)).sum().backward()\noptimizer.step()\n",
    )
    healed: dict[str, Any] = {}
    case = assert_heals("free_stale", imports + WIDE, step, WIDE, budget="36MiB", namespace=healed)
    assert case.outcome.fixes == ("free_stale(names=model, optimizer)",)
    plain: dict[str, Any] = {}
    exec(imports + WIDE, plain)
    assert live.same(live.values(healed["model"]), live.values(plain["model"]))


def test_while_the_cell_runs_nothing_of_ours_holds_the_named_objects() -> None:
    space = trained()
    known = replace(live.session(namespace=space), find=find)
    assert [path for path, _ in known.optimizers] == ["optimizer"]
    gone = weakref.ref(space["model"])
    with guard(known, Dose.of(names="model, optimizer, scheduler")):
        space.clear()
        gc.collect()
        assert gone() is None
