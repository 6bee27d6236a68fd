from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ddp_ranks
import live
import pytest
import torch

from oomdoctor import fixes
from oomdoctor.fixes import ddp_memory
from oomdoctor.model.code import CodeFacts, OptimizerFacts, ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("zero_optimizer")
patch, propose = FIX.patch, FIX.propose

NONE = Dose()
STEP = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:700 _multi_tensor_adam")

SETUP = """\
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(8)], nn.Linear(64, 7))
model = DDP(model)
"""
GROUPS = """\
optimizer = torch.optim.AdamW(
    [
        {"params": list(model.module[:4].parameters()), "lr": 1e-3},  # what was trained before
        {"params": list(model.module[4:].parameters())},
    ],
    lr=1e-2,  # found by a sweep
    weight_decay=0.1,
)
"""
SCHEDULE = """\
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
"""
MOMENTUM = """\
optimizer = optim.SGD(model.parameters(), 1e-2, momentum=0.9)
"""
LOOP = """\
torch.manual_seed(rank)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    losses.append(loss.item())
"""
SCHEDULED = LOOP + "    scheduler.step()\n"
MAIN = f"""\
def main():
    optimizer = torch.optim.Adam(model.parameters())
{"".join("    " + line for line in LOOP.splitlines(keepends=True))}    return losses, optimizer
"""
LOOK = """{
    "code": code,
    "losses": losses,
    "state": _state(model),
    "random": torch.get_rng_state(),
    "rates": [group["lr"] for group in optimizer.param_groups],
    "kept": _storages([v for s in getattr(optimizer, "optim", optimizer).state.values() for v in s.values()]),
    "outer": len(optimizer.state) if hasattr(optimizer, "optim") else 0,
}"""


@cache
def ranks(*sources: str) -> list[Any]:
    return ddp_ranks.run([*sources], LOOK)


def evidence(code: CodeFacts | None = None, state: int = 1 << 20, **facts: Any) -> Evidence:
    known = code or CodeFacts(distributed="DistributedDataParallel", world_size=2)
    found = live.evidence(roles=((Role.OPTIMIZER_STATE, state),))
    return replace(found, code=replace(known, **facts))


def fixed(*sources: str, code: CodeFacts | None = None) -> Patch:
    made = patch(live.cells_of(*sources), evidence(code), NONE)
    assert isinstance(made, Patch), made
    return made


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        one["losses"] == other["losses"]
        and one["rates"] == other["rates"]
        and live.same(one["state"], other["state"])
        and torch.equal(one["random"], other["random"])
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param((SETUP, GROUPS + SCHEDULE + SCHEDULED), id="groups, scheduler, clipping"),
        pytest.param((SETUP, MOMENTUM + LOOP), id="momentum"),
        pytest.param((SETUP, MAIN, "losses, optimizer = main()"), id="function"),
    ],
)
def test_the_same_bits_with_half_of_the_state_on_each_rank(sources) -> None:
    plain = ranks(*sources)
    assert plain[0]["losses"] != plain[1]["losses"]
    code = plain[0]["code"]
    (proposal,) = propose(live.INCIDENT, evidence(code, state=plain[0]["kept"]))
    assert proposal.effect is Effect.EXACT
    made = fixed(*sources, code=code)
    after = {edit.cell: edit.after for edit in made.edits}
    changed = ranks(*(after.get(number, source) for number, source in enumerate(sources, 1)))
    assert same(plain, changed)
    assert sum(one["kept"] for one in changed) == pytest.approx(plain[0]["kept"], rel=0.01)
    for one in changed:
        assert one["outer"] == 0
        assert plain[0]["kept"] - one["kept"] == pytest.approx(proposal.saves, rel=0.1)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,8 +1,11 @@
