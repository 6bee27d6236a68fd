from __future__ import annotations

import dataclasses
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
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = get("drop_retain_graph")
patch, propose = FIX.patch, FIX.propose

LOOP = """
    losses = []
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward(retain_graph=True)  # else it fails?
            optimizer.step()
            losses.append(loss.item())
"""
STEP = """
    def train_step(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward(
            retain_graph=True,
        )
        optimizer.step()
        return loss.item()
"""
GAN = """
    for x, y in loader:
        fake = generator(x)
        d_loss = discriminator(fake.detach()).mean()
        optimizer.zero_grad()
        d_loss.backward({first})
        g_loss = discriminator(fake).mean()
        g_loss.backward({second})
        optimizer.step()
"""


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.2), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)
    )
    return {
        "torch": torch,
        "model": model,
        "generator": nn.Linear(8, 8),
        "discriminator": nn.Linear(8, 1),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "loader": [(torch.randn(512, 8), torch.randint(0, 3, (512,))) for _ in range(3)],
    }


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, *holdings: Holding, activation: int = 8 << 20) -> Evidence:
    namespace = program()
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    base = live.evidence(holdings=holdings, roles=((Role.ACTIVATION, activation),))
    return dataclasses.replace(base, code=facts(cells, namespace, modules, [("optimizer", namespace["optimizer"])]))


def patched(*sources: str) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells), Dose())


def run(*sources: str) -> tuple[dict[str, Any], int]:
    namespace = program()
    with live.Peak() as seen:
        for source in sources:
            exec(textwrap.dedent(source), namespace)
    return namespace, seen.peak


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    moments = [
        [value for state in space["optimizer"].state.values() for value in state.values()] for space in (left, right)
    ]
    equal = all(torch.equal(a, b) for a, b in zip(*moments, strict=True))
    return equal and live.same(live.values(left["model"]), live.values(right["model"]))


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -5,6 +5,6 @@
         optimizer.zero_grad()
         out = model(x)
         loss = criterion(out, y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
-        loss.backward(retain_graph=True)  # else it fails?
+        loss.backward()  # else it fails?
         optimizer.step()
         losses.append(loss.item())
"""


def test_a_training_loop_is_the_same_bit_for_bit_and_needs_less() -> None:
    made = patched(LOOP)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    plain, before = run(LOOP)
    plain_rng = torch.get_rng_state()
    fixed, after = run(made.edits[0].after)
    assert torch.equal(plain_rng, torch.get_rng_state())
    assert same(plain, fixed)
    assert plain["losses"] == fixed["losses"]
    assert after < 0.85 * before
    assert isinstance(patched(made.edits[0].after), Refused)


def test_a_function_of_an_earlier_cell() -> None:
    call = "losses = [train_step(x, y) for x, y in loader for _ in range(2)]"
    made = patched(STEP, call)
    assert isinstance(made, Patch), made
    assert "    loss.backward()\n" in made.edits[0].replay
    plain, _ = run(STEP, call)
    fixed, _ = run(STEP, made.edits[0].replay, call)
    assert same(plain, fixed)
    assert plain["losses"] == fixed["losses"]


def test_of_two_losses_the_last_alone_can_free_the_graph() -> None:
    source = GAN.format(first="retain_graph=True", second="retain_graph=True")
    made = patched(source)
    assert isinstance(made, Patch), made
    assert made.edits[0].after == textwrap.dedent(GAN.format(first="retain_graph=True", second=""))
    run(made.edits[0].after)
    again = patched(made.edits[0].after)
    assert isinstance(again, Refused)
    assert "another gradient is taken after it" in again.reason


TWO_LOSSES = """
    for x, y in loader:
        out = model(x)
        a, b = out.mean(), out.std()
        a.backward(retain_graph=True)
        b.backward()
"""
MADE_BEFORE = """
    z = model(loader[0][0])
    for i in range(3):
        loss = (z * i).sum()
        loss.backward(retain_graph=True)
"""
AGAIN_AND_AGAIN = """
    loss = model(loader[0][0]).sum()
    for i in range(3):
        loss.backward(retain_graph=True)
"""
RUNNING_TOTAL = """
    total = 0
    for x, y in loader:
        total = total + criterion(model(x), y)
        total.backward(retain_graph=True)
"""
SECOND_ORDER = """
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True, create_graph=True)
"""
JOINED_AFTERWARDS = """
    outs = []
    for x, y in loader:
        out = model(x)
        outs.append(out)
        out.sum().backward(retain_graph=True)
    torch.cat(outs).sum().backward()
