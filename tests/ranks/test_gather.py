"""Reports gathered over a real store, its ranks as threads of this process, some of which are silent."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from oomdoctor.ranks import circle as circles
from oomdoctor.ranks import gather as gathering
from oomdoctor.ranks.circle import Circle
from oomdoctor.ranks.gather import RankReport, gather, imbalance
from oomdoctor.shell.job import circle_lines, rank_lines

WORLD = 3
WAIT_S = 0.5


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_ANSWER_S", 0.3)
    monkeypatch.setattr("oomdoctor.shell.job._ANSWER_S", 0.3)
    monkeypatch.setattr(circles, "ASK_S", 0.3)


@pytest.fixture
def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def ranks(server: Any) -> Iterator[list[Circle]]:
    made = [Circle(rank=rank, world=WORLD, host="127.0.0.1", port=server.port) for rank in range(WORLD)]
    yield made
    for one in made:
        one.close()


def holding(mebibytes: int) -> dict[str, Any]:
    return {"evidence": {"census": {"roles": {"parameter": mebibytes << 20}}}}


def gathered(ranks: list[Circle], sizes: list[int], wait_s: float = 20) -> list[list[RankReport]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        asked = [pool.submit(gather, one, holding(size), wait_s=wait_s) for one, size in zip(ranks, sizes, strict=True)]
        return [one.result() for one in asked]


class Job:
    """As much of a job as is asked who is in it."""

    def __init__(self, circle: Circle) -> None:
        self.circle, self.groups = circle, type("Groups", (), {"refused": None})


def test_each_rank_has_all_reports_each_time_and_no_key_is_left(ranks: list[Circle], server: Any) -> None:
    before = server.num_keys()
    for size in (1, 2):
        for told in gathered(ranks, [size, size, 4 * size]):
            assert list(rank_lines(told)) == [
                f"rank 0: {size}.00 MiB: parameter {size}.00 MiB",
                f"rank 1: {size}.00 MiB: parameter {size}.00 MiB",
                f"rank 2: {4 * size}.00 MiB: parameter {4 * size}.00 MiB",
                "The fullest rank holds 4.00 times what the emptiest does.",
            ]
    for one in ranks:
        one.close()
    assert server.num_keys() == before


def test_a_rank_that_was_not_asked_is_told_as_silent_and_takes_part_in_the_next_one(ranks: list[Circle]) -> None:
    for told in gathered(ranks[:2], [1, 3], WAIT_S):
        assert [one.report is not None for one in told] == [True, True, False]
        assert told[2].why == "silent for 0 s: busy, or not asked"
        assert imbalance(told) == 3
    for told in gathered(ranks, [1, 1, 2]):
        assert [one.why for one in told] == ["", "", ""]


def test_one_that_comes_after_the_deadline_begins_another(ranks: list[Circle]) -> None:
    gathered(ranks[:2], [1, 1], WAIT_S)
    (told,) = gathered(ranks[2:], [2], WAIT_S)
    assert [one.report is not None for one in told] == [False, False, True]


def test_a_rank_whose_thread_has_ended_is_told_as_killed_after_the_deadline(ranks: list[Circle]) -> None:
    ranks[1].close()
    begun = time.monotonic()
    told = gathered([ranks[0], ranks[2]], [1, 2], WAIT_S)[0]
    assert told[1].why == "silent for 0 s: killed, or stopped"
    assert time.monotonic() - begun < WAIT_S + 2
    assert list(circle_lines(Job(ranks[0]))) == [  # type: ignore[arg-type]
        "rank 0: this process",
        "rank 1: does not answer",
        "rank 2: answers",
    ]


def test_where_the_store_is_gone_each_rank_has_its_own_report() -> None:
    ours, theirs = multiprocessing.Pipe()
    keeper = multiprocessing.get_context("fork").Process(target=keep_a_store, args=(theirs,))
    keeper.start()
    one = Circle(rank=1, world=2, host="127.0.0.1", port=ours.recv())
    keeper.kill()
    keeper.join()
    other, own = gather(one, holding(1))
    assert (other.report, own.report) == (None, holding(1))
    assert other.why == "the job's store does not answer (DistNetworkError)"
    told = next(circle_lines(Job(one)))  # type: ignore[arg-type]
    assert told == "rank 0: unknown, the job's store does not answer (DistNetworkError)"
    one.close()


def keep_a_store(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(60)
