"""The simulated device switched on, off or resized between two reports: said, and not taken for growth."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest

from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Census, DeviceMemory, Holding, Role
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.views.displayed import Report
from oomdoctor.views.growth import compare
from oomdoctor.views.memory_report import growth_rows

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


CHANGED = "cuda:0 (simulated) was switched on, off or to another size"
SWITCHES = {"on": (None, GIB), "off": (GIB, None), "anew": (GIB, GIB), "larger": (512 * MIB, GIB)}


@pytest.mark.parametrize("kind", SWITCHES)
def test_a_switch_is_told_in_the_place_of_growth(kind: str) -> None:
    was, now = SWITCHES[kind]
    before, after = _evidence(was), _evidence(now, held=130 * MIB, rss=GIB + 30 * MIB, number=2)
    assert compare(before, after).switched == "cuda:0"
    rows = growth_rows(before, after, "the report of In[2]")
    assert rows.sentence == (
        f"Since the report of In[2]: {CHANGED}: {UNCOMPARED}; this process +30.0 MiB resident in host memory."
    )
    assert (rows.rows, rows.more) == ((), None)
    earlier, later = Report(before), Report(after)
    shape = later.diff(earlier).to_dict()
    assert shape["devices"] == []
    assert shape["switched"] == "cuda:0"


@pytest.mark.parametrize("capacity", [None, GIB])
def test_without_a_switch_growth_is_told(capacity: int | None) -> None:
    grown = compare(_evidence(capacity), _evidence(capacity, held=130 * MIB))
    assert grown.switched is None
    assert grown.devices[0].allocated == 30 * MIB
    assert CHANGED not in growth_rows(_evidence(capacity), _evidence(capacity), "before").sentence


def test_another_real_device_is_compared_all_the_same() -> None:
    def beside(found: Evidence, allocated: int) -> Evidence:
        return replace(found, devices=(*found.devices, cases.device(name="cuda:1", allocated=allocated)))

    grown = compare(beside(_evidence(None), GIB), beside(_evidence(GIB), GIB + MIB))
    assert [(one.device, one.allocated) for one in grown.devices] == [("cuda:1", MIB)]
    rows = growth_rows(beside(_evidence(None), GIB), beside(_evidence(GIB), GIB + MIB), "before")
    assert f"{CHANGED}: {UNCOMPARED}; cuda:1 +1.00 MiB allocated" in rows.sentence


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
