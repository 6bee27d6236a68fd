"""Reports compared by the functions of Python: of one device or of all, in either order, never of two processes."""

from __future__ import annotations

import os
import pickle
from typing import Any

import cases
import pytest

from oomdoctor.errors import UsageError
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Census
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.views.displayed import Report


def _held(device: int, host: int) -> Evidence:
    """A simulated device and the host, with that many MiB of tensors on each."""
    places = (
        cases.device(simulated=True, tensor_device="cpu", total=GIB, allocated=device * MIB),
        cases.device(name="cpu", tensor_device="cpu", allocated=host * MIB),
    )
    return cases.evidence(
        devices=places,
        censuses=tuple(Census(device=one.name, found=one.allocated, allocated=one.allocated) for one in places),
        host=cases.host(rss=GIB),
    )


@pytest.fixture
def reports() -> tuple[Report, Report]:
    """Two reports, between which the device grew by 30 MiB and the host by 5."""
    return Report(_held(100, 10)), Report(_held(130, 15))


def _grown(found: Any) -> dict[str, int]:
    growth = found.growth
    assert growth.switched is None
    listed = {one.device: one.allocated for one in growth.devices}
    assert [one["device"] for one in found.to_dict()["devices"]] == list(listed)
    return listed


@pytest.mark.parametrize("name", ["cuda:0", "cpu"])
def test_one_device_is_compared_with_the_same_of_any_report(reports: tuple[Report, Report], name: str) -> None:
    before, after = reports
    grown = {"cuda:0": 30 * MIB, "cpu": 5 * MIB}
    assert _grown(after.diff(before)) == grown
    for found in (after.of(name).diff(before), after.diff(before.of(name)), after.of(name).diff(before.of(name))):
        assert _grown(found) == {name: grown[name]}
        assert "switched" not in str(found)


def test_two_devices_are_not_compared_with_each_other(reports: tuple[Report, Report]) -> None:
    before, after = reports
    with pytest.raises(UsageError, match="a report of cpu cannot be compared with one of cuda:0"):
        after.of("cpu").diff(before.of("cuda"))


def test_growth_is_from_the_earlier_to_the_later_whichever_is_asked(reports: tuple[Report, Report]) -> None:
    before, after = reports
    assert _grown(before.diff(after)) == _grown(after.diff(before))
    assert _grown(before.of("cpu").diff(after)) == {"cpu": 5 * MIB}
    assert str(before.diff(after)).startswith("Since the earlier report: cuda:0 (simulated) +30.0 MiB allocated")
    assert _grown(after.diff(after)) == {"cuda:0": 0, "cpu": 0}


def test_reports_of_two_processes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Report(_held(100, 10))
    monkeypatch.setattr(os, "getpid", lambda: 5)
    elsewhere = pickle.loads(pickle.dumps(Report(_held(130, 15))))
    with pytest.raises(UsageError, match=rf"of two processes, 5 and {before.process}, cannot be compared"):
        elsewhere.diff(before)


@pytest.mark.parametrize("other", [None, {"schema": 1, "evidence": {}}, "report.json"])
def test_what_is_no_report_is_refused(reports: tuple[Report, Report], other: Any) -> None:
    with pytest.raises(UsageError, match=f"diff takes an earlier report, and was given {type(other).__name__}"):
        reports[0].diff(other)
