from __future__ import annotations

from typing import Any

import live
import loading
import pytest
import torch
from capabilities import has_accelerator
from loading import HOST, LOOP, MIB

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("pin_memory_off")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

PINNED = Incident(is_oom=True, family=Family.PINNED, device="cpu", requested=8 * MIB)
DOSE = Dose.of(loaders="train_loader")
HELD = ((Role.PINNED_HOST, 64 * MIB),)

LOADERS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 8), torch.arange(32))
train_loader = DataLoader(data, 8, True, pin_memory=True, num_workers=0)  # for the GPU
test_loader = DataLoader(data, 8)
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -3,5 +3,5 @@
\x20
 torch.manual_seed(0)
 data = TensorDataset(torch.randn(32, 8), torch.arange(32))
-train_loader = DataLoader(data, 8, True, pin_memory=True, num_workers=0)  # for the GPU
+train_loader = DataLoader(data, 8, True, pin_memory=False, num_workers=0)  # for the GPU
 test_loader = DataLoader(data, 8)
"""


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch take this machine for one with an accelerator, and count what it pins, in bytes."""
    pinned: list[int] = []

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned.append(self.nbytes)
        return self.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return pinned


def made(*sources: str) -> Patch | Refused:
    return patch(loading.cells(*sources), loading.evidence(loading.start(*sources[:-1]), *sources), DOSE)


def test_it_is_proposed_by_what_was_found_pinned_or_was_to_be() -> None:
    space = loading.start(LOADERS)
    found = propose(HOST, loading.evidence(space, LOADERS, LOOP, roles=HELD))
    assert not isinstance(found, Refused)
    assert (found[0].dose, found[0].effect, found[0].saves) == (DOSE, Effect.EXACT, 64 * MIB)
    assert found[0].basis == "estimate: 64.0 MiB of pinned memory were found"
    asked = propose(PINNED, loading.evidence(space, LOADERS, LOOP, roles=HELD))
    assert not isinstance(asked, Refused)
    assert asked[0].saves == 72 * MIB


def test_golden_diff_and_second_time() -> None:
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert change.diff() == GOLDEN
    assert made(*loading.patched(change, LOADERS, LOOP)) == Refused("no loader pins its batches")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pin_memory=True", "pin_memory=torch.device('cpu').type != 'cuda'"),
        ("8, True, pin_memory=True, num_workers=0", "8, True, None, None, 0, None, True"),
    ],
)
def test_other_ways_to_say_it(old: str, new: str) -> None:
    change = made(LOADERS.replace(old, new), LOOP)
    assert isinstance(change, Patch)
    after = change.edits[0].after
    assert "pin_memory=False" in after or "None, None, 0, None, False)" in after


@has_accelerator
def test_the_same_batches_and_nothing_is_pinned(pins: list[int]) -> None:
    plain = loading.delivered(LOADERS, LOOP)
    assert sum(pins) == 2 * 32 * (8 * 4 + 8)
    pins.clear()
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert loading.delivered(*loading.patched(change, LOADERS, LOOP)) == plain
    assert loading.retried(change, LOADERS, LOOP) == plain
    fresh, again = loading.replayed(change, LOADERS, LOOP)
    assert fresh == again
    assert pins == []


def test_workers_that_stay_are_said() -> None:
    kept = LOADERS.replace("num_workers=0", "num_workers=2, persistent_workers=True")
    found = propose(HOST, loading.evidence(loading.start(kept), kept, LOOP, roles=HELD))
    assert not isinstance(found, Refused)
    assert found[0].effect is Effect.CHANGES_RESULT
    assert "are kept between epochs" in str(found[0].caveat)


def test_refusals() -> None:
    def why(source: str, incident: Incident = HOST, **more: Any) -> str:
        refused = propose(incident, loading.evidence(loading.start(source), source, LOOP, **more))
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(LOADERS, live.INCIDENT, roles=HELD)
    assert "no loader that the notebook has a name for pins" in why(LOADERS.replace("=True", "=False"), roles=HELD)
    assert "found no pinned memory" in why(LOADERS, roles=())
    assert FIX.effect is Effect.EXACT


@pytest.mark.gpu
def test_on_a_gpu_no_host_memory_is_pinned_and_the_batches_are_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    source = LOADERS.replace("num_workers=0", "num_workers=2")
    torch.cuda.init()  # there are no statistics before
    start = torch.cuda.host_memory_stats()["num_host_alloc"]
    change = made(source, LOOP)
    assert isinstance(change, Patch)
    fixed = loading.delivered(*loading.patched(change, source, LOOP))
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == start
    assert loading.delivered(source, LOOP) == fixed
    assert torch.cuda.host_memory_stats()["num_host_alloc"] > start
