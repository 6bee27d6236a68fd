"""The virtual accelerator under the allocator's settings, read from the environment as CUDA reads them."""

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from oomdoctor.allocator.settings import VARIABLES
from oomdoctor.allocator.virtual import active, simulate, switch_off, switch_on
from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import MIB
from oomdoctor.model.unavailable import Unavailable

sys.path.append(str(Path(__file__).parents[1] / "forecast"))

from forecast_lab import forecast


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    gc.collect()
    yield
    switch_off()


@pytest.fixture
def conf(monkeypatch):
    return lambda text, name="PYTORCH_CUDA_ALLOC_CONF": monkeypatch.setenv(name, text)


def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def growing():
    """Make a tensor that outgrows the holes between others, as sequences that grow do."""
    kept = []
    for mib in (30, 36, 42, 48, 54):
        room = tensor(mib)
        del room
        kept.append(tensor(mib // 2 + 1))  # no earlier hole is large enough, and the new segment cannot be given back
    return kept, tensor(60)


def reserved_after(work):
    with simulate("4GiB") as device:
        before = device.read().reserved
        kept = work()
        reserved = device.read().reserved - before
        del kept
    return reserved


@pytest.mark.parametrize("name", VARIABLES)
def test_expandable_segments_can_be_tried_out(conf, name):
    fixed = reserved_after(growing)
    conf("expandable_segments:True", name)
    assert reserved_after(growing) < 0.7 * fixed


def test_what_fails_in_fixed_segments_fits_where_they_grow(conf):
    with simulate("512MiB") as device:
        size = device.read().reserved + 200 * MIB
    with pytest.raises(torch.OutOfMemoryError), simulate(size):
        growing()
    conf("expandable_segments:True")
    with simulate(size):
        growing()


def test_settings_hold_for_the_accelerator_that_is_switched_on_next(conf):
    first = switch_on("512MiB")
    conf("max_split_size_mb:64")
    assert first.allocator.settings.max_split_size is None
    assert switch_on("512MiB").allocator.settings.max_split_size == 64 * MIB


def test_a_bad_text_changes_nothing(conf):
    before = switch_on("512MiB")
    conf("expandable_segments:yes")
    with pytest.raises(UsageError, match=r"expandable_segments:yes cannot be used: it takes True or False"):
        switch_on("256MiB")
    assert active() is before
    switch_off()
    with pytest.raises(UsageError, match="it takes True or False"), simulate("256MiB"):
        pass
    assert active() is None


def test_a_fraction_caps_what_may_be_reserved_and_the_message_says_so(conf):
    conf("per_process_memory_fraction:0.5")
    with simulate("1GiB") as device:
        assert device.read().cap == 512 * MIB
        with pytest.raises(torch.OutOfMemoryError, match=re.escape("512.00 MiB allowed; Of the allocated")):
            tensor(600)
        device.set_per_process_memory_fraction(1)
        assert device.read().cap == Unavailable("no cap is set for this process")
        kept = tensor(600)
        device.set_per_process_memory_fraction(0.6)
        with pytest.raises(torch.OutOfMemoryError, match="allowed; "):
            tensor(100)
        del kept


@pytest.mark.parametrize("fraction", [-0.1, 1.1, "half", float("nan"), None])
def test_a_fraction_that_is_none(fraction):
    with simulate("512MiB") as device:
        before = device.allocator.settings
        with pytest.raises(UsageError, match="it is a number from 0 to 1"):
            device.set_per_process_memory_fraction(fraction)
        assert device.allocator.settings is before


def test_a_tensor_beyond_the_fraction_is_refused_before_it_is_computed(conf):
    conf("per_process_memory_fraction:0.25")
    with simulate("1GiB"), pytest.raises(torch.OutOfMemoryError, match=r"256\.00 MiB allowed"):
        torch.zeros(1 << 44)


def test_the_snapshot_tells_the_tensors_that_are_alive():
    with simulate("512MiB") as device:
        kept = tensor(30)
        gone = tensor(40)
        block = device.block_of(kept)
        del gone
        blocks = {part["address"]: part for record in device.memory_snapshot() for part in record["blocks"]}
        assert (blocks[block.address]["state"], blocks[block.address]["requested_size"]) == (
            "active_allocated",
            30 * MIB,
        )
        assert sum(part["size"] for part in blocks.values()) == device.read().reserved
        free = [part["size"] for part in blocks.values() if part["state"] == "inactive"]
        assert max(free) == device.read().largest_free_block == 40 * MIB


CELL = """
kept = []
for mib in (30, 36, 42, 48, 54):
    room = torch.empty(mib << 20, dtype=torch.uint8)
    del room
    kept.append(torch.empty((mib // 2 + 1) << 20, dtype=torch.uint8))
last = torch.empty(60 << 20, dtype=torch.uint8)
"""


@pytest.mark.usefixtures("all_in_sight")
def test_a_forecast_knows_the_settings_of_the_accelerator(conf):
    told = []
    for text in ("", "expandable_segments:True"):
        conf(text)
        with simulate("4GiB") as device:
            found = forecast({"torch": torch}, CELL, simulated=True)
            assert found.refused is None
            device.empty_cache()
            exec(CELL, {"torch": torch})
            told.append((found.reserved, device.read().peak_reserved))
    for foreseen, measured in told:
        assert foreseen == pytest.approx(measured, rel=0.02)
    assert told[1][0] < 0.8 * told[0][0]


def test_a_forecast_is_refused_where_the_settings_cannot_be_used(conf):
    conf("expandable_segments:yes")
    found = forecast({"torch": torch}, CELL, simulated=True)
    assert found.refused.startswith("PYTORCH_CUDA_ALLOC_CONF: expandable_segments:yes cannot be used: it takes True or")
