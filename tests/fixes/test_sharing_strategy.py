from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import live
import loading
import pytest
import torch
from loading import LOADERS, LOOP

from oomdoctor import fixes
from oomdoctor.evidence import host
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("sharing_strategy")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have the one strategy"),
]

SHM = Incident(is_oom=True, family=Family.SHM, device="cpu", message="unable to open shared memory object </torch_1>")
GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,3 +1,5 @@
+torch.multiprocessing.set_sharing_strategy("file_system")
+
 seen = []
 for epoch in range(2):
     for x, y in train_loader:
"""


@pytest.fixture(autouse=True)
def strategy() -> Any:
    """Put back what a patched cell sets for good."""
    multiprocessing: Any = torch.multiprocessing
    before = multiprocessing.get_sharing_strategy()
    yield multiprocessing.get_sharing_strategy
    multiprocessing.set_sharing_strategy(before)


def evidence(*sources: str, opened: int = 1000, limit: int = 1024, **facts: Any) -> Evidence:
    found = loading.evidence(loading.start(*sources[:-1]), *sources)
    read = replace(found.host, files_open=opened, files_limit=limit)
    return replace(found, host=read, code=replace(found.code, **facts))


def made(*sources: str) -> Patch | Refused:
    return patch(loading.cells(*sources), evidence(*sources), Dose())


def test_it_is_proposed_where_descriptors_ran_out() -> None:
    found = propose(SHM, evidence(LOADERS, LOOP))
    assert not isinstance(found, Refused)
    assert (found[0].effect, found[0].saves) == (Effect.EXACT, 0)
    assert found[0].basis == "1000 of 1024 file descriptors are open in this process"
    told = replace(SHM, message="RuntimeError: received 0 items of ancdata")
    by_message = propose(told, evidence(LOADERS, LOOP, opened=20))
    assert not isinstance(by_message, Refused)
    assert by_message[0].basis == "the message says `received 0 items of ancdata`"


def test_golden_diff_and_second_time() -> None:
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert change.diff() == GOLDEN
    again = made(*loading.patched(change, LOADERS, LOOP))
    assert again == Refused("cell 2 sets the sharing strategy itself")


def test_torch_is_imported_where_no_cell_does() -> None:
    change = made("from torch import multiprocessing as torch_mp\n", "for x in []:\n    pass\n")
    assert isinstance(change, Patch)
    assert change.edits[0].after.startswith("import torch\ntorch.multiprocessing.set_sharing_strategy(")


def test_the_same_batches_bit_for_bit(strategy: Any) -> None:
    plain = loading.delivered(LOADERS, LOOP)
    assert strategy() == "file_descriptor"
    change = made(LOADERS, LOOP)
    assert isinstance(change, Patch)
    assert loading.delivered(*loading.patched(change, LOADERS, LOOP)) == plain
    assert strategy() == "file_system"


def test_kept_batches_keep_no_descriptors() -> None:
    def opened() -> int:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.append(str(entry.readlink()))
        return sum("/torch_" in link for link in links)

    space = loading.start(LOADERS.replace("batch_size=8", "batch_size=1"))
    taken = []
    for name in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(name)
        kept = [x for x, _ in space["train_loader"]]
        taken.append(opened())
        del kept
    assert taken[0] >= 48
    assert taken[1] == 0


def test_either_strategy_takes_as_much_of_shared_memory() -> None:
    """So it is no help where /dev/shm is too small."""
    source = """
import torch
from torch.utils.data import DataLoader, TensorDataset
train_loader = DataLoader(TensorDataset(torch.zeros(16, 65536)), batch_size=4, num_workers=1)
"""
    space = loading.start(source)
    mapped = []
    for name in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(name)
        kept = [x for (x,) in space["train_loader"]]
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").split("\n")
        sizes = [int(lines[at + 1].split()[1]) for at, line in enumerate(lines) if "/torch_" in line]
        mapped.append(sum(sizes) >> 10)
        del kept
    assert mapped == [4, 4]


def test_refusals() -> None:
    def why(found: Evidence, incident: Incident = SHM) -> str:
        refused = propose(incident, found)
        assert isinstance(refused, Refused)
        return refused.reason

    assert "a device ran out" in why(evidence(LOADERS, LOOP), live.INCIDENT)
    assert "either sharing strategy" in why(evidence(LOADERS, LOOP, opened=20))
    assert "by file name already" in why(evidence(LOADERS, LOOP, sharing_strategy="file_system"))
    assert "no tensors are handed" in why(evidence(LOADERS, LOOP, sharing_strategy=None))
    spawned = LOADERS.replace("prefetch_factor=4", "multiprocessing_context='spawn'")
    assert "are spawned" in why(evidence(spawned, LOOP))
    sets = 'torch.multiprocessing.set_sharing_strategy("file_descriptor")\n'
    assert made(LOADERS, sets, LOOP) == Refused("cell 2 sets the sharing strategy itself")
    assert FIX.effect is Effect.EXACT


def test_descriptors_are_read_on_this_machine() -> None:
    read = host.read(in_full=False)
    assert isinstance(read.files_open, int)
    assert isinstance(read.files_limit, int)
