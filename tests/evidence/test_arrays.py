"""Memory of the host that no tensor holds, by the names that lead to it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import hostile_objects as objects
import numpy as np
import psutil
import pytest
import torch
from hostile_objects import armed

import oomdoctor
from oomdoctor.evidence import collect
from oomdoctor.model.sizes import MIB


def _found(**names: Any) -> dict[str, int]:
    return {one.path: one.bytes for one in collect.largest(names.items())}


def _about(size: int) -> Any:
    return pytest.approx(size, rel=0.01)


def test_a_list_of_arrays_is_found_by_its_name() -> None:
    images = [np.ones((64, 1024), dtype=np.float32) for _ in range(20)]
    (found,) = collect.largest([("images", images), ("labels", np.arange(20))])
    assert (found.path, found.arrays) == ("images", 20)
    assert found.array_bytes == sum(one.nbytes for one in images)
    assert found.bytes == _about(found.array_bytes)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize("hold", [Slotted, Plain, lambda one: {"a": {"b": (one,)}}, lambda one: Plain([Slotted(one)])])
def test_arrays_are_found_wherever_they_hang(hold: Any) -> None:
    assert _found(held=hold(np.zeros(MIB // 2))) == {"held": _about(4 * MIB)}


def test_texts_in_an_array_of_objects_count_for_it_each_once() -> None:
    texts = [f"{number:0100}" for number in range(20_000)]
    column = np.array(texts * 2, dtype=object)
    (found,) = collect.largest([("column", column[5:])])
    assert found.array_bytes == column.nbytes
    assert found.bytes == _about(column.nbytes + sum(map(sys.getsizeof, texts)))


def test_each_array_counts_once_and_a_view_counts_as_all_of_it() -> None:
    whole = np.zeros((1024, 1024))
    assert _found(view=whole[:1], whole=whole, again=[whole, whole.T]) == {"view": 8 * MIB}


def test_what_is_not_the_arrays_own_is_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(2 * MIB))
    array, tensor = np.zeros(MIB), torch.zeros(MIB)
    wrapped = torch.from_numpy(array)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        found = _found(mapped=np.memmap(file), map=mapped, of_tensor=tensor.numpy(), array=array, wrapped=wrapped)
    assert found == {}


def test_byte_strings_and_texts_count() -> None:
    parts = [bytes([n]) * MIB for n in range(3)]
    lines = [f"{n}" * 4000 for n in range(1000)]
    found = _found(parts=parts, lines=lines, shown=np.frombuffer(parts[0], dtype=np.uint8))
    assert found == {"parts": _about(3 * MIB), "lines": _about(sum(map(len, lines)))}


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_MOST_OBJECTS", 1000)
    circle: list[Any] = []
    circle.append(circle)
    numbers = [float(n) for n in range(200_000)]
    assert _found(circle=circle, numbers=numbers, late=np.zeros(MIB)) == {
        "numbers": pytest.approx(8 * len(numbers), rel=0.1)
    }


@pytest.mark.parametrize("make", objects.OBJECTS)
def test_nothing_is_asked(make: Any) -> None:
    held = [make()]
    with armed() as calls:
        collect.largest([("held", held), ("other", {"a": held[0]})])
    assert calls == []


def test_a_report_says_what_fills_the_host() -> None:
    a_tenth = psutil.Process().memory_info().rss // 10
    images = [np.ones(a_tenth // 40, dtype=np.uint8) for _ in range(40)]
    report = oomdoctor.report({"images": images})
    assert report.evidence.beside_tensors[0].path == "images"
    assert "40 NumPy arrays" in " ".join(str(report).split())
    assert report.to_dict()["evidence"]["beside_tensors"][0]["path"] == "images"
