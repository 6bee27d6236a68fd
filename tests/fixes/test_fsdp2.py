from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import ddp_ranks
import live
import pytest
import torch
from running import session_of

from oomdoctor import fixes, pipeline
from oomdoctor.fixes import ddp_memory
from oomdoctor.forecast.ranking import make_plan
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.code import CodeFacts, ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry import Transaction
from oomdoctor.views.prices import fix_rows

FIX = fixes.get("fsdp2")
patch, propose = FIX.patch, FIX.propose

NONE = Dose()
DDP = "DistributedDataParallel"

SETUP = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
        self.head = nn.Linear(64, 7)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""
TRAIN = """\
torch.manual_seed(0)
net = Net()
# the same weights everywhere
model = DDP(net, bucket_cap_mb=10)  # few messages
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(rank)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LOOK = """{
    "code": code,
    "losses": losses,
    "state": {
        n.removeprefix("module."): getattr(p, "full_tensor", p.clone)().detach() for n, p in model.named_parameters()
    },
    "kept": _storages(
        getattr(t, "_local_tensor", t)
        for p in model.parameters()
        for t in (p.data, p.grad, *(v for v in optimizer.state[p].values() if v.dim()))
    ),
}"""


@cache
def ranks(*sources: str, world: int = 2) -> list[Any]:
    return ddp_ranks.run([*sources], LOOK, world=world)


def evidence(code: CodeFacts | None = None, device: str = "cpu", kept: int = 1 << 20, **facts: Any) -> Evidence:
    found = live.evidence(roles=((Role.PARAMETER, kept), (Role.GRADIENT, kept), (Role.OPTIMIZER_STATE, 2 * kept)))
    model = live.model_facts(blocks=("module.blocks", "module.blocks.0.inner"))
    known = code or CodeFacts(
        distributed=DDP, world_size=2, replicas=(ReplicaFacts(path="model", type_name=DDP, ranks=2),), models=(model,)
    )
    devices = (replace(found.device, name=device),)
    return replace(found, devices=devices, code=replace(known, **facts))


def fixed(*sources: str, found: Evidence | None = None) -> Patch:
    made = patch(live.cells_of(*sources), found or evidence(), NONE)
    assert isinstance(made, Patch), made
    return made


def test_the_patched_program_trains_the_same_with_a_share_on_each_rank() -> None:
    plain = ranks(SETUP, TRAIN)
    found = evidence(plain[0]["code"])
    (proposal,) = propose(live.INCIDENT, found)
    assert (proposal.effect, proposal.saves) == (Effect.ADVICE, 2 << 20)
    (edit,) = fixed(SETUP, TRAIN, found=found).edits
    for before, after in zip(plain, ranks(SETUP, edit.after), strict=True):
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
        assert live.furthest(after["state"], before["state"]) < 1e-5
        assert after["kept"] == pytest.approx(before["kept"] / 2, rel=0.05)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,7 +1,12 @@
+from torch.distributed.fsdp import fully_shard
+
 torch.manual_seed(0)
 net = Net()
 # the same weights everywhere
-model = DDP(net, bucket_cap_mb=10)  # few messages
+model = net
+for block_2 in model.blocks:
+    fully_shard(block_2)
+fully_shard(model)  # few messages
 optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
 
 torch.manual_seed(rank)
"""  # noqa: W293


def test_golden_diff_and_second_time() -> None:
    made = fixed(SETUP, TRAIN)
    assert made.diff() == GOLDEN
    again = patch(live.cells_of(SETUP, made.edits[0].after), evidence(), NONE)
    assert again == Refused("the cells shard a model already")


