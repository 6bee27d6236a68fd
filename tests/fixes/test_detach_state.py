from __future__ import annotations

import dataclasses
import gc
import textwrap
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor.fixes import get
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = get("detach_state")
patch, propose = FIX.patch, FIX.propose

LOOP = """
    hidden = None
    losses = []
    for x, y in chunks:
        out, hidden = rnn(x, hidden)
        loss = (out - y).square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss.item())  # for the plot
    optimizer.step()
"""
KEEPER = """
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(4, 4)
            self.head = nn.Linear(4, 1)
            self.h = None

        def forward(self, x):
            # what was seen so far
            self.h = self.cell(x, self.h)
            return self.head(self.h)
"""


def program(rnn: type = nn.GRU) -> dict[str, Any]:
    torch.manual_seed(0)
    model = rnn(4, 4, batch_first=True)
    return {
        "torch": torch,
        "nn": nn,
        "rnn": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "chunks": [(torch.randn(8, 32, 4), torch.randn(8, 32, 4)) for _ in range(6)],
    }


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, kept: int = 8 << 20, **names: Any) -> Evidence:
    namespace = program() | names
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    base = live.evidence(roles=((Role.ACTIVATION, kept // 2), (Role.GRAPH_KEPT_ALIVE, kept // 2)))
    return dataclasses.replace(base, code=facts(cells, namespace, modules, []))


def patched(*sources: str) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells), Dose())


def run(source: str, rnn: type = nn.GRU) -> tuple[dict[str, Any], int]:
    namespace = program(rnn)
    with live.Peak() as seen:
        exec(textwrap.dedent(source), namespace)
    return namespace, seen.peak


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -6,4 +6,5 @@
     loss = (out - y).square().mean()
     loss.backward(retain_graph=True)
     losses.append(loss.item())  # for the plot
+    {line}
 optimizer.step()
"""


ANY_KIND = "hidden = tuple(part.detach() for part in hidden) if isinstance(hidden, tuple) else hidden.detach()"
STATES = [("None", nn.GRU), ("torch.zeros(1, 8, 4)", nn.GRU), ("(torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))", nn.LSTM)]


@pytest.mark.parametrize(("first", "rnn"), STATES)
def test_the_step_ends_with_a_state_without_its_graph(first: str, rnn: type) -> None:
    source = LOOP.replace("None", first)
    made = patched(source)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN.format(line=f"{ANY_KIND}  # gradients end with the step")
    plain, before = run(source, rnn)
    fixed, after = run(made.edits[0].after, rnn)
    # The values do not depend on it; the gradients, and what the optimizer makes of them, do.
    assert plain["losses"] == fixed["losses"]
    assert not live.same(live.values(plain["rnn"]), live.values(fixed["rnn"]))
    assert after < 0.5 * before
    assert isinstance(patched(made.edits[0].after), Refused)


def test_the_gradients_are_those_of_truncated_backpropagation() -> None:
    made = patched(LOOP)
    assert isinstance(made, Patch)
    fixed, _ = run(made.edits[0].after)
    space = program()
    hidden = None
    for x, y in space["chunks"]:
        out, hidden = space["rnn"](x, hidden)
        (out - y).square().mean().backward()
        hidden = hidden.detach()
    space["optimizer"].step()
    assert live.same(live.values(space["rnn"]), live.values(fixed["rnn"]))


def test_two_names() -> None:
    loop = "for x, y in chunks:\n    out, (h, c) = rnn(x, (h, c))\n    out.sum().backward(retain_graph=True)\n"
    made = patched(loop)
    assert isinstance(made, Patch)
    assert made.edits[0].after.endswith("    h, c = h.detach(), c.detach()  # gradients end with the step\n")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (
            "for x, y in chunks:\n    out, h = rnn(x, h)\n    h = h.detach()\n    out.sum().backward()",
            "no recurrent state",
        ),
        ("for x, y in chunks:\n    out, h = rnn(x, h.detach())\n    out.sum().backward()", "no recurrent state"),
        ("for x, y in chunks:\n    h = None\n    out, h = rnn(x, h)\n    out.sum().backward()", "no recurrent state"),
        (
            "for x, y in chunks:\n    out, h = rnn(x, h)\n    if bad(x):\n        continue\n    out.sum().backward()",
            "continue",
        ),
        (
            "for x, y in chunks:\n    if good(y):\n        out, h = rnn(x, h)\n        out.sum().backward()",
            "under a condition",
        ),
        ("for x, y in chunks:\n    a = 1; out, h = rnn(x, h)\n    out.sum().backward(retain_graph=True)", "of its own"),
    ],
)
def test_refuses(source: str, part: str) -> None:
    made = patched(source)
    assert isinstance(made, Refused)
    assert part in made.reason


READING = """
    hidden = {first}
    losses = []
    for x, y in chunks:
        with timer():
            out, hidden = rnn(x, hidden)
        losses.append((out - y).square().mean().item())  # for the plot
"""


@pytest.mark.parametrize(("first", "rnn"), STATES[1:])
def test_an_evaluation_that_reads_on_is_exact(first: str, rnn: type) -> None:
    source = READING.replace("{first}", first).replace("timer()", "contextlib.nullcontext()")
    source = "import contextlib\n" + textwrap.dedent(source)
    cells = cells_of(source)
    known = evidence(cells, **program(rnn))
    (proposal,) = propose(live.INCIDENT, known)  # type: ignore[misc]
    assert (proposal.effect, proposal.caveat) == (Effect.EXACT, None)
    made = patch(cells, known, proposal.dose)
    assert isinstance(made, Patch), made
    assert made.edits[0].after == source + f"    {ANY_KIND}  # its graph is not needed\n"
    plain, before = run(source, rnn)
    fixed, after = run(made.edits[0].after, rnn)
    assert plain["losses"] == fixed["losses"]
    assert live.same(live.values(plain["rnn"]), live.values(fixed["rnn"]))
    assert after < 0.5 * before
    again = cells_of(made.edits[0].after)
    assert isinstance(patch(again, evidence(again, **program(rnn)), proposal.dose), Refused)


def test_an_evaluation_of_an_earlier_cell_is_replayed() -> None:
    function = "def evaluate(chunks):\n" + textwrap.indent(
        textwrap.dedent(READING).replace("{first}", "torch.zeros(1, 8, 4)"), "    "
    )
    cells = cells_of(function + "    return losses\n", "seen = evaluate(chunks)\n")
    made = patch(cells, evidence(cells), Dose())
    assert isinstance(made, Patch), made
    assert made.edits[0].cell == 1
    assert f"        {ANY_KIND}  # its graph is not needed\n    return losses" in made.edits[0].replay
    skipping = cells_of(
        cells.get(1).source.replace(
            "        with timer", "        if bad(x):\n            continue\n        with timer"
        ),
        "seen = evaluate(chunks)\n",
    )
    refused = patch(skipping, evidence(skipping), Dose())
    assert isinstance(refused, Refused)
    assert "continue" in refused.reason


STEPS = "seen = []\nfor x in xs:\n    seen.append(model(x).item())\n"


def keeper() -> dict[str, Any]:
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"torch": torch, "nn": nn, "xs": [torch.randn(1, 4) for _ in range(20)]}
    exec(textwrap.dedent(KEEPER) + "model = Counter()\n", namespace)
    return namespace


def test_a_module_in_evaluation_is_exact() -> None:
    source = textwrap.dedent(KEEPER) + "\nmodel = Counter()\n" + STEPS
    cells = cells_of(source)
    known = evidence(cells, model=keeper()["model"])
    (proposal,) = propose(live.INCIDENT, known)  # type: ignore[misc]
    assert (proposal.effect, proposal.caveat) == (Effect.EXACT, None)
    made = patch(cells, known, proposal.dose)
    assert isinstance(made, Patch), made
    assert (
        "        # what was seen so far\n        if self.h is not None:\n"
        f"            {ANY_KIND.replace('hidden', 'self.h')}\n"
        "        self.h = self.cell(x, self.h)\n"
    ) in made.edits[0].after
    results, peaks = [], []
    for text in (source, made.edits[0].after):
        torch.manual_seed(0)
        space = {"torch": torch, "nn": nn, "xs": keeper()["xs"]}
        torch.manual_seed(1)
        with live.Peak() as seen:
            exec(text, space)
        results.append((space["seen"], live.values(space["model"]), torch.get_rng_state()))
        peaks.append(seen.peak)
        del space
        gc.collect()
    assert results[0][0] == results[1][0]
    assert live.same(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])
    assert peaks[1] < 0.7 * peaks[0]


def test_a_class_of_an_earlier_cell() -> None:
    cells = cells_of(KEEPER, "model = Counter()", STEPS)
    made = patch(cells, evidence(cells, model=keeper()["model"]), Dose())
    assert isinstance(made, Patch)
    plain, fixed = keeper(), keeper()
    exec(STEPS, plain)
    exec(made.edits[0].replay, fixed)
    exec(STEPS, fixed)
    assert plain["seen"] == fixed["seen"]


def test_proposal_for_training_says_what_changes() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(cells_of(LOOP)))  # type: ignore[misc]
    assert (proposal.effect, proposal.saves) == (Effect.CHANGES_RESULT, 8 << 20)
    assert proposal.dose == Dose.of(state="hidden")
    assert "truncated backpropagation through time" in str(proposal.caveat)
    training = cells_of(
        KEEPER, "model = Counter()", "for x in xs:\n    loss = model(x).sum()\n    loss.backward(retain_graph=True)\n"
    )
    (kept,) = propose(live.INCIDENT, evidence(training, model=keeper()["model"]))  # type: ignore[misc]
    assert kept.effect is Effect.CHANGES_RESULT


def test_no_proposal_without_evidence() -> None:
    for cells, kept, part in ((cells_of(LOOP), 0, "no graphs"), (cells_of("print(1)"), 8 << 20, "no recurrent state")):
        refused = propose(live.INCIDENT, evidence(cells, kept))
        assert isinstance(refused, Refused)
        assert part in refused.reason
