from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ddp_ranks
import live
import pytest
import torch

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import get
from oomdoctor.model.code import CodeFacts, ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

FIX = get("ddp_settings")
patch, propose = FIX.patch, FIX.propose

DDP = "DistributedDataParallel"
VIEW = Dose.of(gradient_as_bucket_view=True)

SETUP = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(64, 7))
"""
WRAP = """\
# every rank has the same weights
model = DDP(model, find_unused_parameters=True)  # just to be sure
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
LOOP = """\
torch.manual_seed(rank)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
MAIN = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(
        nn.Linear(64, 64),
        bucket_cap_mb=10,  # few large messages
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return net


model = main()
"""
LOOK = """{
    "code": code,
    "losses": losses,
    "state": _state(model),
    "random": torch.get_rng_state(),
    "gradients": len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}),
}"""
BIG = """\
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
model = DDP(model)
"""
BIG_LOOP = """\
for _ in range(2):
    model.zero_grad()
    model(torch.ones(2, 2048)).sum().backward()
"""
RESIDENT = "(__import__('ctypes').CDLL(None).malloc_trim(0), int(open('/proc/self/statm').read().split()[1]) * 4096)[1]"


@cache
def ranks(*sources: str, world: int = 2) -> list[Any]:
    return ddp_ranks.run([*sources], LOOK, world=world)


def evidence(code: CodeFacts | None = None, gradients: int = 1 << 20, **facts: Any) -> Evidence:
    known = code or CodeFacts(distributed=DDP, world_size=2)
    found = live.evidence(roles=((Role.GRADIENT, gradients),))
    return replace(found, code=replace(known, **facts))


