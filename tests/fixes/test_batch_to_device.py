from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from oomdoctor.fixes.batch_to_device import FIX, patch, propose
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

NONE = Dose()

DATA = """\
torch.manual_seed(0)
x_train, y_train = torch.randn(50, 8), torch.randn(50, 1)
"""
CUTS = """\
# everything fits, surely
x_train = x_train.to(device)  # the images
y_train = y_train.to(device)
n = len(x_train)
"""
TRAINS = """\
losses = []
for i in range(5):
    picks = torch.randperm(n)[:16]
    xb, yb = x_train[picks], y_train[picks]
    optimizer.zero_grad()
    loss = loss_fn(model(xb), yb)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
GOLDEN = """\
--- In[3]
+++ In[3] fixed
@@ -1,4 +1,2 @@
 # everything fits, surely
-x_train = x_train.to(device)  # the images
-y_train = y_train.to(device)
 n = len(x_train)
--- In[4]
+++ In[4] fixed
@@ -1,7 +1,7 @@
 losses = []
 for i in range(5):
     picks = torch.randperm(n)[:16]
-    xb, yb = x_train[picks], y_train[picks]
+    xb, yb = x_train[picks].to(device), y_train[picks].to(device)
     optimizer.zero_grad()
     loss = loss_fn(model(xb), yb)
     loss.backward()
"""
MODEL = """\
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3), nn.Linear(4, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()
"""
LOADS = """\
from torch.utils.data import DataLoader, TensorDataset

train_ds = TensorDataset(x_train.to(device), y_train.to(device))
loader = DataLoader(
    train_ds,
    batch_size=16,
    shuffle=True,  # every epoch
)
"""
EPOCH = """\
losses = []
for xb, yb in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(xb), yb)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(*sources: str, holdings: tuple[Holding, ...] = (), device: str = "cuda:0") -> Evidence:
    base = live.evidence(holdings=holdings)
    return replace(
        base,
        code=facts(cells_of(*sources), {}, loaded=()),
        devices=(replace(base.device, tensor_device=device),),
    )


def patched(*sources: str) -> Patch | Refused:
    return patch(cells_of(*sources), evidence(*sources), NONE)


def run(*sources: str, device: str = "cpu") -> dict[str, Any]:
    space: dict[str, Any] = {"torch": torch, "nn": nn, "device": device, "F": nn.functional}
    space |= {"DataLoader": DataLoader, "TensorDataset": TensorDataset, "random_split": random_split}
    for source in sources:
        exec(textwrap.dedent(source), space)
    return space | {"rng": torch.get_rng_state()}


def changed(made: Patch | Refused, *sources: str) -> list[str]:
    """The cells after the patch."""
    assert isinstance(made, Patch), made
    after = {edit.cell: edit.after for edit in made.edits}
    return [after.get(number, source) for number, source in enumerate(sources, 1)]


def replayed(made: Patch | Refused, *sources: str) -> list[str]:
    """What a retry runs: the cells as they were, the replays, and the failing cell after the patch."""
    assert isinstance(made, Patch), made
    after = {edit.cell: edit.after for edit in made.edits}
    replays = [edit.replay for edit in made.edits if edit.cell != len(sources)]
    return [*sources[:-1], *replays, after.get(len(sources), sources[-1])]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        len(left["losses"]) == len(right["losses"])
        and all(torch.equal(a, b) for a, b in zip(left["losses"], right["losses"], strict=True))
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and torch.equal(left["rng"], right["rng"])
    )


def test_golden_diff_and_second_time() -> None:
    sources = (DATA, MODEL, CUTS, TRAINS)
    made = patched(*sources)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    again = changed(made, *sources)
    assert isinstance(patched(*again), Refused)
    assert isinstance(patch(cells_of(*again), evidence(*sources), NONE), Refused)


def test_golden_diff_of_a_loader() -> None:
    made = patched(DATA, MODEL, LOADS, EPOCH)
    assert isinstance(made, Patch), made
    assert (
        made.edits[0].after
        == """\
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import default_collate

train_ds = TensorDataset(x_train, y_train)
loader = DataLoader(
    train_ds,
    batch_size=16,
    shuffle=True,  # every epoch
    collate_fn=lambda rows: [part.to(device) for part in default_collate(rows)],
)
"""
    )
    assert isinstance(patched(*changed(made, DATA, MODEL, LOADS, EPOCH)), Refused)


INLINE = """
x_train, y_train = x_train.to(device), y_train.to(device)
loader = DataLoader(TensorDataset(x_train, y_train), 16, shuffle=True)
"""
SPLIT = """
x_dev = x_train.to(device)
whole = TensorDataset(x_dev, y_train)
train_ds, valid_ds = random_split(whole, [40, 10])
loader = DataLoader(train_ds, batch_size=16)
valid = DataLoader(valid_ds)
"""
FUNCTION = """
x_train = torch.as_tensor(x_train, device=device)
def batch(picks):
    return x_train[picks], y_train[picks].to(device)
"""
BATCHES = TRAINS.replace("x_train[picks], y_train[picks]", "batch(picks)").replace("randperm(n)", "randperm(50)")
PROGRAMS = [
    (DATA, MODEL, CUTS, TRAINS),
    (DATA, MODEL, LOADS, EPOCH),
    (DATA, MODEL, INLINE, EPOCH),
    (DATA, MODEL, SPLIT, EPOCH.replace("yb)", "yb.to(device))")),
    (DATA, MODEL, FUNCTION, BATCHES),
    (DATA, MODEL, CUTS + TRAINS),
    (DATA, MODEL, LOADS + EPOCH),
]


