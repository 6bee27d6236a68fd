"""Devices: a recorded CUDA played in place of torch's, the real one where there is one, and everything absent."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.evidence import _torch_devices, devices
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.testing import FakeGpu, FakeProcess, fake_nvml

RECORDED = json.loads((Path(__file__).parent / "recorded" / "cuda_two_devices.json").read_text())
TRACES = Path(__file__).parents[3] / "shared" / "corpus" / "cuda_traces"
UUID = RECORDED["properties"]["uuid"]
GPU = FakeGpu(uuid=f"GPU-{UUID}", total=42298834944)
CUDA_BUILD = torch.backends.cuda.is_built()


def play(monkeypatch, **changes):
    """Let torch answer as in the recording: two devices, of which this process has used the first."""
    properties = SimpleNamespace(major=8, minor=0, **RECORDED["properties"])
    answers = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_stats": lambda index: RECORDED["stats"][index],
        "memory_reserved": lambda index: 0,
        "memory_snapshot": lambda include_traces=True: RECORDED["segments"],
        "mem_get_info": lambda index: tuple(RECORDED["mem_get_info"]),
        "get_allocator_backend": lambda: "native",
        "get_device_properties": lambda index: properties,
        "get_per_process_memory_fraction": lambda index: RECORDED["fraction"],
        **changes,
    }
    for name, answer in answers.items():
        if answer is None:
            monkeypatch.delattr(torch.cuda, name, raising=False)
        else:
            monkeypatch.setattr(torch.cuda, name, answer, raising=False)  # older ones lack some
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False)


@pytest.fixture
def recorded(monkeypatch):
    play(monkeypatch)


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.gpu)])
def cuda(request, monkeypatch):
    """The first CUDA device, in use, capped at one half, with a private pool: recorded, or this machine's."""
    if request.param == "recorded":
        play(monkeypatch)
        held = RECORDED["stats"][0]["reserved_bytes.all.current"]
        with fake_nvml(FakeGpu(uuid=f"GPU-{UUID}", processes=(FakeProcess(pid=os.getpid(), bytes=held + 430 * MIB),))):
            yield devices.of_name("cuda:0")
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    kept = [torch.ones(3 << 20, device="cuda:0") for _ in range(4)]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(torch.ones(8 << 20, device="cuda:0"))
    del kept[0]
    before = torch.cuda.get_per_process_memory_fraction(0)
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    yield devices.of_name("cuda:0")
    torch.cuda.set_per_process_memory_fraction(before, 0)


def test_the_counters_are_torchs_own(cuda):
    reading, stats = cuda.read(), torch.cuda.memory_stats(0)
    assert reading.allocated == stats["allocated_bytes.all.current"]
    assert reading.reserved == stats["reserved_bytes.all.current"]
    assert reading.inactive_split == stats["inactive_split_bytes.all.current"]
    assert reading.peak_allocated == stats["allocated_bytes.all.peak"]
    assert reading.peak_reserved == stats["reserved_bytes.all.peak"]
    assert reading.retries == stats["num_alloc_retries"]
    assert reading.ooms == stats["num_ooms"]
    assert 0 < reading.allocated < reading.reserved < reading.total


def test_the_totals_and_the_cap_are_the_devices(cuda):
    reading = cuda.read()
    assert reading.total == torch.cuda.mem_get_info(0)[1]
    assert reading.cap == reading.total // 2
    assert reading.basis == "cudaMemGetInfo"
    assert torch.cuda.get_device_properties(0).name in reading.card
    assert ", driver " in reading.card