"""
GIVEN_BACK = """
    def step(x, y):
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        return loss

    for x, y in loader:
        step(x, y)
"""
PASSED_IN = """
    def step(out, y):
        loss = criterion(out, y)
        loss.backward(retain_graph=True)

    out = model(loader[0][0])
    for x, y in loader:
        step(out, y)
"""
SCALED = """
    w = torch.ones(3, requires_grad=True)
    scale = w * 2
    for x, y in loader:
        loss = (model(x) * scale).sum()
        loss.backward(retain_graph=True)
"""
STATE = """
    h = None
    for x, y in loader:
        out, h = generator(x, h)
        out.sum().backward(retain_graph=True)
"""
PENALTY = """
    def penalty(l):
        return torch.autograd.grad(l, list(model.parameters()))

    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        penalty(loss)
"""


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (LOOP.replace("retain_graph=True", ""), "no backward"),
        (TWO_LOSSES, "another gradient"),
        (SECOND_ORDER, "create_graph"),
        (STATE, "state carried"),
        (PENALTY, "another gradient"),
        (LOOP.replace("retain_graph=True", "None, True"), "not given by name"),
    ],
)
def test_a_graph_that_is_used_again_is_refused(source: str, part: str) -> None:
    made = patched(source)
    assert isinstance(made, Refused), made.diff()
    assert part in made.reason


@pytest.mark.parametrize(
    "head", ["for x, y in loader:\n    pass\nelse:\n", "while False:\n    pass\nelse:\n", "if True:\n"]
)
def test_a_step_after_a_loop_and_under_a_condition(head: str) -> None:
    made = patched(f"x, y = loader[0]\n{head}    loss = criterion(model(x), y)\n    loss.backward(retain_graph=True)\n")
    assert isinstance(made, Patch), made


@pytest.mark.parametrize(
    "source",
    [
        PASSED_IN,
        SCALED,
        MADE_BEFORE,
        AGAIN_AND_AGAIN,
        RUNNING_TOTAL,
        JOINED_AFTERWARDS,
        GIVEN_BACK + "    step(*loader[0]).backward()",
        GIVEN_BACK + "    backward = step(*loader[0]).backward\n    backward()",
    ],
)
def test_a_use_that_stays_unseen_raises_and_does_not_pass(source: str) -> None:
    made = patched(source)
    assert isinstance(made, Patch), made
    run(source)
    with pytest.raises(RuntimeError, match="second time"):
        run(made.edits[0].after)


def test_a_graph_dropped_wrongly_would_raise_and_not_pass() -> None:
    with pytest.raises(RuntimeError, match="second time"):
        run("z = model(loader[0][0])\nfor i in range(3):\n    loss = (z * z).sum()\n    loss.backward()")


def test_proposals_from_what_the_census_found() -> None:
    held = Holding(bytes=3 << 20, device="cuda:0", role=Role.ACTIVATION, path="loss → graph")
    (measured,) = propose(live.INCIDENT, evidence(cells_of(LOOP), held))  # type: ignore[misc]
    assert (measured.effect, measured.saves) == (Effect.EXACT, 3 << 20)
    assert measured.basis.startswith("measured")
    (estimate,) = propose(live.INCIDENT, evidence(cells_of(LOOP)))  # type: ignore[misc]
    assert (estimate.saves, estimate.basis.partition(":")[0]) == (4 << 20, "estimate")
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("source", "activation", "part"),
    [
        (LOOP, 0, "no graphs or activations"),
        ("print(1)", 1 << 20, "no backward"),
        (STATE, 1 << 20, "cut first"),
    ],
)
def test_no_proposal_without_evidence(source: str, activation: int, part: str) -> None:
    refused = propose(live.INCIDENT, evidence(cells_of(source), activation=activation))
    assert isinstance(refused, Refused)
    assert part in refused.reason
