from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts, site
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = get("detach_history")
patch, propose = FIX.patch, FIX.propose

NONE = Dose()

EVALUATE = """
    losses, outputs, total, running = [], [], 0, 0
    for x, y in batches:
        out = model(x)
        loss = criterion(out, y)
        losses.append(loss)  # for the plot
        outputs.append(out)
        total += loss * len(x)
        running = running + loss
"""


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "torch": torch,
        "model": nn.Linear(4, 3),
        "criterion": nn.CrossEntropyLoss(),
        "batches": [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)],
    }


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def holding(path: str, size: int, role: Role = Role.GRAPH_KEPT_ALIVE) -> Holding:
    return Holding(bytes=size, device="cuda:0", role=role, path=path)


def evidence(cells: Cells, *holdings: Holding) -> Evidence:
    namespace = program()
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    base = live.evidence(holdings=holdings)
    return Evidence(
        devices=base.devices, host=base.host, censuses=base.censuses, code=facts(cells, namespace, modules, [])
    )


def patched(*sources: str) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells), NONE)


def test_patched_source_keeps_the_same_bits_and_no_graph() -> None:
    made = patched(EVALUATE)
    assert isinstance(made, Patch), made
    plain, fixed = program(), program()
    exec(textwrap.dedent(EVALUATE), plain)
    exec(made.edits[0].after, fixed)
    for name in ("losses", "outputs"):
        assert len(plain[name]) == len(fixed[name]) == 4
        assert all(torch.equal(left, right) for left, right in zip(plain[name], fixed[name], strict=True))
        assert all(tensor.grad_fn is not None for tensor in plain[name])
        assert all(tensor.grad_fn is None for tensor in fixed[name])
    for name in ("total", "running"):
        assert torch.equal(plain[name], fixed[name])
        assert fixed[name].grad_fn is None
    assert FIX.effect is Effect.EXACT


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -3,7 +3,7 @@
 for x, y in batches:
     out = model(x)
     loss = criterion(out, y)
-    losses.append(loss)  # for the plot
-    outputs.append(out)
-    total += loss * len(x)
-    running = running + loss
+    losses.append(loss.detach())  # for the plot
+    outputs.append(out.detach())
+    total += (loss * len(x)).detach()
+    running = running + loss.detach()
"""


def test_golden_diff_and_second_time() -> None:
    made = patched(EVALUATE)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    assert isinstance(patched(made.edits[0].after), Refused)


def test_function_of_an_earlier_cell_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    function = """
        def evaluate(net, loss_fn):
            kept = []
            for x, y in batches:
                kept.append(loss_fn(net(x), y))
            print([loss.item() for loss in kept])
    """
    made = patched(function, "evaluate(model, criterion)")
    assert isinstance(made, Patch)
    (edit,) = made.edits
    assert "kept.append(loss_fn(net(x), y).detach())" in edit.replay
    plain, fixed = program(), program()
    exec(textwrap.dedent(function), plain)
    exec(edit.replay, fixed)
    exec("evaluate(model, criterion)", plain)
    before = capsys.readouterr().out
    exec("evaluate(model, criterion)", fixed)
    assert capsys.readouterr().out == before


@pytest.mark.parametrize(
    "source",
    [
        "for x, y in batches:\n    a = 0\n    for p in ps:\n        a += criterion(model(x), y)\n    a.backward()\n",
        "parts = []\nfor x, y in batches:\n    parts.append(criterion(model(x), y))\nsum(parts).backward()",
        "losses = []\nfor x, y in batches:\n    losses.append(criterion(model(x), y).item())\n",
        "losses = []\nwith torch.no_grad():\n    for x, y in batches:\n        losses.append(criterion(model(x), y))\n",
    ],
)
def test_what_backward_needs_and_what_has_no_graph_is_left_alone(source: str) -> None:
    assert isinstance(patched(source), Refused)
    assert isinstance(propose(live.INCIDENT, evidence(cells_of(source))), Refused)


ENCODE = """
    def encode(xs):
        outs = []
        for x in xs:
            outs.append(model(x))
        return torch.cat(outs)