def test_the_largest_free_block_and_the_pools_are_those_of_the_snapshot(cuda):
    reading, segments = cuda.read(), torch.cuda.memory_snapshot()
    free = [
        block["size"]
        for segment in segments
        if segment["device"] == 0 and tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    assert reading.largest_free_block == max(free)
    private = [part for part in segments if tuple(part["segment_pool_id"]) != (0, 0) and part["device"] == 0]
    assert private
    assert sum(pool.reserved for pool in reading.private_pools) == sum(part["total_size"] for part in private)
    assert sum(pool.allocated for pool in reading.private_pools) == sum(part["allocated_size"] for part in private)


def test_what_the_process_uses_beside_its_segments_is_told(cuda):
    reading = cuda.read()
    own = [process for process in reading.processes if process.is_own]
    if not own:  # a container whose driver tells no process: nothing is made up
        assert isinstance(reading.context, Unavailable)
        assert isinstance(reading.elsewhere, Unavailable)
        return
    assert reading.context == own[0].bytes - reading.reserved
    assert 50 * MIB < reading.context < 2 * GIB
    assert reading.elsewhere >= 0


def test_a_device_in_use_is_found_by_its_name_and_kind(cuda):
    assert cuda.name == "cuda:0"
    assert devices.of_name("cuda").name == "cuda:0"
    assert isinstance(devices.in_use()[-1], HostAccelerator)


def test_a_reading_allocates_nothing(cuda):
    cuda.read()
    before = torch.cuda.memory_stats(0)["allocated_bytes.all.allocated"]
    cuda.read()
    assert torch.cuda.memory_stats(0)["allocated_bytes.all.allocated"] == before


def test_the_recording_agrees_with_itself():
    for index, stats in enumerate(RECORDED["stats"]):
        segments = [part for part in RECORDED["segments"] if part["device"] == index]
        assert stats["reserved_bytes.all.current"] == sum(part["total_size"] for part in segments)
        assert stats["allocated_bytes.all.current"] == sum(part["allocated_size"] for part in segments)
        for part in segments:
            assert part["total_size"] == sum(block["size"] for block in part["blocks"])


@pytest.mark.usefixtures("recorded")
def test_the_recorded_device_in_figures():
    reading = devices.of_name("cuda:0").read()
    assert reading.largest_free_block == 148 * MIB, "a private pool's 200 MiB serve no other request"
    pools = [(pool.name, pool.reserved, pool.allocated) for pool in reading.private_pools]
    assert pools == [
        ("pool 1 of a captured graph", 224 * MIB, 24 * MIB),
        ("pool 3 of a MemPool or a graph_pool_handle", 40 * MIB, 20 * MIB),
    ]
    assert (reading.retries, reading.ooms) == (2, 1)
    assert reading.cap == 42298834944 // 2


@pytest.mark.usefixtures("recorded")
def test_a_device_without_a_context_is_not_in_use():
    assert [device.name for device in devices.in_use()] == ["cuda:0", "cpu"]
    assert devices.of_name("cuda:1").name == "cpu"


def test_one_that_holds_segments_is_in_use_whatever_the_driver_says(monkeypatch):
    play(monkeypatch, memory_reserved=lambda index: GIB if index == 1 else 0)
    assert [device.name for device in devices.in_use()] == ["cuda:0", "cuda:1", "cpu"]


@pytest.mark.parametrize("name", [None, "", "cpu", "cud", "tpu", "cuda:10", "xpu:0"])
def test_where_nothing_matches_it_is_the_host(monkeypatch, name):
    play(monkeypatch)
    assert isinstance(devices.of_name(name), HostAccelerator)


def test_an_index_is_not_the_beginning_of_another(monkeypatch):
    play(monkeypatch, device_count=lambda: 12, memory_reserved=lambda index: index >= 10)
    assert [device.name for device in devices.in_use()][:3] == ["cuda:0", "cuda:10", "cuda:11"]
    assert devices.of_name("cuda:1").name == "cpu"
    assert devices.of_name("cuda:11").name == "cuda:11"


def test_the_drivers_own_allocator_counts_less(monkeypatch):
    def refuse(**options):
        raise AssertionError("it has no snapshot and is not asked for one")

    zeros = dict.fromkeys(RECORDED["stats"][0], 0)
    zeros.update({"allocated_bytes.all.current": GIB, "reserved_bytes.all.current": 2 * GIB})
    play(
        monkeypatch,
        get_allocator_backend=lambda: "cudaMallocAsync",
        memory_stats=lambda index: zeros,
        memory_snapshot=refuse,
    )
    reading = devices.of_name("cuda").read()
    assert (reading.allocated, reading.reserved) == (GIB, 2 * GIB)
    for zero in (reading.retries, reading.ooms, reading.inactive_split):
        assert zero == Unavailable("the cudaMallocAsync allocator keeps no such count")
    assert reading.largest_free_block == Unavailable("the cudaMallocAsync allocator keeps no list of blocks")
    assert reading.private_pools == ()


def test_an_allocator_of_the_users_own_keeps_no_counts(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats. \nIf you need it, …")

    play(monkeypatch, memory_stats=refuse, memory_snapshot=refuse, memory_reserved=refuse)
    reading = devices.of_name("cuda").read()
    why = Unavailable("torch cannot tell it: CUDAPluggableAllocator does not yet support getDeviceStats. ")
    assert reading.allocated == reading.retries == reading.largest_free_block == why
    assert reading.total == 42298834944


def test_a_counter_that_this_torch_lacks_is_named(monkeypatch):
    play(monkeypatch, memory_stats=lambda index: {"allocated_bytes.all.current": 5})
    reading = devices.of_name("cuda").read()
    assert reading.allocated == 5
    assert reading.ooms == Unavailable("this allocator's memory_stats has no num_ooms")


def test_a_device_in_an_error_state_still_gives_its_counts(monkeypatch):
    def refuse(index):
        raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered")

    play(monkeypatch, mem_get_info=refuse)
    reading = devices.of_name("cuda").read()
    assert "illegal memory access" in reading.free.reason
    assert reading.total == 42298834944
    assert isinstance(reading.allocated, int)


def test_an_older_torch_tells_less(monkeypatch):
    play(
        monkeypatch,
        get_per_process_memory_fraction=None,
        memory_snapshot=lambda: RECORDED["segments"],
        get_device_properties=lambda index: SimpleNamespace(major=8, minor=0, name="Tesla T4", total_memory=GIB),
    )
    reading = devices.of_name("cuda").read()
    assert "has no torch.cuda.get_per_process_memory_fraction" in reading.cap.reason
    assert reading.largest_free_block == 148 * MIB
    assert reading.card == "Tesla T4"
    assert reading.processes == Unavailable("this version of torch does not tell the card's UUID")


def test_no_cap_is_no_figure(monkeypatch):
    play(monkeypatch, get_per_process_memory_fraction=lambda index: 1.0)
    assert devices.of_name("cuda").read().cap == Unavailable("no cap is set for this process")


def test_rocm_is_called_so(monkeypatch):
    play(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with fake_nvml(errors={"nvmlInit": "NVML_ERROR_UNKNOWN"}):
        reading = devices.of_name("cuda:0").read()
    assert reading.basis == "hipMemGetInfo"
    assert reading.card == "NVIDIA A100-SXM4-40GB, ROCm 6.4.43482"
    assert reading.elsewhere == Unavailable("other use of AMD cards is not read")
    assert devices.not_in_use() == ()
    assert "NVML" not in dict(devices.absent())


def test_xpu_is_read_in_its_own_words(monkeypatch):
    properties = SimpleNamespace(name="Intel(R) Arc(TM) A770", driver_version="1.6.33578", total_memory=16 * GIB)
    stats = {key: value for key, value in RECORDED["stats"][0].items() if "bytes.all" in key and "split" not in key}
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "memory_stats", lambda index: stats, raising=False)
    monkeypatch.setattr(torch.xpu, "memory_snapshot", lambda mempool_id=None: RECORDED["segments"][:2], raising=False)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda index: (4 * GIB, 16 * GIB), raising=False)
    monkeypatch.setattr(torch.xpu, "get_per_process_memory_fraction", lambda index: 0.25, raising=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    reading = devices.of_name("xpu").read()
    assert (reading.name, reading.total, reading.free, reading.cap) == ("xpu:0", 16 * GIB, 4 * GIB, 4 * GIB)
    assert reading.allocated == stats["allocated_bytes.all.current"]
    assert reading.largest_free_block == 8 * MIB
    assert reading.ooms == Unavailable("this allocator's memory_stats has no num_ooms")
    assert reading.card == "Intel(R) Arc(TM) A770, driver 1.6.33578"
    assert isinstance(reading.processes, Unavailable)


@pytest.fixture
def metal(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True, raising=False)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 * GIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB, raising=False)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2", raising=False)


@pytest.mark.usefixtures("metal")
def test_apples_gpu_tells_its_sums():
    reading = devices.of_name("mps").read()
    assert (reading.allocated, reading.reserved) == (3 * GIB, 4 * GIB)
    assert (reading.total, reading.free) == (12 * GIB, 8 * GIB)
    assert reading.card.startswith("Apple M2, macOS")
    absent = [reading.peak_allocated, reading.cap, reading.context, reading.elsewhere, reading.processes, reading.ooms]
    assert all(isinstance(value, Unavailable) for value in absent)


@pytest.mark.usefixtures("metal")
def test_an_older_torch_recommends_nothing(monkeypatch):
    monkeypatch.delattr(torch.mps, "recommended_max_memory")
    reading = devices.of_name("mps").read()
    assert reading.total == reading.free
    assert "does not tell how much memory Metal recommends" in reading.total.reason


@pytest.mark.usefixtures("metal")
def test_apples_gpu_is_not_asked_before_it_has_begun(monkeypatch):
    def asked():
        raise AssertionError("this would make a handle of the device")

    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: False, raising=False)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", asked)
    assert [device.name for device in devices.in_use()] == ["cpu"]


