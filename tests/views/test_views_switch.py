"""The simulated device switched on, off or resized between two reports: said, and not taken for growth."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.growth import Mark, Switch, compare
from oomdoctor.model.memory import Census, DeviceMemory, Holding, Role
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.views.displayed import Report
from oomdoctor.views.survey import growth_rows, since_cell

UNCOMPARED = "its tensors and those of the host are not compared"


def _evidence(capacity: int | None, held: int = 100 * MIB, rss: int = GIB, number: int = 1) -> Evidence:
    """What is collected with a simulated device of that capacity, or without one: the tensors are the host's then."""
    host: DeviceMemory = cases.device(name="cpu", tensor_device="cpu", allocated=0 if capacity else held)
    simulated = cases.device(simulated=True, tensor_device="cpu", total=capacity, allocated=held, switched_on=number)
    where = "cuda:0" if capacity else "cpu"
    holding = Holding(bytes=held, device=where, role=Role.USER_TENSOR, path="kept")
    full = Census(device=where, found=held, allocated=held, roles=((Role.USER_TENSOR, held),), holdings=(holding,))
    empty = Census(device="cpu", found=0, allocated=0)
    return cases.evidence(
        devices=(simulated, host) if capacity else (host,),
        censuses=(full, empty) if capacity else (full,),
        host=cases.host(rss=rss),
    )


SWITCHES = {
    "on": (None, GIB, "cuda:0 (simulated) was switched on"),
    "off": (GIB, None, "cuda:0 (simulated) was switched off"),
    "anew": (GIB, GIB, "cuda:0 (simulated) was switched off and on again"),
    "larger": (512 * MIB, GIB, "cuda:0 (simulated) went from 512 MiB to 1.00 GiB"),
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_a_switch_is_told_in_the_place_of_growth(kind: str) -> None:
    was, now, told = SWITCHES[kind]
    before, after = _evidence(was), _evidence(now, held=130 * MIB, rss=GIB + 30 * MIB, number=2)
    assert compare(before, after).switch == Switch(device="cuda:0", before=was, after=now)
    rows = growth_rows(before, after, "the report of In[2]")
    assert rows.sentence == (
        f"Since the report of In[2]: the device changed, as {told}: {UNCOMPARED}; "
        "this process +30.0 MiB resident in host memory."
    )
    assert (rows.rows, rows.more) == ((), None)
    earlier, later = Report(before), Report(after)
    shape = later.diff(earlier).to_dict()
    assert shape["devices"] == []
    assert shape["switch"] == {"device": "cuda:0", "before": was, "after": now}


@pytest.mark.parametrize("capacity", [None, GIB])
def test_without_a_switch_growth_is_told(capacity: int | None) -> None:
    grown = compare(_evidence(capacity), _evidence(capacity, held=130 * MIB))
    assert grown.switch is None
    assert grown.devices[0].allocated == 30 * MIB
    assert "the device changed" not in growth_rows(_evidence(capacity), _evidence(capacity), "before").sentence


def test_another_real_device_is_compared_all_the_same() -> None:
    def beside(found: Evidence, allocated: int) -> Evidence:
        return replace(found, devices=(*found.devices, cases.device(name="cuda:1", allocated=allocated)))

    grown = compare(beside(_evidence(None), GIB), beside(_evidence(GIB), GIB + MIB))
    assert [(one.device, one.allocated) for one in grown.devices] == [("cuda:1", MIB)]
    rows = growth_rows(beside(_evidence(None), GIB), beside(_evidence(GIB), GIB + MIB), "before")
    assert f"was switched on: {UNCOMPARED}; cuda:1 +1.00 MiB allocated" in rows.sentence


def test_a_real_device_of_the_same_name_is_not_compared_with_the_simulated_one() -> None:
    empty = Census(device="cuda:0", found=0, allocated=0)
    real = cases.evidence(devices=(cases.device(allocated=4 * GIB),), censuses=(empty,))
    assert compare(real, _evidence(GIB)).devices == ()
    assert compare(_evidence(GIB), real).devices == ()


def test_one_device_alone_is_told_of_where_that_was_asked_for() -> None:
    before, after = _evidence(GIB), _evidence(GIB, held=130 * MIB)
    assert "cuda:0 (simulated) +30.0 MiB" in growth_rows(before, after, "before", only="cuda:0").sentence
    host = growth_rows(before, after, "before", only="cpu")
    assert "cuda:0" not in host.sentence
    assert host.rows == ()


@pytest.mark.parametrize("kind", SWITCHES)
def test_a_switch_since_the_last_cell_is_no_growth(kind: str) -> None:
    was, now, told = SWITCHES[kind]

    def mark(cell: int, capacity: int | None, held: int) -> Mark:
        simulated = None if capacity is None else ("cuda:0", capacity, cell)
        return Mark(cell=cell, rss=GIB, allocated=(("cuda:0", held),) if capacity else (), simulated=simulated)

    devices = _evidence(now).devices
    assert since_cell(mark(4, was, 100), mark(5, now, 200), devices) == (
        f"Since In[4] began: {told}, so its tensors cannot be compared; this process +0 B resident in host memory."
    )


def test_a_resident_set_that_is_not_known_is_left_out() -> None:
    unknown = Mark(cell=4, rss=Unavailable("there is no /proc"))
    assert since_cell(unknown, replace(unknown, cell=5), ()) == "Since In[4] began: nothing that can be compared."
