from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.fixes.optimizers import TOLERANCE
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("optimizer_foreach_off")
patch, propose = FIX.patch, FIX.propose

NONE = Dose()
ESTIMATE = 8 * (64 * 64 + 64) * 4 - 2 * 64 * 64 * 4
STEP = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:700 _multi_tensor_adam")
FORWARD = replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:125 forward")

MAKES = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-2,  # found by a sweep
    foreach=True,
)
"""
TRAINS = """\
losses = []
for x in batches:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=generator) for _ in range(5)]


def evidence(*sources: str, namespace: dict[str, Any] | None = None) -> Evidence:
    optimizers = [(name, one) for name, one in (namespace or {}).items() if isinstance(one, torch.optim.Optimizer)]
    base = live.evidence()
    return replace(base, code=facts(live.cells_of(*sources), namespace or {}, (), optimizers, loaded=()))


def run(*sources: str, after: int = 1) -> dict[str, Any]:
    """Run the cells. Adds the peak of those from the one at ``after`` on."""
    namespace: dict[str, Any] = {"batches": batches()}
    for source in sources[:after]:
        exec(source, namespace)
    with live.Peak() as seen:
        for source in sources[after:]:
            exec(source, namespace)
    return namespace | {"peak": seen.peak}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["losses"] == right["losses"] and live.same(live.values(left["model"]), live.values(right["model"]))


def test_fewer_temporaries_and_here_the_same_bits() -> None:
    plain = run(MAKES, TRAINS)
    made = patch(live.cells_of(MAKES, TRAINS), evidence(MAKES, TRAINS, namespace=plain), NONE)
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    for other in (
        run(edit.after, TRAINS),
        run(MAKES, edit.replay, TRAINS),
    ):
        assert same(plain, other)
        assert plain["peak"] - other["peak"] >= 0.9 * ESTIMATE


def test_a_replay_leaves_what_the_changed_cell_would() -> None:
    (edit,) = patch(live.cells_of(MAKES, TRAINS), evidence(MAKES, namespace=run(MAKES)), NONE).edits
    replayed, changed = run(MAKES, edit.replay), run(edit.after)
    assert replayed.keys() == changed.keys()
    for one, other in ((replayed["optimizer"], changed["optimizer"]),):
        assert one.defaults == other.defaults
        assert [{**g, "params": None} for g in one.param_groups] == [{**g, "params": None} for g in other.param_groups]


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -5,5 +5,5 @@
 optimizer = torch.optim.AdamW(
     model.parameters(),
     lr=1e-2,  # found by a sweep
-    foreach=True,
+    foreach=False,
 )
"""


def test_golden_diff_and_second_time() -> None:
    found = evidence(MAKES, TRAINS, namespace=run(MAKES))
    made = patch(live.cells_of(MAKES, TRAINS), found, NONE)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    again = patch(live.cells_of(made.edits[0].after, TRAINS), found, NONE)
    assert again == Refused("there is nothing left to change")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("AdamW(model.parameters())", "AdamW(model.parameters(), foreach=False)"),
        ("AdamW(model.parameters(), lr=1e-3)", "AdamW(model.parameters(), lr=1e-3, foreach=False)"),
        (
            "AdamW(\n    model.parameters(),  # all\n    lr=1e-3,  # found by a sweep\n)",
            "AdamW(\n    model.parameters(),  # all\n    lr=1e-3,  # found by a sweep\n    foreach=False,\n)",
        ),
        (
            "AdamW(\n    model.parameters(),\n    lr=1e-3\n)",
            "AdamW(\n    model.parameters(),\n    lr=1e-3,\n    foreach=False\n)",
        ),
        (
            "AdamW(model.parameters(),\n      lr=1e-3)",
            "AdamW(model.parameters(),\n      lr=1e-3,\n      foreach=False)",
        ),
    ],
)
def test_the_argument_is_written_as_those_before_it(call, expected) -> None:
    found = with_foreach(torch.optim.AdamW)
    made = patch(live.cells_of(f"opt = {call}\ntrain()"), found, NONE)
    assert isinstance(made, Patch), made
    assert made.edits[0].after == f"opt = {expected}\ntrain()"


def with_foreach(cls: type, name: str = "opt") -> Evidence:
    optimizer = cls([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))], foreach=True)
    return evidence("pass", namespace={name: optimizer})


FACTORY = """\
def configure(net):
    return net, torch.optim.Adam(net.parameters(), lr=1e-2)
