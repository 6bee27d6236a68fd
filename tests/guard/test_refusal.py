"""The limit that is kept while a cell runs: real mappings under a real RLIMIT_DATA."""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oomdoctor.evidence import host
from oomdoctor.guard import exemptions
from oomdoctor.guard.gauge import Gauge
from oomdoctor.guard.refusal import Refusal
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.sandbox import data_limit, reserve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this limit")
MIB = 1 << 20


@pytest.fixture
def gauge() -> Iterator[Gauge]:
    before, found = resource.getrlimit(resource.RLIMIT_DATA), Gauge()
    yield found
    data_limit.lift()
    data_limit.forget()
    exemptions.remove()
    found.close()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before, "the user's own is put back"


def mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_what_would_not_fit_is_refused_and_what_fits_is_not(gauge: Gauge) -> None:
    Refusal(gauge, None).begin(256 * MIB, 64 * MIB)
    with pytest.raises(MemoryError):
        np.ones(400 << 17)
    with pytest.raises(OSError, match="Cannot allocate"):
        mapped(200 * MIB)
    mapped(128 * MIB).close()
    data_limit.lift()
    mapped(400 * MIB).close()


def test_what_was_mapped_and_not_touched_is_spent(gauge: Gauge) -> None:
    refusal = Refusal(gauge, None)
    refusal.begin(256 * MIB, 64 * MIB)
    held = mapped(128 * MIB)
    refusal.keep(256 * MIB, 64 * MIB)  # nothing was touched: as much is free as before
    with pytest.raises(OSError, match="Cannot allocate"):
        mapped(128 * MIB)
    mapped(32 * MIB).close()
    refusal.note()
    assert host.read(in_full=False).unfilled == pytest.approx(128 * MIB, abs=8 * MIB)
    for at in range(0, len(held), mmap.PAGESIZE):
        held[at] = 1
    refusal.keep(256 * MIB, 64 * MIB)  # it is touched, and yet as much is free: others have freed it
    mapped(160 * MIB).close()
    held.close()


def test_memory_that_was_kept_back_and_is_let_go_is_none_that_the_cell_has_mapped(gauge: Gauge) -> None:
    assert reserve.take(1024 * MIB, 1024 * MIB, populated=True) == 96 * MIB
    try:
        refusal = Refusal(gauge, None)
        refusal.begin(128 * MIB, 16 * MIB)
        reserve.let_go(keep=reserve.FOR_MESSAGES)
        refusal.keep(128 * MIB, 16 * MIB)
        assert refusal.untouched < 8 * MIB
        mapped(96 * MIB).close()
    finally:
        reserve.give_up()


def test_a_cell_has_some_room_however_full_the_memory(gauge: Gauge) -> None:
    Refusal(gauge, None).begin(40 * MIB, 64 * MIB)
    mapped(6 * MIB).close()
    with pytest.raises(OSError, match="Cannot allocate"):
        mapped(32 * MIB)


def test_the_users_own_lower_limit_stands(gauge: Gauge) -> None:
    process, (soft, hard) = gauge.process(), resource.getrlimit(resource.RLIMIT_DATA)
    assert process is not None
    own = process[0] + 512 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (own, hard))
    try:
        Refusal(gauge, None).begin(4096 * MIB, 64 * MIB)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == own
        Refusal(gauge, None).begin(256 * MIB, 64 * MIB)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] < own
        assert (data_limit.soft(), host.read(in_full=False).process_limit) == (own, own), "ours is not told as theirs"
        data_limit.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == own
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_limit_that_the_cell_sets_is_the_users_from_then_on(gauge: Gauge) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    refusal = Refusal(gauge, None)
    refusal.begin(256 * MIB, 64 * MIB)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, before[1]))
    data_limit.lift()
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 1 << 40
    resource.setrlimit(resource.RLIMIT_DATA, before)


def test_no_limit_of_ours_is_told(gauge: Gauge) -> None:
    Refusal(gauge, None).begin(256 * MIB, 64 * MIB)
    assert isinstance(host.read(in_full=False).process_limit, Unavailable)
    assert reserve.of_process() is None


def test_the_limit_above_a_cell_is_told_as_the_users(gauge: Gauge) -> None:
    Refusal(gauge, 64 * MIB).begin(None, 0)
    with pytest.raises(MemoryError):
        np.ones(128 << 17)
    data_limit.lift()
    found = host.read(in_full=False)
    assert found.process_limit_name == host.binding_limit(found)[2] == "%%memlimit 64.0 MiB"
    free, begun = host.binding_limit(found)[1], data_limit.ceiling
    assert free <= 65 * MIB, "what malloc held free before the cell is no part of what it may take"
    assert begun is not None
    assert found.malloc_free == max(host.malloc_free() - begun.malloc_free, 0)  # type: ignore[operator]
    np.ones(128 << 17)
    data_limit.forget()
    assert isinstance(host.read(in_full=False).process_limit, Unavailable)


def test_a_file_that_is_mapped_is_not_refused(gauge: Gauge, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(512 * MIB)
    refusal = Refusal(gauge, None)
    exemptions.install(refusal.apart)
    refusal.begin(256 * MIB, 64 * MIB)
    array = np.memmap(path, dtype=np.uint8, mode="c")
    refusal.keep(256 * MIB, 64 * MIB)
    mapped(128 * MIB).close()  # the file is no memory of the cell's
    with pytest.raises(MemoryError):
        np.ones(400 << 17)
    assert (type(array), array[7]) == (np.memmap, 0)


def test_torch_maps_a_checkpoint(gauge: Gauge, tmp_path: Path) -> None:
    import torch

    torch.save(torch.zeros(80 << 18), tmp_path / "large.pt")
    refusal = Refusal(gauge, None)
    exemptions.install(refusal.apart)
    refusal.begin(96 * MIB, 64 * MIB)
    assert torch.load(tmp_path / "large.pt", mmap=True)[5] == 0
    refusal.keep(96 * MIB, 64 * MIB)
    with pytest.raises(RuntimeError, match="allocate memory"):
        torch.zeros(80 << 18)
    data_limit.lift()
    exemptions.remove()
    assert "from_file" not in vars(torch.UntypedStorage)


def test_the_functions_are_put_back() -> None:
    before = np.memmap.__dict__["__new__"], os.system, os.posix_spawn, vars(subprocess)["_fork_exec"]
    exemptions.install(Refusal(Gauge(), None).apart)
    now = np.memmap.__dict__["__new__"], os.system, os.posix_spawn, vars(subprocess)["_fork_exec"]
    assert not set(map(id, now)) & set(map(id, before))
    assert pickle.loads(pickle.dumps(os.system)) is os.system
    exemptions.remove()
    assert (np.memmap.__dict__["__new__"], os.system, os.posix_spawn, vars(subprocess)["_fork_exec"]) == before