-optimizer = torch.optim.AdamW(
+from torch.distributed.optim import ZeroRedundancyOptimizer
+
+optimizer = ZeroRedundancyOptimizer(
     [
         {"params": list(model.module[:4].parameters()), "lr": 1e-3},  # what was trained before
         {"params": list(model.module[4:].parameters())},
     ],
+    optimizer_class=torch.optim.AdamW,
     lr=1e-2,  # found by a sweep
     weight_decay=0.1,
 )
"""


def test_golden_diff_and_second_time() -> None:
    made = fixed(SETUP, GROUPS + LOOP)
    assert made.diff() == GOLDEN
    refused = patch(live.cells_of(SETUP, made.edits[0].after), evidence(), NONE)
    assert refused == Refused("the cells share the state of an optimizer already")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Adam(n.parameters())", "Z(n.parameters(), optimizer_class=Adam)"),
        (
            "optim.SGD(n.parameters(), 0.1, momentum=0.9)",
            "Z(n.parameters(), optimizer_class=optim.SGD, lr=0.1, momentum=0.9)",
        ),
        ("Adam(params=n.parameters(), lr=0.1)", "Z(params=n.parameters(), optimizer_class=Adam, lr=0.1)"),
        (
            "Adam(\n    n.parameters(),  # all\n    lr=1,\n)",
            "Z(\n    n.parameters(),  # all\n    optimizer_class=Adam,\n    lr=1,\n)",
        ),
        ("Adam(\n    n.parameters(),\n)", "Z(\n    n.parameters(),\n    optimizer_class=Adam,\n)"),
    ],
)
def test_the_call_is_written_as_it_was(call, expected) -> None:
    imports = "from torch.optim import Adam\n"
    sharded = "from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
    lines = fixed(f"{imports}opt = {call}\ntrain(opt)").edits[0].after.removeprefix(imports + sharded)
    assert lines == f"opt = {expected}\ntrain(opt)".replace("Z(", "ZeroRedundancyOptimizer(")


def adam(kind: str = "Adam", home: str = "torch.optim.adam", largest: int = 1 << 10) -> OptimizerFacts:
    return OptimizerFacts(
        path="opt", type_name=kind, home=home, parameter_bytes=1 << 20, largest_bytes=largest, foreach=False
    )


MIXED = ReplicaFacts(path="model", type_name="DistributedDataParallel", ranks=2, dtypes=("float16", "float32"))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (evidence(distributed=None), "no model is wrapped"),
        (evidence(distributed="deepspeed"), "settings of its own"),
        (evidence(world_size=None), "in no process group"),
        (evidence(world_size=1), "one process, so there is none to share with"),
        (evidence(world_size=4, replicas=(MIXED,)), "a part of the processes"),
        (evidence(replicas=(MIXED,)), "several types"),
        (evidence(state=0), "no optimizer state"),
        (evidence(steppers=(adam("ZeroRedundancyOptimizer"),)), "already"),
        (evidence(steppers=(adam("LBFGS", "torch.optim.lbfgs"),)), "`opt` is a LBFGS"),
        (evidence(steppers=(adam(home="apex.optimizers"),)), "`opt` is a Adam"),
        (evidence(steppers=(adam(largest=1 << 20),)), "one parameter has all the state"),
    ],
)
def test_nothing_is_proposed_without_evidence(found: Evidence, why: str) -> None:
    refused = propose(live.INCIDENT, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


@pytest.mark.parametrize(
    ("incident", "state", "ranks_", "largest", "saves"),
    [
        (live.INCIDENT, 1 << 20, 2, 1 << 10, 1 << 19),
        (live.INCIDENT, 1 << 20, 4, 1 << 10, 3 << 18),
        (live.INCIDENT, 1 << 20, 4, 1 << 19, 1 << 19),  # half of it belongs to one parameter
        (STEP, 0, 2, 1 << 10, 1 << 20),  # the first step makes it
    ],
)
def test_what_it_saves(incident: Incident, state, ranks_, largest, saves) -> None:
    found = evidence(state=state, world_size=ranks_, steppers=(adam(largest=largest),))
    (proposal,) = propose(incident, found)
    assert proposal.saves == saves


TORCH = "import torch\nfrom torch import optim\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("trainer.fit(model)", "no cell makes the optimizer"),
        ("opt = optim.LBFGS(n.parameters())", "no cell makes the optimizer"),
        ("opt = keras.optimizers.Adam(n.parameters())", "no cell makes the optimizer"),
        ("from apex import Adam\nopt = Adam(n.parameters())", "no cell makes the optimizer"),
        ("opt = optim.Adam(n.parameters(), **settings)", "unpacks the optimizer's settings"),
        ("opt = optim.Adam(n.parameters(), 1e-3, (0.9, 0.99))", "by position"),
        ("opt = optim.Adam(lr=0.1, params=ps)", "by position"),
        ("opt = optim.Adam(n.parameters())\nsave(opt.state_dict())", "`opt.state_dict()` needs the whole state"),
        ("opt = optim.Adam(n.parameters())\nself.optimizer.load_state_dict(old)", "needs the whole state"),
        ("opt = optim.Adam(n.parameters())\nprint(opt.state[p])", "`opt.state` needs the whole state"),
        ("opt = optim.Adam([{'params': n.parameters()}])", "readable once only"),
        ("opt = optim.Adam(groups)", "readable once only"),
        ("opt = optim.Adam(n.named_parameters())", "readable once only"),
        ("opt = ZeroRedundancyOptimizer(n.parameters(), optim.Adam)", "already"),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(source, why) -> None:
    refused = patch(live.cells_of(TORCH + source), evidence(), NONE)
    assert isinstance(refused, Refused)
    assert why in refused.reason


@pytest.mark.parametrize(
    "groups",
    [
        "[p for n, p in net.named_parameters() if 'bias' not in n]",
        "filter(lambda p: p.requires_grad, net.parameters())",
        "list(net.parameters())",
        "[{'params': [p for p in net.parameters()], 'weight_decay': 0.0}]",
    ],
)
def test_parameters_that_can_be_read_twice_are_taken(groups) -> None:
    for source in (f"opt = optim.Adam({groups})", f"groups = {groups}\nopt = optim.Adam(groups)"):
        assert "optimizer_class=optim.Adam" in fixed(TORCH + source).edits[0].after


def test_one_process_of_several_does_not_run_it() -> None:
    assert FIX.guard is ddp_memory.alone
    assert FIX.apply is None


@pytest.mark.gpu
def test_on_a_gpu_half_of_the_state_is_allocated_and_the_bits_are_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    moved = "torch.cuda.set_device(0)\nmodel = DDP(model.cuda())"
    setup = SETUP.replace("model = DDP(model)", moved).replace("64", "512")
    loop = LOOP.replace("(8, 64)", "(8, 512, device='cuda')")
    (edit,) = fixed(setup, GROUPS + loop).edits
    look = "(torch.cuda.memory_allocated(), {n: v.cpu() for n, v in _state(model).items()}, losses)"
    plain = ddp_ranks.run([setup, GROUPS + loop], look, device="cuda")
    state = 2 * 4 * (8 * (512 * 512 + 512) + 512 * 7 + 7)
    for (before, left, losses), (after, right, others) in zip(
        plain, ddp_ranks.run([setup, edit.after], look, device="cuda"), strict=True
    ):
        assert before - after >= 0.4 * state
        assert losses == others
        assert live.same(left, right)
