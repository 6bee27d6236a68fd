from __future__ import annotations

from dataclasses import replace
from typing import Any

import live
import loading
import psutil
import pytest
from capabilities import loads_out_of_order
from loading import HOST, LOADERS, LOOP, MIB

from oomdoctor import fixes
from oomdoctor.evidence import host
from oomdoctor.model.fix import Dose, Effect, Patch, Proposal
from oomdoctor.model.unavailable import Refused, Unavailable

FIX = fixes.get("fewer_workers")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -7,6 +7,6 @@
     data,
     batch_size=8,
     shuffle=True,
-    num_workers=4,  # one for each core
+    num_workers=2,  # one for each core
     prefetch_factor=4,
 )
"""
GOLDEN_NONE = """\
--- In[1]
+++ In[1] fixed
@@ -7,6 +7,5 @@
     data,
     batch_size=8,
     shuffle=True,
-    num_workers=4,  # one for each core
-    prefetch_factor=4,
+    num_workers=0,  # one for each core
 )
"""
DRAWS = """\
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return index + torch.rand(2), index

torch.manual_seed(0)
train_loader = DataLoader(Noisy(), batch_size=8, num_workers=4)
"""


def proposals(*sources: str, **more: Any) -> tuple[Proposal, ...]:
    found = propose(HOST, loading.evidence(loading.start(*sources[:-1]), *sources, **more))
    assert not isinstance(found, Refused), found
    return found


def made(count: int, *sources: str) -> Patch | Refused:
    found = loading.evidence(loading.start(*sources[:-1]), *sources)
    return patch(loading.cells(*sources), found, Dose.of(num_workers=count, loaders="train_loader"))


def test_it_proposes_halves_of_the_workers_by_what_they_take() -> None:
    sizes = [60, 80, 100, 120]
    children = tuple(loading.worker(index, size * MIB) for index, size in enumerate(sizes))
    found = proposals(LOADERS, LOOP, children=children)
    assert [str(one.dose) for one in found] == [f"num_workers={n}, loaders=train_loader" for n in (2, 1, 0)]
    assert [one.saves // MIB for one in found] == [180, 270, 360]
    assert [one.effect for one in found] == [Effect.EXACT, Effect.EXACT, Effect.CHANGES_RESULT]
    assert found[0].basis == "estimate: 4 workers were measured to take 360 MiB for themselves"


def test_only_the_loader_in_use_is_named() -> None:
    two = LOADERS + "other = DataLoader(data, num_workers=8)\n"
    assert [one.dose["loaders"] for one in proposals(two, LOOP)] == ["train_loader"] * 3
    both = tuple(loading.worker(0, MIB, name) for name in ("train_loader", "other"))
    found = proposals(two, LOOP, children=both)
    assert [one.dose["loaders"] for one in found] == ["other", *["train_loader, other"] * 3]


def test_golden_diffs_and_second_time() -> None:
    first, none = made(2, LOADERS, LOOP), made(0, LOADERS, LOOP)
    assert isinstance(first, Patch)
    assert isinstance(none, Patch)
    assert first.diff() == GOLDEN
    assert none.diff() == GOLDEN_NONE
    again = made(2, *loading.patched(first, LOADERS, LOOP))
    assert again == Refused("no loader has more than 2 workers")


@pytest.mark.parametrize("count", [3, 1, 0])
def test_the_same_batches_bit_for_bit(count: int) -> None:
    plain = loading.delivered(LOADERS, LOOP)
    change = made(count, LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert loading.delivered(*loading.patched(change, LOADERS, LOOP)) == plain
    assert loading.retried(change, LOADERS, LOOP) == plain
    fresh, again = loading.replayed(change, LOADERS, LOOP)
    assert fresh == again


def test_samples_that_are_drawn_in_workers_are_others_and_that_is_said() -> None:
    change = made(2, DRAWS, LOOP)
    assert isinstance(change, Patch)
    assert loading.delivered(*loading.patched(change, DRAWS, LOOP)) != loading.delivered(DRAWS, LOOP)
    for one in proposals(DRAWS, LOOP):
        assert one.effect is Effect.CHANGES_RESULT
        assert one.caveat is not None
        assert "random numbers are drawn for each" in one.caveat


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("prefetch_factor=4", "persistent_workers=True", "are kept between epochs"),
        pytest.param(
            "prefetch_factor=4", "in_order=False", "in the order in which they are ready", marks=loads_out_of_order
        ),
        ("prefetch_factor=4", "generator=torch.Generator()", "draws from a generator of the program's"),
        ("prefetch_factor=4", "worker_init_fn=print", "`worker_init_fn`"),
    ],
)
def test_what_is_not_certain_is_said(old: str, new: str, why: str) -> None:
    for one in proposals(LOADERS.replace(old, new), LOOP):
        assert one.effect is Effect.CHANGES_RESULT
        assert one.caveat is not None
        assert why in one.caveat


def test_without_workers_more_has_to_be_certain() -> None:
    stacks = "def stack(rows):\n    return torch.stack([x for x, _ in rows])\n"
    own = LOADERS.replace("train_loader = ", f"{stacks}train_loader = ").replace(
        "prefetch_factor=4", "collate_fn=stack"
    )
    in_order = LOADERS.replace("shuffle=True", "shuffle=False")
    assert {one.effect for one in proposals(in_order, LOOP)} == {Effect.EXACT}
    for source, why in ((own, "put together"), (LOADERS, "draws the seed of its order")):
        found = proposals(source, LOOP)
        assert [one.effect for one in found[:-1]] == [Effect.EXACT] * 2
        assert found[-1].effect is Effect.CHANGES_RESULT
        assert why in str(found[-1].caveat)


MAKER = """\
from torch.utils.data import DataLoader, TensorDataset
import torch

