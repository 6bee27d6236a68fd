from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ddp_ranks
import live
import pytest
import torch
from observed import facts

from oomdoctor.fixes.dp_to_ddp import FIX, patch, propose
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Census, Role
from oomdoctor.model.unavailable import Refused

NONE = Dose()

DATA = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
batch_size = 16
dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)  # the training set
"""
MODEL = """\
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
if torch.cuda.device_count() >= 0:
    model = nn.DataParallel(model)
model.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
TRAIN = """\
losses = []
for epoch in range(2):
    # one pass over the data
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
IN_ORDER = DATA.replace(", shuffle=True", "")
FUNCTION = """\
def train_epoch(loader):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
CALLS = """\
losses = []
for number in range(2):
    train_epoch(loader)
"""
LOOK = """{"losses": losses, "state": {n: v.cpu() for n, v in _state(model).items()}, "batch": len(x),
           "seen": [tuple(map(float, x[:, 0])) for _ in range(1) for x, y in loader]}"""


@cache
def ranks(*sources: str, world: int) -> list[Any]:
    return ddp_ranks.run([*sources], LOOK.replace("len(x)", "len(next(iter(loader))[0])"), world=world)


def evidence(*sources: str, first: int = 3 << 20, other: int = 1 << 20, devices: int = 2) -> Evidence:
    names = {"model": torch.nn.Linear(1, 1), "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}
    code = facts(
        live.cells_of(*sources), names, (("model", names["model"]),), (("optimizer", names["optimizer"]),), loaded=()
    )
    found = live.evidence()
    censuses = tuple(
        Census(device=f"cuda:{n}", found=0, allocated=live.NONE, roles=((Role.ACTIVATION, other if n else first),))
        for n in range(devices)
    )
    return replace(found, censuses=censuses, code=code)


def fixed(*sources: str) -> Patch:
    made = patch(live.cells_of(*sources), evidence(*sources), NONE)
    assert isinstance(made, Patch), made
    return made


def after(*sources: str) -> tuple[str, ...]:
    changed = {edit.cell: edit.after for edit in fixed(*sources).edits}
    return tuple(changed.get(number, source) for number, source in enumerate(sources, 1))


@pytest.mark.parametrize("sources", [(IN_ORDER, MODEL, TRAIN), (IN_ORDER, MODEL, FUNCTION, CALLS)])
def test_two_processes_train_on_halves_of_the_batches_that_one_trained_on(sources) -> None:
    (plain,) = ranks(*sources, world=1)
    first, second = ranks(*after(*sources), world=2)
    mean = [(one + other) / 2 for one, other in zip(first["losses"], second["losses"], strict=True)]
    assert mean == pytest.approx(plain["losses"], rel=1e-5)
    assert (plain["batch"], first["batch"], second["batch"]) == (16, 8, 8)
    for one in (first, second):
        assert live.furthest(one["state"], plain["state"]) < 1e-4
    assert live.same(first["state"], second["state"])


def test_a_shuffled_set_comes_once_in_each_epoch_and_each_time_in_another_order() -> None:
    first, second = ranks(*after(DATA, MODEL, TRAIN), world=2)
    seen = [number for one in (first, second) for batch in one["seen"] for number in batch]
    assert len(seen) == len(set(seen)) == 64
    sources = after(DATA, MODEL, TRAIN)
    look = "    orders.append([x.tolist() for x, y in loader])\n    # one pass"
    looked = ddp_ranks.run([*sources[:2], "orders = []\n" + sources[2].replace("    # one pass", look)], "orders")
    assert looked[0][0] != looked[0][1]


GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,9 +1,15 @@
 import torch
 from torch import nn
 from torch.utils.data import DataLoader, TensorDataset
+import os
+import torch.distributed as dist
+from torch.utils.data import DistributedSampler
+
+dist.init_process_group()  # started by: torchrun --nproc-per-node=gpu program.py
+torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
 
 torch.manual_seed(0)
-device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
+device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
 batch_size = 16
 dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
-loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)  # the training set
+loader = DataLoader(dataset, batch_size=batch_size // dist.get_world_size(), sampler=DistributedSampler(dataset))  # the training set
--- In[2]
+++ In[2] fixed
@@ -1,6 +1,8 @@
+from torch.nn.parallel import DistributedDataParallel
+
 model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
 if torch.cuda.device_count() >= 0:
-    model = nn.DataParallel(model)
+    model = DistributedDataParallel(model.to(device))
 model.to(device)
 criterion = nn.CrossEntropyLoss()
 optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
--- In[3]
+++ In[3] fixed
@@ -1,6 +1,7 @@
 losses = []
 for epoch in range(2):
     # one pass over the data
+    loader.sampler.set_epoch(loader.sampler.epoch + 1)
     for x, y in loader:
         x, y = x.to(device), y.to(device)
         optimizer.zero_grad()
"""  # noqa: E501, W293


def test_golden_diff_and_second_time() -> None:
    assert fixed(DATA, MODEL, TRAIN).diff() == GOLDEN
    again = after(DATA, MODEL, TRAIN)
    refused = patch(live.cells_of(*again), evidence(DATA, MODEL, TRAIN), NONE)
    assert refused == Refused("the cells start processes already: `init_process_group`")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model = nn.DataParallel(model).to(device)", "DistributedDataParallel(model.to(device))"),
        ("model = nn.DataParallel(model).cuda()", "DistributedDataParallel(model.cuda())"),
        ("model = nn.DataParallel(Net().to(device))", "DistributedDataParallel(Net().to(device))"),
        ("model = nn.DataParallel(model, device_ids=[0, 1])\nmodel.cuda()", "DistributedDataParallel(model.cuda())"),
        ("model.to(device)\nmodel = nn.DataParallel(model)", "DistributedDataParallel(model)"),
        ("model = Net().to(device)\nmodel = nn.DataParallel(model)", "DistributedDataParallel(model)"),
        ("net = nn.DataParallel(model)\nmodel = net.to(device)", "DistributedDataParallel(model.to(device))"),
        ("model = nn.DataParallel(model)", "DistributedDataParallel(model.cuda())"),
    ],
)
def test_the_model_is_on_its_device_before_it_is_wrapped(line, expected) -> None:
    made = after(DATA, line, TRAIN)
    assert expected in made[1]
    assert ("--nproc-per-node=2 " if "device_ids" in line else "--nproc-per-node=gpu ") in made[0]


@pytest.mark.parametrize(
    ("kwargs", "incident", "why"),
    [
        ({"first": 1 << 20}, live.INCIDENT, "no more activations than the other devices"),
        ({"devices": 1}, live.INCIDENT, "one device is in use"),
        ({}, replace(live.INCIDENT, device="cuda:1"), "not the first device"),
    ],
)
def test_nothing_is_proposed_without_evidence(kwargs, incident, why) -> None:
    refused = propose(incident, evidence(DATA, MODEL, TRAIN, **kwargs))
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_what_is_proposed() -> None:
    (proposal,) = propose(live.INCIDENT, evidence(DATA, MODEL, TRAIN))
    assert (proposal.effect, proposal.saves) == (Effect.ADVICE, 2 << 20)
    refused = propose(live.INCIDENT, evidence(DATA, TRAIN))
    assert refused == Refused("no model is wrapped in nn.DataParallel")


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ((DATA, MODEL.replace("(model)", "(model, device_ids=[1, 2])", 1), TRAIN), "names the devices"),
        ((DATA, MODEL.replace("(model)", "(model, dim=1)", 1), TRAIN), "names the devices"),
        ((DATA, MODEL.replace("(device)", "('cuda:1')"), TRAIN), "`cuda:1` names one device"),
        ((DATA, MODEL.replace("model.to(device)", "model.cuda(0)"), TRAIN), "`cuda(0` names one device"),
        ((DATA, "dist.init_process_group()\n" + MODEL, TRAIN), "start processes already"),
        ((DATA, "pass", TRAIN), "no cell wraps one model"),
        ((DATA, MODEL, TRAIN.replace("in loader", "in batches")), "`batches` is no DataLoader"),
        ((DATA, MODEL, "model(x)"), "is no DataLoader"),
        ((DATA.replace("shuffle=True", "sampler=s"), MODEL, TRAIN), "a `sampler`, which would have to know"),
        ((DATA.replace("(dataset,", "(make(),"), MODEL, TRAIN), "give it a name first"),
        ((DATA.replace("batch_size=batch_size, ", ""), MODEL, TRAIN), "batches of one sample"),
        ((DATA.replace("import torch\n", "import torch as t\n"), MODEL, TRAIN), "no cell imports torch by its name"),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(sources, why) -> None:
    refused = patch(live.cells_of(*sources), evidence(*sources), NONE)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_it_is_never_applied() -> None:
    assert FIX.effect is Effect.ADVICE
    assert FIX.apply is None


@pytest.mark.gpu
def test_on_gpus_a_process_for_each_trains_as_one_for_all() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two CUDA devices")
    sources = (IN_ORDER, MODEL, TRAIN)
    (plain,) = ddp_ranks.run([*sources], "(losses, torch.cuda.max_memory_allocated(0))", world=1, device="cuda")
    found = ddp_ranks.run([*after(*sources)], "(losses, torch.cuda.max_memory_allocated())", device="cuda")
    mean = [(one + other) / 2 for one, other in zip(found[0][0], found[1][0], strict=True)]
    assert mean == pytest.approx(plain[0], rel=1e-3)