@pytest.mark.parametrize("sources", PROGRAMS)
def test_the_same_bits_from_the_changed_cells_and_from_their_replay(sources) -> None:
    made = patched(*sources)
    plain = run(*sources)
    assert same(plain, run(*changed(made, *sources)))
    assert same(plain, run(*replayed(made, *sources)))


def on_device(space: dict[str, Any]) -> set[str]:
    """The tensors of the program, by the data set that holds them or by name, that lie on the stand-in for a device."""
    names = [name for name, one in space.items() if isinstance(one, torch.Tensor) and one.is_meta]
    found = {name for name in names if name.startswith(("x_", "y_"))}
    for name, one in space.items():
        if isinstance(one, TensorDataset):
            found |= {f"{name}.tensors" for part in one.tensors if part.is_meta}
    return found


@pytest.mark.parametrize("sources", [(*program[:-1], "pass") for program in PROGRAMS[:3]])
def test_the_data_stays_in_host_memory_and_batches_come_to_the_device(sources) -> None:
    *setup, _ = sources
    last = PROGRAMS[[p[2] for p in PROGRAMS].index(sources[2])][-1]
    made = patched(*setup, last)
    assert on_device(run(*setup, device="meta"))
    after = changed(made, *setup, last)
    space = run(*after, device="meta")
    assert not on_device(space)
    assert space["xb"].device.type == space["yb"].device.type == "meta"


@pytest.mark.parametrize(
    ("placing", "using", "why"),
    [
        ("data = x.to(device)", "out = model(data)\nb = data[i]", "uses `data` as a whole"),
        ("data = x.to(device)", "for i in r:\n    data[i] = 0", "writes to `data`"),
        ("x = x.to(device)\nfirst = x[:10]", "for i in r:\n    model(x[i])", "on the device already"),
        ("x = x.to(device)", "for i in r:\n    b = x[i:j]\n    b += 1", "written to"),
        ("x = x.to(device)", "for i in r:\n    x[i].mul_(2)", "written to"),
        ("data = x.to(device)", "print(len(data))", "nothing was found that takes batches"),
        ("def load():\n    data = x.to(device)\n    return data", "for b in load():\n    model(b)", "in a function"),
        ("if True:\n    x = x.to(device)", "for i in r:\n    model(x[i])", "in a block"),
        (
            "ds = TensorDataset(x.to(device))\nl = DataLoader(ds, collate_fn=mine)",
            "for b in l:\n    model(b)",
            "a way of its own",
        ),
        ("ds = TensorDataset(x.to(device))\nl = Other(ds)", "for b in l:\n    model(b)", "as a whole"),
        ("x = torch.randn(9, device=device)", "for i in r:\n    model(x[i])", "not one that is followed"),
    ],
)
def test_patch_refuses(placing, using, why) -> None:
    refused = patched(placing, using)
    assert isinstance(refused, Refused), refused.diff()
    assert why in refused.reason


def test_a_name_of_a_function_that_hides_the_data_is_another_one() -> None:
    helper = "def show(x_train):\n    plot(x_train)\n"
    made = patched(DATA, MODEL, CUTS, helper, TRAINS)
    assert isinstance(made, Patch), made
    assert [edit.cell for edit in made.edits] == [3, 5]


HELD = (
    Holding(bytes=64 << 20, device="cuda:0", role=Role.BATCH, path="x_train"),
    Holding(bytes=1 << 20, device="cuda:0", role=Role.USER_TENSOR, path="y_train"),
    Holding(bytes=9 << 20, device="cuda:0", role=Role.BATCH, path="xb"),
    Holding(bytes=9 << 20, device="cuda:0", role=Role.ACTIVATION, path="loss → graph"),
)


def test_proposal_and_refusals() -> None:
    sources = (DATA, MODEL, CUTS, TRAINS)
    (proposal,) = propose(live.INCIDENT, evidence(*sources, holdings=HELD))  # type: ignore[misc]
    assert (proposal.saves, proposal.effect) == (65 << 20, Effect.EXACT)
    assert FIX.apply is None
    for found, why in (
        (evidence(DATA, MODEL, EPOCH, holdings=HELD), "no statement"),
        (evidence(*sources, holdings=HELD[2:]), "found no tensors"),
        (evidence(*sources, holdings=HELD, device="cpu"), "host memory already"),
    ):
        refused = propose(live.INCIDENT, found)
        assert isinstance(refused, Refused)
        assert why in refused.reason


@pytest.mark.gpu
def test_on_a_gpu_less_is_allocated_and_the_bits_are_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sources = (DATA.replace("50", "50_000"), MODEL, CUTS, TRAINS)
    peaks = []
    spaces = []
    for one in (sources, changed(patched(*sources), *sources)):
        torch.cuda.reset_peak_memory_stats()
        spaces.append(run(*one, device="cuda"))
        peaks.append(torch.cuda.max_memory_allocated())
        del spaces[-1]["x_train"], spaces[-1]["y_train"]
    assert same(*spaces)
    assert peaks[1] < peaks[0] - 50_000 * 8 * 4
