"""The fake NVML: what pynvml makes of it, beside what it makes of a real driver where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest

import oomdoctor
import oomdoctor.testing
from oomdoctor.testing import FakeGpu, FakeProcess, fake_nvml, recorded_nvml

GIB = 1 << 30
RECORDED = Path(__file__).parents[1] / "evidence" / "recorded"
GPU = FakeGpu(processes=(FakeProcess(pid=1, bytes=2 * GIB, name="/usr/bin/python3"), FakeProcess(pid=2, bytes=None)))
PART = FakeGpu(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid="MIG-1", total=5 * GIB, processes=GPU.processes[:1])


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def handle(request):
    """The first card by its handle: of the fake, or of this machine's driver."""
    if request.param == "fake":
        with fake_nvml(GPU):
            pynvml.nvmlInit()
            yield pynvml.nvmlDeviceGetHandleByIndex(0)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"there is no NVIDIA driver: {error}")
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@pytest.fixture
def first():
    with fake_nvml(GPU):
        pynvml.nvmlInit()
        yield pynvml.nvmlDeviceGetHandleByIndex(0)


def test_the_answers_are_of_pynvmls_own_kinds(handle):
    assert type(handle) is pynvml.c_nvmlDevice_t
    assert type(pynvml.nvmlDeviceGetMemoryInfo(handle)) is pynvml.c_nvmlMemory_t
    newer = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert type(newer) is pynvml.c_nvmlMemory_v2_t
    for text in (pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()):
        assert type(text) is str
        assert text
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        assert type(process) is pynvml.nvmlFriendlyObject
        assert {"pid", "usedGpuMemory"} <= vars(process).keys()


def test_the_totals_fit_together(handle):
    older = pynvml.nvmlDeviceGetMemoryInfo(handle)
    newer = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert older.total == newer.total == newer.free + newer.used + newer.reserved
    assert older.used == newer.used + newer.reserved


def test_a_card_is_found_again_by_its_uuid(handle):
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    assert uuid.startswith("GPU-")
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")


def test_a_card_beyond_the_last_is_an_invalid_argument(handle):
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount())


def test_the_figures_are_those_that_were_given(first):
    assert pynvml.nvmlDeviceGetName(first) == GPU.name
    assert pynvml.nvmlDeviceGetMemoryInfo(first).used == 2 * GIB + GPU.kept_by_driver
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(first)
    assert [(process.pid, process.usedGpuMemory) for process in processes] == [(1, 2 * GIB), (2, None)]
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(first) == []
    assert pynvml.nvmlSystemGetProcessName(1) == "/usr/bin/python3"
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlSystemGetProcessName(3)


def test_many_processes_come_whole():
    many = tuple(FakeProcess(pid=pid, bytes=pid) for pid in range(1, 40))
    with fake_nvml(FakeGpu(processes=many)):
        pynvml.nvmlInit()
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert [process.pid for process in found] == list(range(1, 40))


@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_UNKNOWN"])
def test_a_refusal_is_pynvmls_own_exception(error):
    kind = pynvml.nvmlExceptionClass(getattr(pynvml, error))
    with fake_nvml(FakeGpu(), FakeGpu(uuid="GPU-b", errors={"nvmlDeviceGetName": error})):
        pynvml.nvmlInit()
        sound, broken = map(pynvml.nvmlDeviceGetHandleByIndex, range(2))
        with pytest.raises(kind):
            pynvml.nvmlDeviceGetName(broken)
        assert pynvml.nvmlDeviceGetName(sound)


def test_one_refusal_may_be_every_cards():
    with (
        fake_nvml(errors={"nvmlInit": "NVML_ERROR_LIBRARY_NOT_FOUND"}),
        pytest.raises(pynvml.NVMLError_LibraryNotFound),
    ):
        pynvml.nvmlInit()


def test_an_error_that_nvml_does_not_have_is_a_mistake_in_the_test():
    with fake_nvml(errors={"nvmlInit": "NVML_ERROR_TYPO"}), pytest.raises(AttributeError, match="NVML_ERROR_TYPO"):
        pynvml.nvmlInit()


def test_what_is_not_played_is_refused_as_by_an_old_driver(first):
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetTemperature(first, pynvml.NVML_TEMPERATURE_GPU)


def test_it_wants_to_be_initialised():
    with fake_nvml(GPU):
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()


def test_a_divided_card_has_parts():
    with fake_nvml(FakeGpu(mig=(PART,)), FakeGpu(uuid="GPU-b", mig=()), FakeGpu(uuid="GPU-c")):
        pynvml.nvmlInit()
        divided, whole, other = map(pynvml.nvmlDeviceGetHandleByIndex, range(3))
        assert pynvml.nvmlDeviceGetMigMode(divided) == [1, 1]
        assert pynvml.nvmlDeviceGetMigMode(whole) == [0, 0]
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetMigMode(other)
        part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(divided, 0)
        assert pynvml.nvmlDeviceGetUUID(part) == "MIG-1"
        assert [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(part)] == [1]
        assert [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(divided)] == [1]
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetMigDeviceHandleByIndex(divided, 1)


def test_afterwards_all_is_as_it_was():
    before = pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache), pynvml._nvmlLib_refcount
    with fake_nvml(GPU):
        pynvml.nvmlInit()
        with pytest.raises(pynvml.NVMLError_Uninitialized), fake_nvml():
            pynvml.nvmlDeviceGetCount()
        assert pynvml.nvmlDeviceGetCount() == 1
    assert (pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache), pynvml._nvmlLib_refcount) == before


@pytest.mark.parametrize("path", sorted(RECORDED.glob("nvml_*.json")), ids=lambda path: path.stem)
def test_a_recording_plays_and_says_where_it_comes_from(path):
    assert json.loads(path.read_text())["source"]
    with recorded_nvml(path):
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1


def test_it_is_offered_to_the_users_own_tests():
    assert {"FakeGpu", "FakeProcess", "fake_nvml", "recorded_nvml"} <= set(oomdoctor.testing.__all__)


def test_a_card_that_this_process_has_not_used_is_in_the_report() -> None:
    others = FakeProcess(pid=4242, bytes=30 << 30, name="a-notebook")
    with fake_nvml(FakeGpu(name="NVIDIA A100", total=40 << 30, processes=(others,))):
        told = str(oomdoctor.report({}))
    assert "cuda:0: 30.5 GiB of 40.0 GiB in use" in told
    assert "a-notebook" in told
