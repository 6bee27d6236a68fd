"""Which of the driver's processes is this one, and what follows for the context and for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oomdoctor.evidence import driver
from oomdoctor.evidence.driver import shares
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.testing import FakeGpu, FakeProcess, fake_nvml, recorded_nvml

RECORDED = Path(__file__).parent / "recorded"
UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
ME = os.getpid()
HELD = 2 * GIB
CONTEXT = 500 * MIB
OTHER = 2**22 + 4711  # above any pid of Linux


@pytest.fixture(params=["host", "container"])
def place(request, monkeypatch):
    """The initial PID namespace, or one of a container, by what the kernel calls this process's own."""
    own = Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(driver, "_INITIAL_PID_NAMESPACE", own if request.param == "host" else own + 1)
    return request.param


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(driver, "_INITIAL_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)


@pytest.fixture
def container(monkeypatch):
    monkeypatch.setattr(driver, "_INITIAL_PID_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino + 1)


def read(*processes, reserved=HELD, in_use=True, **card):
    with fake_nvml(FakeGpu(processes=tuple(FakeProcess(pid=pid, bytes=size) for pid, size in processes), **card)):
        return shares(driver.card(UUID), reserved, in_use=in_use)


def own_of(told):
    return [(process.pid, process.basis) for process in told.processes if process.is_own]


@pytest.mark.usefixtures("place")
def test_this_process_is_known_by_its_id():
    told = read((OTHER, 7 * GIB), (ME, HELD + CONTEXT))
    assert own_of(told) == [(ME, "by its process id")]
    assert told.context == CONTEXT
    assert told.elsewhere == 7 * GIB


def test_in_a_container_it_is_known_by_its_size(container):
    told = read((OTHER, 7 * GIB), (OTHER + 1, HELD + CONTEXT))
    assert [pid for pid, _ in own_of(told)] == [OTHER + 1]
    assert "size alone" in own_of(told)[0][1]
    assert told.context == CONTEXT
    assert told.elsewhere == 7 * GIB


def test_on_the_host_nothing_is_known_by_its_size(host):
    told = read((OTHER, HELD + CONTEXT))
    assert own_of(told) == []
    assert "none can be told to be this one" in told.context.reason
    assert told.elsewhere == told.context


@pytest.mark.parametrize(
    "sizes",
    [
        [HELD + CONTEXT, HELD + CONTEXT + MIB],  # two that fit
        [HELD - MIB],  # less than this process holds
        [HELD + GIB * 3 // 2 + MIB],  # more than any context takes
    ],
)
def test_where_the_size_does_not_tell_none_is_claimed(container, sizes):
    told = read(*((OTHER + place, size) for place, size in enumerate(sizes)))
    assert own_of(told) == []
    assert isinstance(told.context, Unavailable)
    assert isinstance(told.elsewhere, Unavailable)


def test_one_that_holds_nothing_is_not_known_by_its_size(container):
    assert own_of(read((OTHER, CONTEXT), reserved=0)) == []


def test_the_same_number_in_another_container_is_no_proof(container):
    told = read((ME, HELD - MIB), (OTHER, HELD + CONTEXT))
    assert [pid for pid, _ in own_of(told)] == [OTHER]


def test_a_container_is_told_its_id_by_some_drivers_and_no_size(container):
    told = read((ME, 0))
    assert own_of(told) == [(ME, "by its process id")]
    assert "no memory for this process" in told.context.reason
    assert told.elsewhere == told.context


def test_inside_a_container_others_are_what_is_used_and_not_listed(container):
    told = read((ME, HELD + CONTEXT), used=20 * GIB)
    assert told.elsewhere == 20 * GIB - HELD - CONTEXT


def test_on_the_host_others_are_those_that_are_listed(host):
    assert read((ME, HELD + CONTEXT), used=20 * GIB).elsewhere == 0


def test_others_without_a_size_are_told_by_the_totals(host):
    told = read((ME, HELD + CONTEXT), (OTHER, None), used=20 * GIB)
    assert told.elsewhere == 20 * GIB - HELD - CONTEXT


@pytest.mark.usefixtures("place")
def test_windows_tells_neither():
    with recorded_nvml(RECORDED / "nvml_windows.json"):
        told = shares(driver.card("ffc79498-8ff3-c2dc-3b0d-fafd804516ae"), HELD)
    assert isinstance(told.context, Unavailable)
    assert isinstance(told.elsewhere, Unavailable)
    assert len(told.processes) == 2


def test_less_than_is_held_is_not_subtracted(host):
    told = read((ME, HELD - MIB))
    assert told.context == Unavailable("the driver counts less for this process than its allocator holds")


@pytest.mark.usefixtures("place")
def test_an_empty_list_is_told():
    told = read(used=20 * GIB)
    assert told.context == Unavailable("the driver lists no process on this device, not even this one")


@pytest.mark.usefixtures("place")
def test_the_reason_of_the_driver_is_handed_on():
    told = shares(Unavailable("this machine has no NVIDIA driver"), HELD)
    assert told.context == told.elsewhere == told.processes == Unavailable("this machine has no NVIDIA driver")
    refused = read((ME, GIB), errors={"nvmlDeviceGetComputeRunningProcesses": "NVML_ERROR_NO_PERMISSION"})
    assert refused.context == refused.elsewhere == refused.processes
    assert refused.processes == Unavailable("the NVIDIA driver does not tell this to this user")


def test_an_allocator_that_keeps_no_count_leaves_the_context_untold(host):
    told = read((ME, HELD), (OTHER, GIB), reserved=Unavailable("no count"))
    assert told.context == Unavailable("no count")
    assert told.elsewhere == GIB


@pytest.mark.usefixtures("place")
def test_a_card_that_is_not_in_use_is_all_others():
    told = read((OTHER, 7 * GIB), reserved=0, in_use=False)
    assert own_of(told) == []
    assert told.elsewhere == 7 * GIB


def test_a_card_that_another_library_uses_here_is_told(host):
    told = read((ME, GIB), (OTHER, 7 * GIB), reserved=0, in_use=False)
    assert (told.context, told.elsewhere) == (GIB, 7 * GIB)