"""


def test_an_optimizer_made_by_a_function_of_the_notebook() -> None:
    binds = "torch.manual_seed(0)\nmodel, optimizer = configure(torch.nn.Linear(4, 1))"
    found = with_foreach(torch.optim.Adam, "optimizer")
    cells = live.cells_of(FACTORY, binds, TRAINS)
    (edit,) = patch(cells, found, NONE).edits
    assert "Adam(net.parameters(), lr=1e-2, foreach=False)" in edit.after
    space: dict[str, Any] = {"torch": torch}
    for source in (FACTORY, binds, edit.replay):
        exec(source, space)
    assert [group["foreach"] for group in space["optimizer"].param_groups] == [False]
    # Made by the failing cell itself, there is nothing yet that could be told.
    (edit,) = patch(live.cells_of(FACTORY, binds + "\n" + TRAINS), found, NONE).edits
    assert "defaults" not in edit.replay


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (("optimizer = torch.optim.Adam(model.parameters(), **options)",), "unpacked"),
        (("optimizer = Adam if big else None",), "not followed"),
        (("optimizer = OPTIMIZERS['adam'](model.parameters())",), "not followed"),
        (("if big:\n    optimizer = Adam(p)\nelse:\n    optimizer = Adam(p, lr=1e-4)",), "which of several branches"),
        (("optimizer = Adam(p)\nif big: optimizer = Adam(p, lr=1e-4)",), "not followed"),
        (("x = 1",), "no cell makes"),
        (("optimizer = make(",), "not Python"),
    ],
)
def test_patch_refuses(sources, why) -> None:
    refused = patch(live.cells_of(*sources, "train()"), with_foreach(torch.optim.Adam, "optimizer"), NONE)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_patch_refuses_classes_that_torch_does_not_define() -> None:
    class Own(torch.optim.Adam):
        pass

    refused = patch(live.cells_of("optimizer = Own(params)"), with_foreach(Own, "optimizer"), NONE)
    assert isinstance(refused, Refused)
    assert "options are not known" in refused.reason


def test_proposed_where_the_step_ran_out() -> None:
    found = evidence(MAKES, TRAINS, namespace=run(MAKES))
    (proposal,) = propose(STEP, found)  # type: ignore[misc]
    assert proposal.saves == ESTIMATE
    assert proposal.effect is FIX.effect is Effect.EQUIVALENT
    assert FIX.tolerance == TOLERANCE
    line = CellLine(number=2, line=6, source_line="optimizer.step()")
    assert not isinstance(propose(replace(FORWARD, cell=line), found), Refused)


@pytest.mark.parametrize(
    ("incident", "found", "why"),
    [
        (FORWARD, with_foreach(torch.optim.Adam), "did not run out"),
        (STEP, live.evidence(), "no optimizer"),
        (
            STEP,
            evidence("pass", namespace={"o": torch.optim.Adam([torch.zeros(3)], foreach=True)}),
            "one or two parameters",
        ),
        (STEP, evidence("pass", namespace={"o": torch.optim.Adam([torch.zeros(3)], foreach=False)}), "no optimizer"),
    ],
)
def test_propose_refuses(incident, found, why) -> None:
    refused = propose(incident, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


@pytest.mark.gpu
def test_on_a_gpu_the_results_are_within_the_tolerance_and_the_peak_is_lower() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    results = []
    for foreach in (None, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 512, device="cuda")).square().mean().backward()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
        results.append((live.values(model), torch.cuda.max_memory_allocated()))
    assert live.furthest(results[0][0], results[1][0]) < TOLERANCE
    assert results[1][1] < results[0][1]