def make_loaders(data, size):
    train = DataLoader(data, size, True, None, None, 4)
    return train, DataLoader(data, size)

data = TensorDataset(torch.arange(32.))
train_loader, test_loader = make_loaders(data, 8)
"""
PHASES = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
sets = {phase: TensorDataset(torch.arange(32.)) for phase in ('train', 'val')}
train_loader = {phase: DataLoader(sets[phase], batch_size=8, num_workers=4, timeout=60) for phase in ('train', 'val')}
"""
TAKES = "seen = [x for (x,) in train_loader]\n"


def test_loaders_made_in_functions_and_dictionaries() -> None:
    change = made(2, MAKER, TAKES)
    assert isinstance(change, Patch)
    assert "train = DataLoader(data, size, True, None, None, 2)\n" in change.edits[0].after
    assert "def make_loaders" in change.edits[0].replay
    assert loading.retried(change, MAKER, TAKES) == loading.delivered(MAKER, TAKES)

    takes = "seen = [x for (x,) in train_loader['val']]\n"
    found = loading.evidence(loading.start(PHASES), PHASES, takes)
    names = "train_loader['train'], train_loader['val']"
    phases = patch(loading.cells(PHASES, takes), found, Dose.of(num_workers=0, loaders=names))
    assert isinstance(phases, Patch)
    assert "DataLoader(sets[phase], batch_size=8, num_workers=0) for" in phases.edits[0].after
    fresh, again = loading.replayed(phases, PHASES, takes)
    assert fresh == again
    assert loading.retried(phases, PHASES, takes) == loading.delivered(PHASES, takes)
    assert loading.delivered(*loading.patched(phases, PHASES, takes)) == loading.delivered(PHASES, takes)


LISTS = """\
import torch
from torch.utils.data import DataLoader
rows = [[float(i), str(i), [i]] for i in range(60_000)]
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, index):
        return sum(len(row) + row[0] for row in rows)
train_loader = DataLoader(Rows(), batch_size=4, num_workers=4)
"""


def measured(space: dict[str, Any]) -> tuple[int, Any]:
    """What the workers take when they have done their first batches, and the iterator that they are of."""
    iterator = iter(space["train_loader"])
    next(iterator)
    return loading.settled(lambda: sum(loading.uss(iterator)) // MIB), iterator


def test_workers_take_less_by_what_was_foretold() -> None:
    space = loading.start(LISTS)
    before, running = measured(space)
    found = loading.evidence(space, LISTS, "pass")
    found = replace(found, host=host.read())
    proposed = propose(loading.KILLED, found)
    assert not isinstance(proposed, Refused), proposed
    halved = proposed[0]
    assert halved.dose.number("num_workers") == 2
    del running
    space["train_loader"].num_workers = 2
    after, running = measured(space)
    assert len(running._workers) == 2
    assert before - after == pytest.approx(halved.saves / MIB, rel=0.35)
    assert before - after > 8


def test_refusals() -> None:
    space = loading.start(LOADERS)
    good = loading.evidence(space, LOADERS, LOOP)

    def why(found: Any, incident: Any = HOST) -> str:
        refused = propose(incident, found)
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(good, live.INCIDENT)
    unread = tuple(loading.worker(0, Unavailable("it was not read")) for _ in range(2))
    assert "could not be measured" in why(loading.evidence(space, LOADERS, LOOP, children=unread))
    assert "could not be measured" in why(loading.evidence(space, LOADERS, LOOP, children=()))
    space["train_loader"].num_workers = 0
    assert "has worker processes" in why(loading.evidence(space, LOADERS, LOOP))
    streams = LOADERS + "class S(torch.utils.data.IterableDataset):\n    __iter__ = None\n"
    streams += "train_loader = DataLoader(S(), num_workers=2)\n"
    assert "depends on how many there are" in why(loading.evidence(loading.start(streams), streams, LOOP))
    two = LOADERS + "b = DataLoader(data, num_workers=2)\n"
    assert "which of the loaders" in why(loading.evidence(loading.start(two), two, "pass", children=()))


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (("from helpers import train_loader", LOOP), "no call of DataLoader was found"),
        ((LOADERS.replace("prefetch_factor=4", "**{'drop_last': True}"), LOOP), "unpacks the settings"),
        (("class DataLoader:\n    pass\n" + LOADERS, LOOP), "a class of the cells' own"),
        (
            ("def make(n):\n    return DataLoader(data, num_workers=n)\ntrain_loader, b = make(4), make(4)", LOOP),
            "same",
        ),
        (("class A:\n    def f(self):\n        self.x = DataLoader(d)\ntrain_loader = A().x", LOOP), "no call"),
    ],
)
def test_patch_refuses(sources: tuple[str, ...], why: str) -> None:
    space = loading.start(LOADERS)
    space["b"] = space["train_loader"]
    found = loading.evidence(space, *sources)
    refused = patch(loading.cells(*sources), found, Dose.of(num_workers=1, loaders="train_loader"))
    assert isinstance(refused, Refused), refused.diff()
    assert why in refused.reason


def test_no_worker_is_left_behind() -> None:
    assert FIX.effect is Effect.EXACT
    assert loading.alive() == 0
    assert psutil.Process().is_running()