EXTENSION = """
import sys, types, torch
from oomdoctor.evidence import devices
from oomdoctor.model.unavailable import Unavailable
begun = []
module = types.ModuleType("torch.npu")
module.is_initialized = lambda: bool(begun)
module.device_count = lambda: 1
module.memory_stats = lambda index: {"allocated_bytes.all.current": 7}
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", module)
assert [device.name for device in devices.in_use()] == ["cpu"]
begun.append(True)
reading = devices.of_name("npu").read()
print(reading.allocated, isinstance(reading.ooms, Unavailable), reading.largest_free_block)
print(reading.total)
"""


def test_an_extension_of_torch_is_read_through_what_it_offers():
    out = subprocess.run([sys.executable, "-c", EXTENSION], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    read, total = out.stdout.splitlines()
    missing = f"Unavailable(reason='torch {torch.__version__} has no torch.npu"
    assert read == f"7 True {missing}.memory_snapshot')"
    assert total == f"{missing}.mem_get_info')"


def test_peaks_and_caches_are_handed_to_the_backend(monkeypatch):
    called = []
    play(
        monkeypatch,
        reset_peak_memory_stats=lambda index: called.append(("peak", index)),
        empty_cache=lambda: called.append(("cache", None)),
    )
    device = devices.of_name("cuda")
    device.reset_peak()
    device.empty_cache()
    assert called == [("peak", 0), ("cache", None)]
    assert device.holds(SimpleNamespace(device=torch.device("cuda", 0)))
    assert not device.holds(SimpleNamespace(device=torch.device("cuda", 1)))


def test_a_card_that_is_not_in_use_is_told_by_the_driver_alone():
    with fake_nvml(GPU, FakeGpu(uuid="GPU-b", processes=(FakeProcess(pid=2**22 + 1, bytes=7 * GIB),))):
        first, second = devices.not_in_use()
        absent = dict(devices.absent())
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert (first.elsewhere, second.elsewhere) == (0, 7 * GIB)
    assert (second.allocated, second.reserved) == (0, 0)
    assert second.peak_allocated == second.context == Unavailable("this process has not used it")
    assert second.free == second.total - 7 * GIB - 512 * MIB
    assert second.card == "NVIDIA A100-SXM4-40GB, driver 570.86.15"
    assert "NVML" not in absent
    assert not torch.cuda.is_initialized()


def test_a_card_whose_index_is_not_certain_goes_by_its_uuid():
    with fake_nvml(FakeGpu(uuid="GPU-a", name="slow"), FakeGpu(uuid="GPU-b", name="fast")):
        assert [card.name for card in devices.not_in_use()] == ["GPU-a", "GPU-b"]


@pytest.mark.usefixtures("recorded")
def test_a_card_in_use_is_not_told_twice():
    with fake_nvml(GPU, FakeGpu(uuid="GPU-b")):
        assert [card.name for card in devices.not_in_use()] == ["cuda:1"]
        assert "CUDA" not in dict(devices.absent())


@pytest.mark.skipif(CUDA_BUILD, reason="this torch is built with CUDA")
def test_a_machine_without_anything_names_each_thing_once():
    with fake_nvml(errors={"nvmlInit": "NVML_ERROR_LIBRARY_NOT_FOUND"}):
        absent = dict(devices.absent())
        assert devices.not_in_use() == ()
    assert absent == {
        "CUDA": Unavailable(f"torch {torch.__version__} is built without CUDA and ROCm"),
        "XPU": Unavailable(f"torch {torch.__version__} is built without XPU (Intel)"),
        "MPS": Unavailable(f"torch {torch.__version__} is built without MPS (Apple)"),
        "NVML": Unavailable("this machine has no NVIDIA driver"),
    }


@pytest.mark.parametrize(
    ("choice", "gpus", "errors", "reason"),
    [
        (None, (GPU,), {}, "this process has not used CUDA yet"),
        (None, (), {}, "the NVIDIA driver finds no card"),
        ("-1", (GPU,), {}, "CUDA_VISIBLE_DEVICES='-1' leaves this process no card"),
        (None, (GPU,), {"nvmlInit": "NVML_ERROR_LIBRARY_NOT_FOUND"}, "this machine has no NVIDIA driver"),
    ],
)
def test_why_there_is_no_cuda(monkeypatch, choice, gpus, errors, reason):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if choice is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    with fake_nvml(*gpus, errors=errors):
        absent = devices.absent()
    assert dict(absent)["CUDA"] == Unavailable(reason)
    assert len({missing for _, missing in absent}) == len(absent), "each reason is told once"


UNTOUCHED = """
import time, torch
from oomdoctor.evidence import devices
devices.in_use()
times = []
for _ in range(20):
    begun = time.perf_counter()
    devices.in_use()
    times.append(time.perf_counter() - begun)
devices.not_in_use()
devices.absent()
print(sorted(times)[10], torch.cuda.is_initialized(), torch.xpu.is_initialized())
"""


def test_looking_initialises_nothing_and_is_quick():
    out = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=True, timeout=120)
    median_s, *begun = out.stdout.split()
    assert float(median_s) < 0.001
    assert begun == ["False", "False"]


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the recorded traces are not at {TRACES}")
@pytest.mark.parametrize("name", ["a1", "a3", "b1", "c3", "d2"])
def test_real_segments_hold_what_the_allocator_model_finds(name):
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    segments = [
        {**part, "total_size": part["size"], "segment_type": part["type"], "segment_pool_id": (0, 0)}
        for part in trace["segments_at_end"]
    ]
    model = CachingAllocator()
    model.seed(segments)
    assert _torch_devices.largest_free_block(segments, 0) == model.largest_free_block > 0
    assert _torch_devices.private_pools(segments, 0) == ()
    begun = time.process_time()
    _torch_devices.largest_free_block(segments, 0)
    assert time.process_time() - begun < 5.0


