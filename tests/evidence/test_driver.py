"""NVIDIA cards by their driver: recordings played by the fake NVML, and this machine's own driver or the lack of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from oomdoctor.evidence import driver
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.testing import FakeGpu, FakeProcess, fake_nvml, recorded_nvml
from oomdoctor.testing.nvml import _Library

RECORDED = Path(__file__).parent / "recorded"
WINDOWS = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
RTX = "20bed2f5-819b-69ad-8d42-d3e1446080c1"
WHOLE = "41255406-c9af-f94b-4ebf-9d57ad1853da"
LARGE, SMALL = "a65afc88-50b5-5ccf-b0a8-f93b3247ae9e", "90443af0-2fe6-57fb-86fe-54186d5a6581"
UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
ERRORS = [name for name in dir(pynvml) if name.startswith("NVML_ERROR_")]
ASKED = [
    "nvmlInit",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetProcessName",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetMigMode",
    "nvmlShutdown",
]


@pytest.fixture(autouse=True)
def _no_choice_of_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def reasons_of(told):
    """Return every reason in a card or in place of it."""
    values = [told] if isinstance(told, Unavailable) else [getattr(told, name) for name in type(told).__slots__]
    return [value.reason for value in values if isinstance(value, Unavailable)]


def test_a_card_is_told_with_all_who_use_it():
    with recorded_nvml(RECORDED / "nvml_shared_card.json"):
        card = driver.card(RTX)
    assert (card.uuid, card.label) == (f"GPU-{RTX}", "NVIDIA GeForce RTX 3090, driver 570.86.15")
    assert card.total == 25769803776
    used = 190840832 + 98566144 + 8589934592 + 12582912 + 1073741824
    assert card.used == used, "the driver's own share is not a process's"
    assert card.free == card.total - used - 285212672
    told = [(process.pid, process.name, process.bytes) for process in card.processes]
    assert told == [
        (4711, "python3.11", 8589934592),  # it computes and draws: told once
        (4802, "inference", 1073741824),
        (2101, "Xorg", 190840832),
        (2377, "gnome-shell", 98566144),
    ]
    assert not any(process.is_own for process in card.processes)


def test_windows_tells_processes_and_no_sizes():
    with recorded_nvml(RECORDED / "nvml_windows.json"):
        card = driver.card(WINDOWS)
    assert [process.name for process in card.processes] == ["python.exe", "dwm.exe"]
    assert all("Windows" in process.bytes.reason for process in card.processes)
    assert card.used == 3 * GIB


def test_a_size_of_zero_is_no_size():
    with fake_nvml(FakeGpu(processes=(FakeProcess(pid=324, bytes=0),))):
        (process,) = driver.card(UUID).processes
    assert "cannot be" in process.bytes.reason


def test_a_driver_that_lacks_the_newer_question_is_asked_the_older(monkeypatch):
    monkeypatch.delattr(_Library, "nvmlDeviceGetMemoryInfo_v2")
    with fake_nvml(FakeGpu(processes=(FakeProcess(pid=7, bytes=GIB),), kept_by_driver=512 * MIB)):
        card = driver.card(UUID)
    assert card.used == GIB + 512 * MIB


def test_a_name_that_is_no_text_leaves_the_rest():
    with fake_nvml(FakeGpu(processes=(FakeProcess(pid=2**22 + 1, bytes=GIB, name="caf\udce9"),))):
        pynvml.nvmlLib.nvmlSystemGetProcessName = lambda pid, text, room: setattr(text, "value", b"caf\xe9") or 0
        (process,) = driver.card(UUID).processes
    assert (process.name, process.bytes) == (None, GIB)


@pytest.mark.parametrize("error", ERRORS)
def test_every_refusal_at_the_start_is_put_in_plain_words(error):
    with fake_nvml(FakeGpu(), errors={"nvmlInit": error}):
        told = driver.card(UUID)
        assert driver.visible_cards() == told
    assert isinstance(told, Unavailable)
    assert not re.search(r"NVML_|NVMLError|\d|_|\.$", told.reason), told.reason


@pytest.mark.parametrize("function", ASKED)
@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_GPU_IS_LOST"])
def test_one_refusal_costs_only_what_it_was_asked_for(function, error):
    gpu = FakeGpu(processes=(FakeProcess(pid=os.getpid(), bytes=GIB),))
    with fake_nvml(gpu, errors={function: error}):
        card = driver.card(UUID)
    if function in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        assert isinstance(card, Unavailable)
        return
    missing = {
        "nvmlSystemGetDriverVersion": [],  # the card's name alone
        "nvmlDeviceGetName": ["label"],
        "nvmlDeviceGetUUID": ["uuid"],
        "nvmlDeviceGetMemoryInfo": ["total", "free", "used"],
        "nvmlDeviceGetComputeRunningProcesses": ["processes"],
    }.get(function, [])
    assert [name for name in type(card).__slots__ if isinstance(getattr(card, name), Unavailable)] == missing
    assert card.processes if "processes" not in missing else True
    if function == "nvmlSystemGetDriverVersion":
        assert card.label == "NVIDIA A100-SXM4-40GB"


def test_a_lost_card_says_so_everywhere():
    lost = dict.fromkeys([name for name in ASKED if name.startswith("nvmlDevice")], "NVML_ERROR_GPU_IS_LOST")
    with fake_nvml(FakeGpu(errors=lost)):
        reasons = reasons_of(driver.card(UUID))
    assert len(reasons) == 6
    assert set(reasons) == {"the card was lost: the driver cannot reach it until the machine restarts"}


def test_one_card_of_several_is_asked_by_its_uuid():
    with fake_nvml(FakeGpu(uuid="GPU-a", name="first"), FakeGpu(uuid="GPU-b", name="second")):
        assert driver.card("b").label == "second, driver 570.86.15"
        assert isinstance(driver.card("c"), Unavailable)


@pytest.mark.parametrize(
    ("choice", "uuid", "found"),
    [
        (None, LARGE, LARGE),  # a CUDA that gives the part's own UUID
        (f"MIG-{SMALL}", WHOLE, SMALL),  # a CUDA that gives the card's
        (f"MIG-{SMALL[:8]}", WHOLE, SMALL),
        (None, WHOLE, None),
        (f"MIG-{SMALL},MIG-{LARGE}", WHOLE, None),
    ],
)
def test_a_part_of_a_divided_card_is_told_as_a_card(monkeypatch, choice, uuid, found):
    if choice is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    with recorded_nvml(RECORDED / "nvml_divided_card.json"):
        card = driver.card(uuid)
    if found is None:
        assert card == Unavailable("the card is divided (MIG), and which part this process uses cannot be told")
        return
    assert card.uuid == f"MIG-{found}"
    assert [process.pid for process in card.processes] == [77 if found == LARGE else 88]
    assert card.total == (20937965568 if found == LARGE else 5100273664)


@pytest.mark.parametrize(
    ("choice", "order", "alike", "found"),
    [
        (None, None, True, [(0, "a"), (1, "b"), (2, "c")]),
        (None, None, False, [(None, "a"), (None, "b"), (None, "c")]),
        (None, "PCI_BUS_ID", False, [(0, "a"), (1, "b"), (2, "c")]),
        ("2,0", None, True, [(0, "c"), (1, "a")]),
        ("2,0", None, False, [(None, "c"), (None, "a")]),
        ("GPU-c, GPU-b", None, False, [(0, "c"), (1, "b")]),
        ("1,9,0", None, True, [(0, "b")]),
        ("-1", None, True, []),
        ("", None, True, []),
    ],
)
def test_the_cards_are_those_that_cuda_would_show(monkeypatch, choice, order, alike, found):
    if choice is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    cards = [FakeGpu(uuid=f"GPU-{letter}", name="alike" if alike else f"card {letter}") for letter in "abc"]
    with fake_nvml(*cards):
        seen = driver.visible_cards()
    assert [(index, card.uuid.removeprefix("GPU-")) for index, card in seen] == found


def test_the_parts_of_a_divided_card_are_shown_without_an_index():
    with recorded_nvml(RECORDED / "nvml_divided_card.json"):
        seen = driver.visible_cards()
    assert [(index, card.uuid) for index, card in seen] == [(None, f"MIG-{LARGE}"), (None, f"MIG-{SMALL}")]


def test_without_the_package_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver.card(UUID) == Unavailable("the Python package nvidia-ml-py is not installed")


def test_another_pynvml_that_lacks_a_function_is_told(monkeypatch):
    with fake_nvml(FakeGpu()):
        monkeypatch.delattr(pynvml, "nvmlDeviceGetHandleByUUID")
        assert "do not fit together" in driver.card(UUID).reason


def test_a_driver_older_than_the_package_costs_the_processes(monkeypatch):
    monkeypatch.delattr(_Library, "nvmlDeviceGetComputeRunningProcesses_v3")
    with fake_nvml(FakeGpu()):
        card = driver.card(UUID)
    assert re.search("do not fit together|too old", card.processes.reason)
    assert isinstance(card.used, int)


def test_nvml_is_given_back_after_each_question():
    with fake_nvml(FakeGpu()):
        driver.card(UUID)
        driver.visible_cards()
        assert pynvml._nvmlLib_refcount == 0
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()


def test_devices_in_use_are_told_without_the_package():
    code = (
        "import sys; sys.modules['pynvml'] = None; from oomdoctor.evidence import devices; print(len(devices.in_use()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def has_driver():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return False
    pynvml.nvmlShutdown()
    return True


def test_this_machine_without_a_driver_says_so():
    if has_driver():
        pytest.skip("there is an NVIDIA driver")
    assert driver.card(UUID) == Unavailable("this machine has no NVIDIA driver")
    assert driver.visible_cards() == Unavailable("this machine has no NVIDIA driver")


@pytest.mark.gpu
def test_the_real_driver_tells_of_each_card():
    if not has_driver():
        pytest.skip("there is no NVIDIA driver")
    cards = driver.visible_cards()
    assert cards
    for _, card in cards:
        assert not reasons_of(card)
        assert card.used + card.free <= card.total
        assert re.fullmatch(r".+, driver [\d.]+", card.label)
        assert driver.card(card.uuid[4:]).label == card.label


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
def test_a_pid_namespace_is_noticed():
    code = "from oomdoctor.evidence.driver import pids_agree; print(pids_agree())"
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    try:
        told = subprocess.run(inside, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if told.returncode:
        pytest.skip(f"no namespace can be made here: {told.stderr.strip()}")
    assert told.stdout == "False\n"
    outside = int(re.findall(r"\d+", str(Path("/proc/self/ns/pid").readlink()))[0])
    assert driver.pids_agree() == (outside == 4026531836)