def fixed(*sources: str, dose: Dose = VIEW, code: CodeFacts | None = None) -> Patch:
    made = patch(live.cells_of(*sources), evidence(code), dose)
    assert isinstance(made, Patch), made
    return made


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether losses, parameters and random numbers are the same bits on every rank."""
    return all(
        one["losses"] == other["losses"]
        and live.same(one["state"], other["state"])
        and torch.equal(one["random"], other["random"])
        for one, other in zip(left, right, strict=True)
    )


def test_the_same_bits_and_the_gradients_once() -> None:
    plain = ranks(SETUP, WRAP + LOOP)
    assert plain[0]["losses"] != plain[1]["losses"]
    code = plain[0]["code"]
    (proposal,) = propose(live.INCIDENT, evidence(code))
    assert (proposal.dose, proposal.effect, proposal.saves) == (VIEW, Effect.EXACT, 1 << 20)
    (edit,) = fixed(SETUP, WRAP + LOOP, dose=proposal.dose, code=code).edits
    changed = ranks(SETUP, edit.after)
    assert same(plain, changed)
    assert {one["gradients"] for one in plain} == {10}  # as many storages as parameters, beside the bucket
    assert {one["gradients"] for one in changed} == {1}  # the bucket
    (facts,) = changed[0]["code"].replicas
    assert (facts.bucket_views, facts.ranks) == (True, 2)


def test_three_ranks_keep_the_bits_because_only_the_views_change() -> None:
    plain = ranks(SETUP, WRAP + LOOP, world=3)
    (proposal,) = propose(live.INCIDENT, evidence(plain[0]["code"]))
    assert proposal.dose == VIEW
    (edit,) = fixed(SETUP, WRAP + LOOP).edits
    assert same(plain, ranks(SETUP, edit.after, world=3))


def test_the_second_copy_of_the_gradients_is_gone_from_the_memory_of_the_process() -> None:
    gradients = 2 * (2048 * 2048 + 2048) * 4
    (edit,) = fixed(SETUP, BIG + BIG_LOOP).edits
    plain = ddp_ranks.run([SETUP, BIG + BIG_LOOP], RESIDENT)
    for before, after in zip(plain, ddp_ranks.run([SETUP, edit.after], RESIDENT), strict=True):
        assert 0.8 * gradients < before - after < 1.3 * gradients


def test_a_process_of_its_own_can_run_the_cell_again() -> None:
    plain = ranks(SETUP, WRAP, LOOP, world=1)
    (edit,) = fixed(SETUP, WRAP, LOOP, code=plain[0]["code"]).edits
    assert edit.replay == "model = DDP(model.module, find_unused_parameters=True, gradient_as_bucket_view=True)"
    replayed = ranks(SETUP, WRAP, edit.replay + "\n" + LOOP, world=1)
    assert same(plain, replayed)
    assert same(plain, ranks(SETUP, edit.after, LOOP, world=1))
    assert (plain[0]["gradients"], replayed[0]["gradients"]) == (10, 1)


def test_one_process_of_several_cannot(monkeypatch) -> None:
    guard = FIX.guard
    assert guard is not None
    with guard(live.session(), VIEW):
        pass
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(OomDoctorError, match="2 processes"), guard(live.session(), VIEW):
        pass


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -10,6 +10,7 @@
     net = DistributedDataParallel(
         nn.Linear(64, 64),
         bucket_cap_mb=10,  # few large messages
+        gradient_as_bucket_view=True,
     )
     optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
     for _ in range(5):
"""
GOLDEN_CELL = """\
--- In[2]
+++ In[2] fixed
@@ -1,3 +1,3 @@
 # every rank has the same weights
-model = DDP(model, find_unused_parameters=True)  # just to be sure
+model = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=True)  # just to be sure
 optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""


def test_golden_diffs_and_second_time() -> None:
    live_model = replace(evidence().code, replicas=(ReplicaFacts(path="model", type_name=DDP),))
    for sources, dose, golden in (((MAIN,), VIEW, GOLDEN), ((SETUP, WRAP, LOOP), VIEW, GOLDEN_CELL)):
        made = fixed(*sources, dose=dose, code=live_model)
        assert made.diff() == golden
        after = {edit.cell: edit.after for edit in made.edits}
        again = [after.get(number, source) for number, source in enumerate(sources, 1)]
        assert patch(live.cells_of(*again), evidence(live_model), dose) == Refused("there is nothing left to change")


def test_a_function_of_an_earlier_cell_is_defined_again() -> None:
    define, call = MAIN.rsplit("\n\n\n", 1)
    (edit,) = fixed(define, call).edits
    assert edit.replay.startswith("def main():")
    assert "gradient_as_bucket_view=True" in edit.replay


NO_COPY = ReplicaFacts(path="model", type_name=DDP, ranks=2, bucket_views=True)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (evidence(distributed=None), "no model is wrapped in DistributedDataParallel"),
        (evidence(distributed="FullyShardedDataParallel"), "settings of its own"),
        (evidence(replicas=(NO_COPY,)), "in the buckets already"),
        (evidence(gradients=0), "not a second copy"),
    ],
)
def test_nothing_is_proposed_without_evidence(found: Evidence, why: str) -> None:
    refused = propose(live.INCIDENT, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("train(model)", "made by a library"),
        ("model = DDP(model, **settings)", "settings are unpacked"),
        ("model = DDP(model, gradient_as_bucket_view=config.views)", "takes `gradient_as_bucket_view` from"),
        ("model = DDP(model)\nhistory.append(w.grad)", "`history.append(w.grad)` may hold on to a gradient"),
        ("model = DDP(model)\ng = [p.grad for p in model.parameters()]", "may hold on to a gradient"),
        ("model = DDP(model)\np.grad.detach_()", "may hold on to a gradient"),
        ("model = DDP(model)\ng = p.grad.mul_(2)", "may hold on to a gradient"),
        ("model = DDP(model)\nloss.backward(create_graph=True)", "`loss.backward(create_graph=True)` may hold on"),
        ("model = DDP(", "is not Python"),
        ("%time model = DDP(model)", "IPython's own syntax"),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(source, why) -> None:
    imports = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    refused = patch(live.cells_of(imports + source), evidence(), VIEW)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_an_earlier_wrapper_that_no_name_leads_to_is_refused() -> None:
    sources = (f"from torch.nn.parallel import {DDP}\nmodels = [{DDP}(net)]", "train()")
    refused = patch(live.cells_of(*sources), evidence(), VIEW)
    assert isinstance(refused, Refused)
    assert "line 2 of cell 1" in refused.reason


@pytest.mark.parametrize(
    "use",
    [
        "p.grad = None",
        "if p.grad is not None: p.grad.data.mul_(0.5)",
        "total = p.grad.norm(2).item()",
        "torch.isfinite(p.grad).all()",
        "torch.autograd.grad(loss, x)",
        "saved = p.grad.clone()",
        "p.grad *= 2",
        "loss.backward(create_graph=False)",
    ],
)
def test_a_gradient_that_is_only_measured_or_scaled_is_no_hindrance(use) -> None:
    imports = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    assert fixed(f"{imports}model = DDP(model)\n{use}").edits[0].after.endswith(f"=True)\n{use}")


@pytest.mark.gpu
def test_on_a_gpu_the_second_copy_is_gone() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    moved = BIG.replace("model = DDP(model)", "torch.cuda.set_device(0)\nmodel = DDP(model.cuda())")
    loop = BIG_LOOP.replace("(2, 2048)", "(2, 2048, device='cuda')")
    (edit,) = fixed(SETUP, moved + loop).edits
    look = "(torch.cuda.memory_allocated(), {n: v.cpu() for n, v in _state(model).items()})"
    plain = ddp_ranks.run([SETUP, moved + loop], look, device="cuda")
    for (before, left), (after, right) in zip(
        plain, ddp_ranks.run([SETUP, edit.after], look, device="cuda"), strict=True
    ):
        assert before - after >= 0.9 * 2 * (2048 * 2048 + 2048) * 4
        assert live.same(left, right)