@pytest.mark.gpu
def test_the_blocks_of_cublas_are_those_that_it_frees():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    weight = torch.ones(256, 256, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    device = devices.of_name("cuda:0")
    before = device.read()
    torch._C._cuda_clearCublasWorkspaces()
    after = device.read()
    assert before.workspaces
    assert sum(before.workspaces) == before.allocated - after.allocated
    assert after.workspaces == ()


@pytest.mark.parametrize("tells", [True, False])
def test_blocks_as_large_as_a_workspace_are_told(tells, monkeypatch):
    size = 32 << 20
    sizes = (size, size - 512, 4096)
    blocks = [{"size": one, "requested_size": one, "state": "active_allocated"} for one in sizes]
    segment = {"device": 0, "total_size": sum(sizes), "allocated_size": sum(sizes), "blocks": blocks}
    play(monkeypatch, memory_snapshot=lambda **_: [segment], get_device_capability=lambda _index: (9, 0))
    if tells:
        monkeypatch.setattr(torch._C, "_cuda_getCublasWorkspaceSize", lambda: size, raising=False)
    else:  # as before torch 2.13
        monkeypatch.delattr(torch._C, "_cuda_getCublasWorkspaceSize", raising=False)
    assert devices.of_name("cuda:0").read().workspaces == (size,)
