"""Processes in the report: what each has for itself, workers of one loader together, and why a size is not told."""

from __future__ import annotations

import cases
import pytest

from oomdoctor.model.memory import Census, HostHolding, HostProcess, Measured
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views.device_card import Fact
from oomdoctor.views.memory_report import cards

FORBIDDEN = Unavailable("this process may not read it")


def _child(label: str, rss: Measured, uss: Measured, pss: Measured, pid: int = 40) -> HostProcess:
    return HostProcess(pid=pid, label=label, rss=rss, uss=uss, pss=pss)


def _told(*children: HostProcess, top: int = 10) -> list[Fact]:
    facts = cards(cases.evidence(host=cases.host(children=children)), top=top)[-1].facts
    own = [fact.name for fact in facts].index("this process")
    return [fact for fact in facts[own + 1 :] if "pid" in fact.name or "process" in fact.name or "worker" in fact.name]


def test_the_figure_is_what_would_be_freed_if_it_ended() -> None:
    (fact,) = _told(_child("python train.py", 216 * MIB, 14 * MIB, 65 * MIB))
    assert (fact.figure, fact.name) == ("14.0 MiB", "python train.py (pid 40)")
    assert (
        fact.why
        == "private (USS); 216 MiB with all that it shares (RSS), 65.0 MiB with its share of shared pages (PSS)"
    )


@pytest.mark.parametrize(
    ("child", "figure", "why"),
    [
        (_child("a", GIB, FORBIDDEN, FORBIDDEN), "1.00 GiB", "with all that it shares (RSS)"),
        (_child("a", FORBIDDEN, FORBIDDEN, FORBIDDEN), "?", "this process may not read it"),
    ],
)
def test_a_size_that_is_not_known_is_not_called_resident(child: HostProcess, figure: str, why: str) -> None:
    (fact,) = _told(child)
    assert (fact.figure, fact.why) == (figure, why)


def _workers(loader: str, number: int, pid: int) -> list[HostProcess]:
    sizes = [(216 * MIB, (14 - at) * MIB, 65 * MIB) for at in range(number)]
    return [_child(f"DataLoader worker {at}{loader}", *size, pid=pid + at) for at, size in enumerate(sizes)]


def test_workers_of_one_loader_are_one_row() -> None:
    two = [*_workers(" of train_loader", 3, 40), *_workers(" of val_loader", 2, 50), _child("sh", MIB, MIB, MIB, 60)]
    train, val, other = _told(*two)
    assert (train.figure, train.name) == ("39.0 MiB", "3 DataLoader workers of train_loader")
    assert train.why == "12.0 to 14.0 MiB private each (USS); 216 MiB each with all that it shares (RSS)"
    assert (val.figure, val.name) == ("27.0 MiB", "2 DataLoader workers of val_loader")
    assert other.name == "sh (pid 60)"
    assert [fact.name for fact in _told(*two, top=20)] == [f"{one.label} (pid {one.pid})" for one in two]


def test_one_worker_and_one_that_ended_stand_by_themselves() -> None:
    ended = Unavailable("it has ended and holds no memory")
    found = _told(*_workers("", 1, 40), _child("DataLoader worker 1 (ended)", ended, ended, ended, 41))
    assert [(fact.name, fact.figure) for fact in found] == [
        ("DataLoader worker 0 (pid 40)", "14.0 MiB"),
        ("DataLoader worker 1 (ended) (pid 41)", "?"),
    ]
    assert found[1].why == "it has ended and holds no memory"


def test_a_process_without_tensors_is_told_as_such() -> None:
    found = cases.evidence(
        devices=(cases.device(name="cpu", tensor_device="cpu"),),
        censuses=(Census(device="cpu", found=0, allocated=0),),
        host=cases.host(rss=GIB),
    )
    (card,) = cards(found)
    assert "1.00 GiB of it by this process (none of that in tensors)." in card.headline


def test_what_is_no_tensor_is_told_by_the_names_that_lead_to_it() -> None:
    held = (
        HostHolding(path="images", bytes=600 * MIB, array_bytes=590 * MIB, arrays=600, objects=1),
        HostHolding(path="corpus", bytes=100 * MIB, array_bytes=0, arrays=0, objects=9000),
        HostHolding(path="small", bytes=MIB, array_bytes=MIB, arrays=1, objects=0),
    )
    found = cases.evidence(
        devices=(cases.device(name="cpu", tensor_device="cpu"),),
        censuses=(Census(device="cpu", found=0, allocated=0),),
        host=cases.host(rss=GIB),
        beside_tensors=held,
    )
    (card,) = cards(found)
    assert "(none of that in tensors; 600 MiB is 600 NumPy arrays in `images`)" in card.headline
    facts = {fact.name: (fact.figure, fact.why) for fact in card.facts}
    assert facts["of it in `images`"] == ("600 MiB", "600 NumPy arrays")
    assert facts["of it in `corpus`"] == ("100 MiB", "text, bytes and other Python objects")
    assert "of it in `small`" not in facts
