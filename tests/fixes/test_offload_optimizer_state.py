from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as modules
from torch.optim import optimizer as optim

from oomdoctor import fixes
from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import host_offload
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry.transaction import Transaction

FIX = fixes.get("offload_optimizer_state")
patch, propose = FIX.patch, FIX.propose

NONE = Dose()
STATE = ((Role.OPTIMIZER_STATE, 8 << 20),)

MAKES = """\
import torch

torch.manual_seed(0)
with torch.device(device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)  # as in the paper
"""
TRAINS = """\
losses = []
for x in batches:
    optimizer.zero_grad()
    loss = model(x.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -4,6 +4,15 @@
 with torch.device(device):
     model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
 optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)  # as in the paper
+
+def move_state(optimizer, to_host):
+    for parameter, state in optimizer.state.items():
+        for name, value in state.items():
+            if torch.is_tensor(value) and value.dim():
+                state[name] = value.to("cpu" if to_host else parameter.device)
+
+optimizer.register_step_pre_hook(lambda optimizer, *_: move_state(optimizer, to_host=False))
+optimizer.register_step_post_hook(lambda optimizer, *_: move_state(optimizer, to_host=True))
 losses = []
 for x in batches:
     optimizer.zero_grad()
"""


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory plays the host, and all other memory of this machine the device; contents are copied for real."""
    monkeypatch.setattr(host_offload, "_is_on_host", lambda tensor: tensor.is_shared())
    monkeypatch.setattr(host_offload, "_on_host", lambda data: data.clone().share_memory_())
    monkeypatch.setattr(host_offload, "_on_device", lambda data, device: data.clone())


def program(device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    space: dict[str, Any] = {"device": device, "batches": [torch.randn(8, 32, generator=generator) for _ in range(5)]}
    exec(MAKES, space)
    return space


def session_of(space: dict[str, Any]) -> Session:
    optimizers = tuple((n, one) for n, one in space.items() if isinstance(one, torch.optim.Optimizer))
    found = tuple((n, one) for n, one in space.items() if isinstance(one, nn.Module))
    return live.having(live.session(namespace=space), optimizers=optimizers, modules=found)


def state(space: dict[str, Any]) -> dict[str, torch.Tensor]:
    held = space["optimizer"].state_dict()["state"]
    return {f"{at}.{name}": one for at, each in held.items() for name, one in each.items()}


def large(space: dict[str, Any]) -> list[torch.Tensor]:
    return [one for one in state(space).values() if one.dim()]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(left["losses"], right["losses"], strict=True))
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and live.same(state(left), state(right))
        and torch.equal(left["rng"], right["rng"])
    )


def run(fixed: bool) -> dict[str, Any]:
    """Train twice, the second time with the fix, if it is wanted, on the state that is there by then."""
    space = program()
    exec(TRAINS, space)
    with FIX.apply(session_of(space), NONE) if fixed else nullcontext():  # type: ignore[misc]
        exec(TRAINS, space)
    return space | {"rng": torch.get_rng_state()}


@pytest.mark.usefixtures("_stand_in")
def test_the_same_bits_after_copies_there_and_back() -> None:
    assert same(run(fixed=False), run(fixed=True))


@pytest.mark.usefixtures("_stand_in")
def test_state_lies_on_the_host_in_forward_and_backward_and_on_the_device_in_the_step() -> None:
    space = program()
    exec(TRAINS, space)
    before = [(id(one), one.data_ptr()) for one in large(space)]
    seen: dict[str, list[bool]] = {"forward": [], "backward": [], "step": []}

    def note(when: str) -> None:
        seen[when] += [one.is_shared() for one in large(space)]

    space["model"].register_forward_hook(lambda *_: note("forward"))
    space["model"][0].weight.register_hook(lambda *_: note("backward"))
    space["optimizer"].register_step_pre_hook(lambda *_: note("step"))
    with FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        exec(TRAINS, space)
    assert len(seen["forward"]) == len(seen["backward"]) == len(seen["step"]) == 5 * 4 * 3
    assert all(seen["forward"])
    assert all(seen["backward"])
    assert not any(seen["step"])
    assert not any(one.is_shared() for one in large(space))
    assert [id(one) for one in large(space)] == [ident for ident, _ in before]


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself(raises) -> None:
    space = program()
    exec(TRAINS, space)
    values = {name: one.clone() for name, one in state(space).items()}
    hooks = [optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks, modules._global_forward_pre_hooks]
    before = [live.digest(space["model"]), [*vars(space["optimizer"])], *map(dict, hooks)]
    try:
        with FIX.apply(session_of(space), NONE):  # type: ignore[misc]
            space["model"](space["batches"][0])
            assert all(one.is_shared() for one in large(space))
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [live.digest(space["model"]), [*vars(space["optimizer"])], *map(dict, hooks)] == before
    assert not any(one.is_shared() for one in large(space))
    assert live.same(state(space), values)


@pytest.mark.usefixtures("_stand_in")
def test_a_snapshot_of_the_cell_brings_back_what_was_there() -> None:
    space = program()
    exec(TRAINS, space)
    values = {name: one.clone() for name, one in state(space).items()}
    weights = live.values(space["model"])
    transaction = Transaction(space, TRAINS, lambda: 1 << 30)
    with FIX.apply(session_of(space), NONE), transaction.armed(strict=True):  # type: ignore[misc]
        exec(TRAINS, space)
    assert not live.same(state(space), values)
    assert transaction.losses() == ()
    transaction.restore()
    assert transaction.unrestored() == []
    assert live.same(state(space), values)
    assert live.same(live.values(space["model"]), weights)


@pytest.mark.usefixtures("_stand_in")
def test_where_the_device_has_no_room_at_the_end_the_next_step_brings_it(monkeypatch) -> None:
    space = program()
    exec(TRAINS, space)

    def full(data: torch.Tensor, device: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    back = host_offload._on_device
    with FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        space["model"](space["batches"][0])
        monkeypatch.setattr(host_offload, "_on_device", full)
    assert all(one.is_shared() for one in large(space))
    monkeypatch.setattr(host_offload, "_on_device", back)
    space["optimizer"].step()
    assert not any(one.is_shared() for one in large(space))
    assert not optim._global_optimizer_pre_hooks


def test_refuses_an_optimizer_that_keeps_state_in_another_way() -> None:
    space = {"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])}
    with pytest.raises(OomDoctorError, match="not followed"), FIX.apply(session_of(space), NONE):  # type: ignore[misc]
        pass


def evidence(*sources: str, space: dict[str, Any], device: str = "cuda:0", **kwargs: Any) -> Evidence:
    base = live.evidence(**{"roles": STATE, **kwargs})
    optimizers = [(n, one) for n, one in space.items() if isinstance(one, torch.optim.Optimizer)]
    code = facts(live.cells_of(*sources), {}, (), optimizers, loaded=())
    return replace(base, code=code, devices=(replace(base.device, tensor_device=device),))


def patched(*sources: str) -> Patch | Refused:
    return patch(live.cells_of(*sources), evidence(*sources, space=program()), NONE)


def test_golden_diff_and_second_time() -> None:
    made = patched(MAKES + TRAINS)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    assert isinstance(patched(made.edits[0].after), Refused)


def test_the_changed_source_gives_the_same_bits() -> None:
    made = patched(MAKES + TRAINS)
    assert isinstance(made, Patch)
    plain, fixed = program(), program()
    for space, source in ((plain, MAKES + TRAINS), (fixed, made.edits[0].after)):
        exec(source, space)
        space["rng"] = torch.get_rng_state()
    assert same(plain, fixed)


def test_the_changed_source_keeps_the_state_on_the_host_beside_a_stand_in_for_a_device() -> None:
    made = patched(MAKES + TRAINS)
    assert isinstance(made, Patch)
    watched = made.edits[0].after.replace("    loss.backward()\n", "    loss.backward()\n    note('backward')\n")
    watched = watched.replace("losses = []", "losses = []\noptimizer.register_step_pre_hook(lambda *_: note('step'))")
    seen: dict[str, list[str]] = {"backward": [], "step": []}
    with FakeTensorMode():
        space: dict[str, Any] = {"device": "meta", "batches": [torch.randn(8, 32) for _ in range(3)]}

        def note(when: str) -> None:
            held = space["optimizer"].state.values()
            seen[when] += [one.device.type for each in held for one in each.values() if one.dim()]

        space["note"] = note
        exec(watched, space)
    assert seen == {"backward": ["cpu"] * 2 * 12, "step": ["meta"] * 2 * 12}


def test_two_optimizers_share_the_function() -> None:
    source = "optG = torch.optim.Adam(a)\nx = 1\noptD = torch.optim.Adam(b)\n"
    space = {name: torch.optim.Adam([nn.Parameter(torch.zeros(2))]) for name in ("optD", "optG")}
    made = patch(live.cells_of("import torch", source), evidence(source, space=space), NONE)
    assert isinstance(made, Patch), made
    assert made.edits[0].after.count("def move_state") == 1
    assert made.edits[0].after.index("def move_state") < made.edits[0].after.index("x = 1")
    assert "optD.register_step_pre_hook" in made.edits[0].after


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ((MAKES, TRAINS), "earlier cell"),
        ((TRAINS,), "no cell makes"),
        (("if True:\n    optimizer = torch.optim.Adam(ws)\n",), "in a block"),
    ],
)
def test_patch_refuses(sources, why) -> None:
    refused = patched(*sources)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_proposal_and_refusals() -> None:
    space = program()
    (proposal,) = propose(live.INCIDENT, evidence(TRAINS, space=space))  # type: ignore[misc]
    assert (proposal.saves, proposal.effect) == (8 << 20, Effect.EXACT)
    step = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:700 _multi_tensor_adam")
    lbfgs = {"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])}
    small = evidence(TRAINS, space=space)
    small = replace(small, host=replace(small.host, available=1 << 20))
    for incident, found, why in (
        (step, evidence(TRAINS, space=space), "in the step itself"),
        (live.INCIDENT, evidence(TRAINS, space=space, roles=()), "no optimizer state"),
        (live.INCIDENT, evidence(TRAINS, space=space, device="cpu"), "host memory already"),
        (live.INCIDENT, evidence(TRAINS, space=lbfgs), "not followed"),
        (live.INCIDENT, evidence("model = DistributedDataParallel(model)\n" + TRAINS, space=space), "itself"),
        (live.INCIDENT, small, "1.00 MiB left"),
    ):
        refused = propose(incident, found)
        assert isinstance(refused, Refused)
        assert why in refused.reason


@pytest.mark.gpu
def test_on_a_gpu_less_is_allocated_outside_of_the_step_and_the_bits_are_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    results = []
    for fixed in (False, True):
        torch.manual_seed(0)
        space: dict[str, Any] = {"model": nn.Linear(1024, 1024).cuda()}
        space["optimizer"] = torch.optim.Adam(space["model"].parameters())
        held = []
        with FIX.apply(session_of(space), NONE) if fixed else nullcontext():  # type: ignore[misc]
            for _ in range(5):
                space["optimizer"].zero_grad()
                loss = space["model"](torch.randn(8, 1024, device="cuda")).square().mean()
                held.append(torch.cuda.memory_allocated())
                loss.backward()
                space["optimizer"].step()
        results.append((live.values(space["model"]), held[-1], [one.device.type for one in large(space)]))
    assert live.same(results[0][0], results[1][0])
    assert results[1][1] < results[0][1] - (7 << 20)
    assert results[0][2] == results[1][2]
