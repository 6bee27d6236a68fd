from __future__ import annotations

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells, Session
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("set_to_none")
guard, patch, propose = FIX.guard, FIX.patch, FIX.propose

NONE = Dose()
GRADIENTS = ((Role.GRADIENT, 7 << 20), (Role.PARAMETER, 7 << 20))

MAKES = """\
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Dropout(0.2)] * 1, torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
"""
TRAINS = """\
losses = []
for x in batches:
    optimizer.zero_grad(set_to_none=False)  # as the old tutorial has it
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(*sources: str, roles: tuple[tuple[Role, int], ...] = GRADIENTS) -> Evidence:
    return replace(live.evidence(roles=roles), code=facts(cells_of(*sources), {}, loaded=()))


def session_of(space: dict[str, Any]) -> Session:
    optimizers = tuple((n, one) for n, one in space.items() if isinstance(one, torch.optim.Optimizer))
    modules = tuple((n, one) for n, one in space.items() if isinstance(one, nn.Module))
    return live.having(live.session(namespace=space), optimizers=optimizers, modules=modules)


def run(trains: str, context: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    space: dict[str, Any] = {"torch": torch, "batches": [torch.randn(16, 64, generator=generator) for _ in range(5)]}
    exec(MAKES, space)
    with context(session_of(space)) if context else nullcontext():
        exec(trains, space)
    return space | {"rng": torch.get_rng_state()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        left["losses"] == right["losses"]
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and torch.equal(left["rng"], right["rng"])
    )


def watched(session: Session) -> Any:
    return guard(session, NONE)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,6 +1,6 @@
 losses = []
 for x in batches:
-    optimizer.zero_grad(set_to_none=False)  # as the old tutorial has it
+    optimizer.zero_grad(set_to_none=True)  # as the old tutorial has it
     loss = model(x).square().mean()
     loss.backward()
     optimizer.step()
"""


def test_golden_diff_and_second_time() -> None:
    made = patch(cells_of(MAKES, TRAINS), evidence(MAKES, TRAINS), NONE)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    after = made.edits[0].after
    assert isinstance(patch(cells_of(MAKES, after), evidence(MAKES, after), NONE), Refused)
    assert isinstance(patch(cells_of(MAKES, after), evidence(MAKES, TRAINS), NONE), Refused)


def test_the_same_bits() -> None:
    (edit,) = patch(cells_of(MAKES, TRAINS), evidence(MAKES, TRAINS), NONE).edits
    plain = run(TRAINS)
    assert same(plain, run(edit.after))
    assert same(plain, run(edit.after, watched))
    assert not same(plain, run(TRAINS.replace("0.1", "0.2").replace("loss.backward", "(2 * loss).backward")))


PEAK = """\
for _ in range(3):
    optimizer.zero_grad({how})
    with seen:
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""


def test_gradients_are_not_there_while_the_forward_grows() -> None:
    def held_in_forward(how: str, context: Any = nullcontext) -> int:
        model = nn.Linear(200, 200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        space = {"model": model, "optimizer": optimizer, "x": torch.randn(4, 200)}
        most = []

        class Seen:
            def __enter__(self) -> None:
                most.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

            def __exit__(self, *args: object) -> None: ...

        with context():
            exec(PEAK.format(how=how), space | {"seen": Seen()})
        return most[-1]

    kept = held_in_forward("set_to_none=False")
    assert kept == (200 * 200 + 200) * 4
    assert held_in_forward("set_to_none=True") == 0


def test_the_peak_goes_down() -> None:
    def peak(how: str, context: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), *[nn.Tanh() for _ in range(20)], nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context, live.Peak() as seen:
            exec(PEAK.format(how=how), {**locals(), "x": torch.randn(256, 64), "seen": nullcontext()})
        return seen.peak

    kept = peak("set_to_none=False", nullcontext())
    assert peak("set_to_none=True", nullcontext()) <= kept - 64 * 64 * 4


SKIPS = """\
for step, x in enumerate(batches):
    optimizer.zero_grad(set_to_none=False)
    part = model[0] if step % 2 else model
    part(x).square().mean().backward()
    optimizer.step()
losses = []
"""


def test_a_parameter_without_a_gradient_in_some_steps_is_refused() -> None:
    with pytest.raises(OomDoctorError, match="no gradient in some steps"):
        run(SKIPS.replace("False", "True"), watched)
    assert not same(run(SKIPS), run(SKIPS.replace("False", "True")))  # it would have differed


def test_a_gradient_from_before_counts() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    session = live.session(model=model)  # it does not know the optimizer
    with guard(session, NONE):
        optimizer.zero_grad(set_to_none=True)
        with pytest.raises(OomDoctorError, match="no gradient"):
            optimizer.step()


def test_functions_of_earlier_cells_and_other_forms() -> None:
    function = """
        def fit(net, opt_d, opt_g):
            net.zero_grad(False)
            opt_d.zero_grad(set_to_none=False); opt_g.zero_grad()
            keep.zero_grad(set_to_none=wanted)
    """
    found = evidence(function, "fit(model, a, b)")
    (edit,) = patch(cells_of(function, "fit(model, a, b)"), found, NONE).edits
    assert edit.cell == 1
    assert "net.zero_grad(True)" in edit.replay
    assert "opt_d.zero_grad(set_to_none=True); opt_g.zero_grad()" in edit.replay
    assert "set_to_none=wanted" in edit.replay


def test_a_method_of_a_class_of_an_earlier_cell() -> None:
    source = """
        class Trainer:
            def fit(self):
                self.optimizer.zero_grad(set_to_none=False)
    """
    call = "trainer = Trainer(); trainer.fit()"
    made = patch(cells_of(source, call), evidence(source, call), NONE)
    assert isinstance(made, Patch)
    assert "self.optimizer.zero_grad(set_to_none=True)" in made.edits[0].replay


def test_proposal_and_refusals() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(MAKES, TRAINS))  # type: ignore[misc]
    assert (proposal.saves, proposal.effect) == (7 << 20, Effect.EXACT)
    assert "census found 7.00 MiB of gradients" in proposal.basis
    for found, why in (
        (evidence(MAKES, TRAINS, roles=()), "no gradients"),
        (evidence(MAKES, TRAINS.replace("set_to_none=False", "")), "no call of zero_grad"),
    ):
        refused = propose(live.INCIDENT, found)
        assert isinstance(refused, Refused)
        assert why in refused.reason


def test_a_step_that_needs_the_gradients_is_not_helped_by_letting_go_of_them() -> None:
    incident = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:100 in _multi_tensor_adam")
    refused = propose(incident, evidence(MAKES, TRAINS))
    assert isinstance(refused, Refused)
    assert "optimizer's step" in refused.reason