def test_a_model_that_keeps_its_name_is_not_bound_again() -> None:
    (edit,) = fixed("model = DistributedDataParallel(model, device_ids=[rank])\nfit(model)").edits
    assert edit.after.endswith("\nfor block in model.blocks:\n    fully_shard(block)\nfully_shard(model)\nfit(model)")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"distributed": None}, "no model is wrapped"),
        ({"world_size": 1}, "one process, so there is none to share with"),
        ({"world_size": None}, "in no process group"),
        ({"replicas": ()}, "not one model, known by its name"),
        ({"models": (live.model_facts(),)}, "no repeated blocks"),
        ({"kept": 0}, "the census found no parameters"),
    ],
)
def test_nothing_is_proposed_without_evidence(facts, why, monkeypatch) -> None:
    monkeypatch.setattr(ddp_memory, "version", lambda name: "2.13.0")
    refused = propose(live.INCIDENT, evidence(**facts))
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_statistics_of_batches_and_old_versions_are_told(monkeypatch) -> None:
    model = live.model_facts(blocks=("module.blocks",), batch_norm=("module.norm",))
    monkeypatch.setattr(ddp_memory, "version", lambda name: "2.13.0")
    (proposal,) = propose(live.INCIDENT, evidence(models=(model,)))
    assert proposal.caveat is not None
    assert "running statistics" in proposal.caveat
    monkeypatch.setattr(ddp_memory, "version", lambda name: "2.5.1+cu124")
    assert propose(live.INCIDENT, evidence()) == Refused("this torch has no `fully_shard`, which came with 2.6")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("trainer.fit(model)", "no cell wraps `model`"),
        ("def wrap():\n    model = DistributedDataParallel(net)", "no cell wraps `model`"),
        ("other = DistributedDataParallel(net)", "no cell wraps `model`"),
        ("model = compile(DistributedDataParallel(net))", "does more than to wrap"),
        ("model = DistributedDataParallel(net)\ntorch.save(model.module.state_dict())", "`module` of cell 1"),
        ("model = DistributedDataParallel(net)\nwith model.no_sync():\n    step()", "`no_sync` of cell 1"),
        ("opt = torch.optim.Adam(net.parameters())\nmodel = DistributedDataParallel(net)", "line 1 of cell 1 makes"),
        ("model = DistributedDataParallel(", "is not Python"),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(source, why) -> None:
    refused = patch(live.cells_of(source), evidence(), NONE)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_on_a_card_the_process_has_to_choose_its_device() -> None:
    source = "model = DistributedDataParallel(net)"
    refused = patch(live.cells_of(source), evidence(device="cuda:0"), NONE)
    assert isinstance(refused, Refused)
    assert "torch.cuda.set_device" in refused.reason
    fixed(f"torch.cuda.set_device(rank)\n{source}", found=evidence(device="cuda:0"))


def test_it_is_shown_as_a_diff_and_runs_neither_in_a_forecast_nor_in_a_retry() -> None:
    assert (FIX.effect, FIX.apply) == (Effect.ADVICE, None)
    ran: list[int] = []
    source = "model = DistributedDataParallel(model)\nran.append(1)"
    cells = live.cells_of(source)
    session = session_of({"ran": ran}, cells)
    plan = make_plan(session, live.INCIDENT, evidence(), [FIX], budget=1 << 30, prepare=lambda: None, time_budget_s=5.0)
    (candidate,) = plan.candidates
    assert candidate.forecast.basis.startswith("estimate: each of 2 processes")
    (row,) = fix_rows(plan)
    assert (row.apply, row.diff, row.effect, row.promise) == (
        *(None, "%oomdoctor diff 1", "advice"),
        "never applied for you",
    )
    assert "+    fully_shard(block)" in candidate.patch.diff()

    case = Case(number=1, incident=live.INCIDENT, evidence=evidence(), findings=(), plan=plan)
    assert pipeline.admitted(case, "any") == ()

    async def run(attempt: Any) -> BaseException | None:
        exec(attempt.source, session.namespace)
        return None

    transaction = Transaction(session.namespace, source, lambda: 1 << 30)
    healed, error = asyncio.run(
        pipeline.heal(case, session, transaction, [candidate], run, most_attempts=1, time_budget_s=5.0)
    )
    assert error is None
    assert healed.outcome.kind is OutcomeKind.REFUSED
    assert not healed.outcome.anyway
    assert "one of 2 ranks" in healed.outcome.why
    assert ran == []


@pytest.mark.gpu
def test_on_several_gpus_less_is_allocated() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two CUDA devices")
    setup = SETUP.replace('"gloo")', '"nccl")\ntorch.cuda.set_device(dist.get_rank())').replace("64", "1024")
    train = TRAIN.replace("Net()", "Net().cuda()").replace("(8, 16)", "(8, 16, device='cuda')")
    plain = ddp_ranks.run([setup, train], "(torch.cuda.memory_allocated(), losses)", device="cuda")
    (edit,) = fixed(setup, train, found=evidence(device="cuda:0")).edits
    after = ddp_ranks.run([setup, edit.after], "(torch.cuda.memory_allocated(), losses)", device="cuda")
    for (before, losses), (less, others) in zip(plain, after, strict=True):
        assert less < 0.6 * before
        assert others == pytest.approx(losses, rel=1e-4)