"""
TRAIN = """
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion({encoded}, y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
"""
FEATS = """
    feats = []

    def collect(xs):
        for x in xs:
            feats.append(model(x))
"""


@pytest.mark.parametrize(
    "sources",
    [
        (ENCODE, TRAIN.format(encoded="encode(x.chunk(4))")),
        (FEATS, TRAIN.format(encoded="torch.cat([feats.clear(), collect(x.chunk(4)), torch.cat(feats)][2:])")),
        (
            FEATS,
            "def joined():\n    return torch.cat(feats)",
            "collect(batches[0][0].chunk(4))\njoined().sum().backward()",
        ),
    ],
)
def test_gradients_that_are_needed_elsewhere_are_left_alone(sources: tuple[str, ...]) -> None:
    assert isinstance(patched(*sources), Refused)
    found = [holding("outs[0] → graph", 1 << 20), holding("feats[0] → graph", 1 << 20)]
    refused = propose(live.INCIDENT, evidence(cells_of(*sources), *found))
    assert isinstance(refused, Refused)
    assert "certain that no gradient" in refused.reason


@pytest.mark.parametrize(
    "sources",
    [
        ("losses = []", TRAIN.format(encoded="model(x)") + "        losses.append(loss)\n"),
        (FEATS, "collect(x for x, _ in batches)\nprint(len(feats))"),
    ],
)
def test_a_training_loop_and_a_global_list_that_is_only_measured_heal(sources: tuple[str, ...]) -> None:
    made = patched(*sources)
    assert isinstance(made, Patch), made
    plain, fixed = (
        space | {"optimizer": torch.optim.SGD(space["model"].parameters(), 0.1)} for space in (program(), program())
    )
    for source in sources:
        exec(textwrap.dedent(source), plain)
    edited = {edit.cell: edit.after for edit in made.edits}
    for number, source in enumerate(sources, 1):
        exec(edited.get(number, textwrap.dedent(source)), fixed)
    name = "losses" if "losses" in plain else "feats"
    assert all(torch.equal(left, right) for left, right in zip(plain[name], fixed[name], strict=True))
    assert all(tensor.grad_fn is None for tensor in fixed[name])
    assert torch.equal(plain["model"].weight, fixed["model"].weight)


def test_several_values_at_once_are_refused() -> None:
    made = patched("kept = []\nfor x, y in batches:\n    kept.append((criterion(model(x), y), y))\n")
    assert isinstance(made, Refused)
    assert "line 3 of cell 1" in made.reason


def test_proposal_names_the_containers_and_what_they_keep() -> None:
    found = [
        holding("losses[3] → graph", 4 << 20),
        holding("total → graph", 2 << 20, Role.ACTIVATION),
        holding("local `running` of f at In[1] line 3 → graph", 1 << 20, Role.ACTIVATION),
        holding("total", 1 << 30, Role.ACTIVATION),
        holding("outputs[0]", 1 << 30, Role.USER_TENSOR),
        holding("losses_of_another[0] → graph", 1 << 30),
    ]
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(EVALUATE), *found))  # type: ignore[misc]
    assert proposal.dose == Dose.of(names="losses, outputs, total, running")
    assert (proposal.saves, proposal.effect) == (7 << 20, Effect.EXACT)
    assert proposal.basis == (
        "the census found 7.00 MiB of graphs that `losses`, `outputs`, `total` or `running` keeps alive"
    )
    assert proposal.caveat == (
        "what `losses`, `outputs`, `total` or `running` keeps has no graph any more: "
        "a later `backward` through it raises an error"
    )
    kept = program()
    exec(patched(EVALUATE).edits[0].after, kept)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.stack(kept["losses"]).mean().backward()


def test_graphs_that_gathered_outputs_or_a_carried_state_keep_as_well_are_not_freed() -> None:
    holdings = (
        Holding(bytes=1 << 20, device="cuda:0", role=Role.GRAPH_KEPT_ALIVE, path="total → graph"),
        Holding(bytes=1 << 10, device="cuda:0", role=Role.GRAPH_KEPT_ALIVE, path="preds[0:4]"),
    )
    found = live.evidence(holdings=holdings)

    def proposed(**sites: Any) -> Any:
        appends = {"detach_history": (site("In[2] line 4: total += loss", "", "total", "total += loss.detach()"),)}
        return propose(live.INCIDENT, replace(found, code=replace(found.code, sites=appends | sites)))

    def gathering(name: str) -> Any:
        return (site(f"In[2] line 3: {name}.append(out)", "", name),)

    assert not isinstance(proposed(), Refused)
    assert not isinstance(proposed(offload_predictions=gathering("outs")), Refused)
    gathered = proposed(offload_predictions=gathering("preds"))
    assert isinstance(gathered, Refused)
    assert gathered.reason == "`preds` keeps the same graphs alive, whether `total` does or not"
    assert not isinstance(proposed(detach_state=(site("In[1] line 3: out, h = rnn(x, h)"),)), Refused)
    carried = proposed(detach_state=(site("In[2] line 3: out, h = rnn(x, h)"),))
    assert isinstance(carried, Refused)
    assert carried.reason.startswith("the recurrent state carried over steps in In[2] line 3: out, h = rnn(x, h) keeps")


def test_graphs_that_other_names_keep_are_no_reason() -> None:
    refused = propose(live.INCIDENT, evidence(cells_of(EVALUATE), holding("other[0] → graph", 7 << 20)))
    assert isinstance(refused, Refused)
    assert "the census found no graph" in refused.reason
