"""What a cell reserves depends on where the memory lies that is there when it begins: forecast and real runs agree."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from covering import each_value
from forecast_lab import TRAIN, cnn, mlp, namespace, nothing, transformer
from plan_lab import ROOMY_BYTES, device_of, execute, in_a_copy
from torch.utils.data import DataLoader, Dataset

from oomdoctor.allocator import virtual
from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.forecast import price
from oomdoctor.forecast.live_storages import Layout, Ledger
from oomdoctor.forecast.loaders import Fetching
from oomdoctor.forecast.tracker import Tracker
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.sizes import KIB, MIB

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from allocator_traces import TRACES, read, settings_of


@pytest.fixture(autouse=True)
def _collected():
    gc.collect()  # a forecast counts what other tests have left, and a real run may free it meanwhile


def holes(count=40, largest=5 * MIB):
    """Return every second of some tensors whose sizes differ; the others are gone."""
    draws = random.Random(0)
    sizes = [draws.choice((draws.randrange(1, 800 * KIB), draws.randrange(MIB, largest))) for _ in range(count)]
    return [torch.empty(size, dtype=torch.uint8) for size in sizes][::2]


class Program:
    """A program on a virtual accelerator, whose retries begin with ``restore``."""

    def __init__(self, device, names, source):
        self.device, self.names, self.source = device, names, source

    def restore(self):
        self.names.pop("failed", None)

    def forecast(self, *, is_retry, budget=None):
        found = self.priced(is_retry=is_retry, budget=budget)
        return [found.peak, found.reserved]

    def priced(self, *, is_retry, budget=None):
        cells = Cells(history=(Cell(number=1, source=self.source),))
        session = Session(namespace=self.names, cells=cells, accelerator=self.device)
        prepare = self.restore if is_retry else nothing
        with virtual.uncounted():
            (found,) = price(session, [Attempt(source=self.source)], budget=budget, prepare=prepare, timeout_s=60.0)
        assert found.refused is None, found.refused
        return found

    def really(self, *, is_retry, budget=None):
        def run():
            if is_retry:
                self.restore()
                gc.collect()
                self.device.empty_cache()
            if budget is not None:
                self.device.allocator.capacity_bytes = budget
            self.device.reset_peak()
            execute(self.source, "<real run>", self.names)
            memory = self.device.read()
            return [memory.peak_allocated, memory.peak_reserved]

        return in_a_copy(run)


def program_of(device, make, source=TRAIN):
    kept = holes()
    names = namespace(make, "adamw")
    names |= {"kept": kept, "more": holes(20), "failed": [torch.empty(300 * KIB), *holes(10)]}
    gc.collect()
    return Program(device, names, source)


@pytest.mark.parametrize(("make", "is_retry"), each_value([mlp, cnn, transformer], [False, True]))
def test_what_is_reserved_is_what_the_cell_then_reserves_among_holes(make, is_retry):
    with device_of(ROOMY_BYTES) as device:
        program = program_of(device, make)
        real = program.really(is_retry=is_retry)
        assert device.read().inactive_split > 8 * MIB
        assert program.forecast(is_retry=is_retry) == real


def test_where_an_expandable_segment_begins_is_not_known(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with device_of(ROOMY_BYTES) as device:
        found = program_of(device, mlp).priced(is_retry=False)
    assert found.error_ratio == pytest.approx(60 * MIB / found.reserved, abs=1e-3)


def test_what_the_start_does_not_hold_any_more_is_freed_where_it_lay():
    with device_of(ROOMY_BYTES) as device:
        names = {"torch": torch, "before": torch.empty(4 * MIB), "failed": torch.empty(3 * MIB), "kept": holes()}
        program = Program(device, names, "x = torch.empty(3 * 1024 * 1024)")
        before, after = program.forecast(is_retry=False), program.forecast(is_retry=True)
        assert before[0] - after[0] == 12 * MIB
        assert [before, after] == [program.really(is_retry=False), program.really(is_retry=True)]


def test_where_there_is_no_room_for_the_cache_it_is_given_back():
    with device_of(ROOMY_BYTES) as device:
        names = {"torch": torch, "freed": [torch.empty(30 * MIB, dtype=torch.uint8) for _ in range(2)], "kept": holes()}
        names["freed"].pop()
        source = "x = torch.empty(12 * 1024 * 1024)"
        program = Program(device, names, source)
        roomy = program.forecast(is_retry=False)
        assert roomy == program.really(is_retry=False)
        less = roomy[1] - 20 * MIB
        squeezed = program.forecast(is_retry=False, budget=less)
        assert squeezed == program.really(is_retry=False, budget=less)
        assert squeezed[1] <= less


class Discs(Dataset):
    """Samples that are made when they are asked for."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        grid = torch.stack(torch.meshgrid(torch.arange(48), torch.arange(48), indexing="ij"))
        return (grid - 9).pow(2).sum(0).float() + torch.randn(3, 48, 48, generator=draws), index % 10


def discs(workers=0):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 48 * 48, 32), torch.nn.Linear(32, 10))
    return model, DataLoader(Discs(), batch_size=32, shuffle=True, num_workers=workers)


