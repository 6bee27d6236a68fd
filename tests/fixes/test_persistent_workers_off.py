from __future__ import annotations

from typing import Any

import live
import loading
from loading import HOST, MIB

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("persistent_workers_off")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

DOSE = Dose.of(loaders="train_loader, test_loader")

LOADERS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 8), torch.arange(16))
train_loader = DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=True)
test_loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)
"""
LOOP = """\
seen = []
for epoch in range(2):
    for x, y in train_loader:
        seen += [x, y]
    for x, y in test_loader:
        seen += [x, y, workers()]
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -3,5 +3,5 @@
\x20
 torch.manual_seed(0)
 data = TensorDataset(torch.randn(16, 8), torch.arange(16))
-train_loader = DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=True)
-test_loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)
+train_loader = DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=False)
+test_loader = DataLoader(data, 8, num_workers=2, persistent_workers=False)
"""
BOTH = tuple(
    loading.worker(index, size * MIB, name)
    for name, size in (("train_loader", 100), ("test_loader", 30))
    for index in range(2)
)


def made(*sources: str) -> Patch | Refused:
    return patch(loading.cells(*sources), loading.evidence(loading.start(*sources[:-1]), *sources), DOSE)


def running(sources: tuple[str, ...]) -> list[int]:
    """Run the cells; return how many workers there were at each step over the second loader."""
    space = loading.start(*sources[:-1])
    counts: list[int] = []
    space["workers"] = lambda: counts.append(loading.alive())
    loading.run(sources[-1], namespace=space)
    return counts


def test_it_is_proposed_by_what_idle_workers_take() -> None:
    found = propose(HOST, loading.evidence(loading.start(LOADERS), LOADERS, LOOP, children=BOTH))
    assert not isinstance(found, Refused)
    (one,) = found
    assert (one.dose, one.effect, one.saves) == (DOSE, Effect.CHANGES_RESULT, 60 * MIB)
    assert "260 MiB, of which one loader's remain" in one.basis
    assert "from the second epoch on" in str(one.caveat)


def test_golden_diff_and_second_time() -> None:
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert change.diff() == GOLDEN
    assert made(*loading.patched(change, LOADERS, LOOP)) == Refused("no loader keeps its workers between epochs")


def test_workers_of_one_loader_alone_are_there_at_a_time() -> None:
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert running((LOADERS, LOOP)) == [4, 4, 4, 4]
    assert max(running(loading.patched(change, LOADERS, LOOP))) == 2


def test_the_first_epoch_is_the_same_and_the_second_is_not() -> None:
    loop = LOOP.replace(", workers()", "")
    plain = loading.delivered(LOADERS, loop)
    change = made(LOADERS, loop)
    assert isinstance(change, Patch)
    fixed = loading.delivered(*loading.patched(change, LOADERS, loop))
    assert loading.retried(change, LOADERS, loop) == fixed
    fresh, again = loading.replayed(change, LOADERS, loop)
    assert fresh == again
    assert fixed[0][:8] == plain[0][:8]
    assert fixed != plain


def test_refusals() -> None:
    def why(source: str, incident: Any = HOST, **more: Any) -> str:
        refused = propose(incident, loading.evidence(loading.start(source), source, "pass", **more))
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(LOADERS, live.INCIDENT, children=BOTH)
    assert "one loader alone" in why(LOADERS, children=BOTH[:2])
    passing = LOADERS.replace(", persistent_workers=True", "")
    assert why(passing, children=BOTH) == "no loader keeps its workers between epochs"
    assert FIX.effect is Effect.CHANGES_RESULT
