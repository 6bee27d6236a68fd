"""What is said of the page cache: never more than applies, and with the user's own numbers."""

from __future__ import annotations

from typing import Any

import cases
import pytest

from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.views.host_card import page_cache_advice

FULL = {
    "total": 64 * GIB,
    "page_cache": 40 * GIB,
    "reclaimable": 39 * GIB,
    "dirty": 100 * MIB,
    "tmpfs": 200 * MIB,
    "swap_total": 0,
}
GROUP = {
    "cgroup_limit": 16 * GIB,
    "cgroup_used": 15 * GIB,
    "cgroup_file": 9 * GIB,
    "cgroup_reclaimable": 8.5 * GIB,
    "cgroup_tmpfs": 0,
}


def advice(**facts: Any) -> tuple[str, ...]:
    facts = {name: int(value) if isinstance(value, float) else value for name, value in facts.items()}
    return page_cache_advice(cases.host(**facts))


def test_clean_cache_is_not_the_cause_and_dropping_it_would_not_help() -> None:
    first, second = advice(**FULL)
    assert first == (
        "Page cache holds copies of files, 40.0 GiB here; the kernel drops 39.0 GiB of it when a program needs the "
        "memory, so that part is not the cause."
    )
    assert second == (
        "`drop_caches` would not help: it needs root, frees only what the kernel would drop by itself (39.0 GiB), and "
        "every file must then be read from disk again."
    )


def test_tmpfs_cannot_be_dropped() -> None:
    facts = FULL | {"reclaimable": 1 * GIB, "tmpfs": 38 * GIB}
    first, second = advice(**facts)
    assert first == "Page cache holds copies of files, 40.0 GiB here; the kernel can drop only 1.00 GiB of it."
    assert second == (
        "38.0 GiB is tmpfs (/dev/shm and shared memory), which the kernel cannot drop: delete the files or end the "
        "processes that hold it."
    )
    assert "can only move to swap" in advice(**facts | {"swap_total": GIB})[1]


def test_a_small_cache_most_of_which_can_be_dropped_is_not_the_cause() -> None:
    (only,) = advice(**FULL | {"page_cache": 3.3 * GIB, "reclaimable": 3.1 * GIB})
    assert only.endswith("drops 3.10 GiB of it when a program needs the memory, so that part is not the cause.")


def test_what_is_not_on_disk_yet_must_be_written_first() -> None:
    told = advice(**FULL | {"reclaimable": 30 * GIB, "dirty": 9 * GIB})
    assert told[1] == "9.00 GiB waits to be written to disk and cannot be dropped before; `sync` writes files."
    assert "30.0 GiB" in told[0]
    assert "30.0 GiB" in told[2]


def test_a_group_at_its_limit_is_told_how_much_of_its_usage_is_cache() -> None:
    told = advice(**FULL, **GROUP)
    assert told[0] == (
        "The 15.0 GiB that the memory cgroup counts as used include 9.00 GiB of page cache, copies of files; the "
        "kernel drops 8.50 GiB of it before it kills a process, so that part is not the cause."
    )
    assert "40.0 GiB" not in " ".join(told)


def test_tmpfs_and_what_is_unwritten_of_a_group_cannot_be_dropped_at_once() -> None:
    told = advice(**FULL, **GROUP | {"cgroup_reclaimable": 3 * GIB, "cgroup_tmpfs": 4 * GIB})
    assert told[1].startswith("4.00 GiB is tmpfs")
    assert told[2].startswith("2.00 GiB waits to be written to disk or is locked")


def test_a_group_with_a_limit_above_the_machine_does_not_matter() -> None:
    assert advice(**FULL, **GROUP | {"cgroup_limit": 128 * GIB}) == advice(**FULL)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"page_cache": GIB}, "Page cache holds copies of files; 1.00 GiB is too little to be the cause."),
        (
            GROUP | {"cgroup_file": 10 * MIB},
            "Page cache holds copies of files; 10.0 MiB in this memory cgroup is too little to be the cause.",
        ),
        (
            {"reclaimable": Unavailable("not told"), "tmpfs": Unavailable("not told")},
            (
                "Page cache holds copies of files, 40.0 GiB here; the kernel drops what is clean of it when a program "
                "needs the memory."
            ),
        ),
    ],
)
def test_one_sentence_is_enough_where_there_is_no_more_to_say(facts: dict[str, Any], told: str) -> None:
    assert advice(**FULL | facts) == (told,)


@pytest.mark.parametrize("name", ["total", "page_cache"])
def test_nothing_is_said_where_nothing_is_known(name: str) -> None:
    assert advice(**FULL | {name: Unavailable("not told")}) == ()


def test_there_are_never_more_than_four_sentences() -> None:
    told = advice(**FULL | {"reclaimable": 10 * GIB, "dirty": 10 * GIB, "tmpfs": 20 * GIB})
    assert len(told) == 4
    assert all(sentence.endswith(".") for sentence in told)
