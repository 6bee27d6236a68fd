from __future__ import annotations

import sys
from typing import Any

import live
import loading
import pytest
from capabilities import loads_out_of_order
from loading import HOST, LOADERS, LOOP, MIB

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("prefetch")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -8,5 +8,5 @@
     batch_size=8,
     shuffle=True,
     num_workers=4,  # one for each core
-    prefetch_factor=4,
+    prefetch_factor=2,
 )
"""
UNSAID = LOADERS.replace("    prefetch_factor=4,\n", "")
DRAWS = """\
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return index + torch.rand(2), index

torch.manual_seed(0)
train_loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2, prefetch_factor=3)
"""
STOPS = """\
seen = []
for epoch in range(2):
    for x, y in train_loader:
        seen += [x, y, torch.rand(1)]
        if len(seen) % 9 == 0:
            break
"""


def proposals(*sources: str, **more: Any) -> tuple[Proposal, ...]:
    found = propose(HOST, loading.evidence(loading.start(*sources[:-1]), *sources, **more))
    assert not isinstance(found, Refused), found
    return found


def made(ahead: int, *sources: str) -> Patch | Refused:
    found = loading.evidence(loading.start(*sources[:-1]), *sources)
    return patch(loading.cells(*sources), found, Dose.of(prefetch_factor=ahead, loaders="train_loader"))


def test_it_proposes_halves_by_the_batches_that_wait() -> None:
    found = proposals(LOADERS, LOOP)
    assert [str(one.dose) for one in found] == [f"prefetch_factor={n}, loaders=train_loader" for n in (2, 1)]
    assert [one.saves // MIB for one in found] == [4 * 2 * 2, 4 * 3 * 2]
    assert found[0].basis == "analytic estimate: 8 batches fewer wait, of 2.00 MiB each by the census"
    assert {one.effect for one in found} == {Effect.EXACT}
    assert [one.dose["prefetch_factor"] for one in proposals(UNSAID, LOOP)] == [1]


def test_golden_diff_and_second_time() -> None:
    change = made(2, LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert change.diff() == GOLDEN
    again = made(2, *loading.patched(change, LOADERS, LOOP))
    assert again == Refused("no loader fetches more than 2 batches ahead for each worker")
    unsaid = made(1, UNSAID, LOOP)
    assert isinstance(unsaid, Patch)
    assert "    num_workers=4,  # one for each core\n    prefetch_factor=1,\n)" in unsaid.edits[0].after


@pytest.mark.parametrize("first", [LOADERS, DRAWS])
@pytest.mark.parametrize("loop", [LOOP, STOPS])
def test_the_same_batches_bit_for_bit_also_where_workers_draw(first: str, loop: str) -> None:
    plain = loading.delivered(first, loop)
    assert {one.effect for one in proposals(first, loop)} == {Effect.EXACT}
    change = made(1, first, loop)
    assert isinstance(change, Patch)
    assert loading.delivered(*loading.patched(change, first, loop)) == plain
    assert loading.retried(change, first, loop) == plain
    fresh, again = loading.replayed(change, first, loop)
    assert fresh == again


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ("persistent_workers=True", "are kept between epochs"),
        pytest.param("in_order=False", "in the order in which they are ready", marks=loads_out_of_order),
        ("generator=torch.Generator()", "how far ahead batches are fetched"),
    ],
)
def test_what_is_not_certain_is_said(new: str, why: str) -> None:
    (one,) = proposals(LOADERS.replace("prefetch_factor=4", new), LOOP)
    assert one.effect is Effect.CHANGES_RESULT
    assert why in str(one.caveat)


@pytest.mark.skipif(sys.platform != "linux", reason="what workers hold is read from /proc")
def test_fewer_batches_wait_in_shared_memory() -> None:
    source = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(64, 65536))  # 256 KiB each
train_loader = DataLoader(data, batch_size=4, num_workers=2, prefetch_factor=4)
"""
    space = loading.start(source)
    held = []
    for ahead in (1, 4):
        space["train_loader"].prefetch_factor = ahead
        running = iter(space["train_loader"])
        held.append(loading.settled(lambda it=running: loading.shared(it), at_least=MIB))
        del running
    batches = ((Role.BATCH, MIB),)
    estimate = propose(HOST, loading.evidence(space, source, "pass", roles=batches))
    assert not isinstance(estimate, Refused)
    assert held == pytest.approx([2 * MIB, 8 * MIB], rel=0.01)
    assert estimate[-1].saves == pytest.approx(held[1] - held[0], rel=0.01)


def test_refusals() -> None:
    def why(*sources: str, incident: Any = HOST, **more: Any) -> str:
        refused = propose(incident, loading.evidence(loading.start(*sources[:-1]), *sources, **more))
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(LOADERS, LOOP, incident=live.INCIDENT)
    assert "no more than one batch ahead" in why(LOADERS.replace("factor=4", "factor=1"), LOOP)
    assert "found no batch" in why(LOADERS, LOOP, roles=())
    assert "has worker processes" in why(UNSAID.replace("num_workers=4", "num_workers=0"), LOOP)
    assert FIX.effect is Effect.EXACT