def test_the_samples_of_a_batch_are_alive_while_it_is_put_together():
    with device_of(ROOMY_BYTES) as device:
        looks = "for x, y in loader:\n    pass"
        for source in (looks, TRAIN):
            program = Program(device, namespace(discs), source)
            (peak, reserved), real = program.forecast(is_retry=True), program.really(is_retry=True)
            assert peak == pytest.approx(real[0], rel=0.01), source
            assert abs(reserved - real[1]) <= 2 * MIB, source
        batch = 32 * 3 * 48 * 48 * 4
        # Beside the batch there are the samples that it is made of; workers have those in memory of their own.
        looked = Program(device, namespace(discs), looks).forecast(is_retry=True)
        assert looked[0] > 2 * batch
        apart = Program(device, namespace(lambda: discs(2)), looks).forecast(is_retry=True)
        assert apart[0] < looked[0] - batch // 2


def test_what_a_data_set_keeps_is_counted_and_what_is_made_on_the_way_is_alive_beside_the_batch():
    tracker = Tracker(Ledger())
    fetching = Fetching(tracker, is_here=True)
    with fetching:
        first = torch.zeros(2000)
        kept = torch.zeros(30)
        batch = first + 1
        del first
    fetched = fetching.fetched([batch])
    assert tracker.ledger.live == kept.nbytes
    fetched.happens(tracker)
    assert (tracker.ledger.live, tracker.ledger.peak) == (8120, 16120)


def test_a_replay_begins_at_a_recorded_state():
    if not TRACES.is_dir():
        pytest.skip(f"the recorded traces are not at {TRACES}")
    trace = read(TRACES / "a1.json.gz")
    ledger = Ledger()
    layout = Layout(ledger, trace["begin"], is_emptied=False)
    allocator = CachingAllocator(settings=settings_of(trace))
    assert layout.seed(allocator) == {}
    assert allocator.reserved == sum(part["total_size"] for part in trace["begin"])
    told = [(one["address"], [block["size"] for block in one["blocks"]]) for one in allocator.memory_snapshot()]
    assert told == [(one["address"], [block["size"] for block in one["blocks"]]) for one in trace["begin"]]


IN_USE = """
import sys
sys.path.insert(0, {here!r})
import numpy as np, torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from forecast_lab import forecast
from oomdoctor.forecast import device_in_use, dry_runs

from oomdoctor.sandbox.card import Card, fork_flag

_setup_privateuseone_for_python_backend(rename="other")
flag = fork_flag()
MIB = 1 << 20
arena = np.zeros(40 * MIB, dtype=np.uint8)  # in place of segments of a GPU: tensors lie at known addresses of it
base = -(-arena.ctypes.data // 512) * 512 - arena.ctypes.data

def at(begin, size):
    return torch.from_numpy(arena[base + begin : base + begin + size])

def segment(begin, *blocks):
    address = arena.ctypes.data + base + begin
    told = {{"address": address, "total_size": sum(size for size, _ in blocks), "stream": 0, "segment_type": "large",
            "is_expandable": False, "segment_pool_id": (0, 0), "blocks": []}}
    for size, state in blocks:
        told["blocks"].append({{"address": address, "size": size, "requested_size": size, "state": state}})
        address += size
    return told

used, free = "active_allocated", "inactive"
first, second = at(0, 4 * MIB), at(10 * MIB, 6 * MIB)
segments = (
    segment(0, (4 * MIB, used), (6 * MIB, free), (6 * MIB, used), (2 * MIB, used), (2 * MIB, free)),
    segment(20 * MIB, (20 * MIB, free)),
)
marked = {{first.untyped_storage()._cdata, second.untyped_storage()._cdata}}
device_in_use.lies_there = lambda found, card: (
    (found.untyped_storage() if isinstance(found, torch.Tensor) else found)._cdata in marked
)
card = Card(held=12 * MIB, flag=flag, segments=segments)  # 2 MiB outside tensors shows
dry_runs.in_use = lambda: card
ns = {{"torch": torch, "first": first, "second": second}}
del first, second

def take(nbytes):
    return f"torch.empty({{nbytes}}, dtype=torch.uint8, device='cuda')"

class Retry:
    def restore(self):
        pass

def figures(source, **kwargs):
    found = forecast(ns, source, **kwargs)
    assert found.refused is None, found.refused
    return found.peak // MIB, found.reserved // MIB

{body}
"""


def in_use(body):
    code = IN_USE.format(here=str(Path(__file__).parent), body=body)
    made = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert made.returncode == 0, made.stderr[-2000:]


def test_the_segments_of_a_device_in_use_are_taken_over():
    in_use("""
assert figures("pass") == (12, 40)
# The hole of 6 MiB, then the cached segment, serve; only then another is asked for.
assert figures(f"a = {take(6 * MIB)}") == (18, 40)
assert figures(f"a = {take(20 * MIB)}") == (32, 40)
assert figures(f"a = {take(20 * MIB)}\\nb = {take(7 * MIB)}") == (39, 60)
# What is deleted leaves its block, which joins the hole beside it: 4 + 6 MiB, but not the last 2.
assert figures(f"a = {take(20 * MIB)}\\ndel first\\nb = {take(10 * MIB)}") == (38, 40)
# A retry gives the cached segment back first.
assert figures("pass", prepare=Retry().restore) == (12, 20)
assert figures(f"a = {take(6 * MIB)}", prepare=Retry().restore) == (18, 20)
""")
