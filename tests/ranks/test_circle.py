"""The circle: words, talk and silence over a real store, its ranks as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from oomdoctor.ranks import circle as circles
from oomdoctor.ranks import presence
from oomdoctor.ranks.circle import Circle, WordKind
from oomdoctor.ranks.presence import RankLeft, SilentRank

WORLD = 3


@pytest.fixture
def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def released() -> list[int]:
    return []


@pytest.fixture
def ranks(server: Any, released: list[int]) -> Iterator[list[Circle]]:
    def freeing(rank: int) -> Callable[[], None]:
        return lambda: released.append(rank)

    made = [
        Circle(rank=rank, world=WORLD, host="127.0.0.1", port=server.port, release=freeing(rank))
        for rank in range(WORLD)
    ]
    yield made
    for one in made:
        one.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def test_a_job_in_which_nothing_happens_ends_together_and_leaves_no_key(ranks: list[Circle], server: Any) -> None:
    before = server.num_keys()
    for _ in range(2):
        for one in ranks:
            assert one.begin() is None
        words = at_once(*(one.finish for one in ranks))
        assert [word.kind for word in words] == [WordKind.DONE] * WORLD
    for one in ranks:
        one.close()
    assert server.num_keys() == before
    assert not [one for one in threading.enumerate() if one.name == "oomdoctor-ranks"]


def test_a_rank_that_has_ended_waits_and_is_taken_back_with_one_that_ran_out(
    ranks: list[Circle], released: list[int]
) -> None:
    for one in ranks:
        one.begin()

    def runs_out() -> Any:
        time.sleep(0.2)
        return ranks[2].speak(WordKind.OUT_OF_MEMORY, "no memory")

    words = at_once(ranks[0].finish, ranks[1].finish, runs_out)
    assert {(word.kind, word.rank, word.why) for word in words} == {(WordKind.OUT_OF_MEMORY, 2, "no memory")}
    assert sorted(released) == [0, 1, 2]


def test_of_two_at_once_the_first_leads_on_all_ranks(ranks: list[Circle], released: list[int]) -> None:
    for one in ranks:
        one.begin()
    ends = [lambda one=one: one.speak(WordKind.OUT_OF_MEMORY) for one in ranks[:2]]
    words = at_once(*ends, ranks[2].finish)
    assert len({word.rank for word in words}) == 1
    assert sorted(released) == [0, 1, 2]  # each once


def test_a_rank_that_begins_late_meets_the_word(ranks: list[Circle]) -> None:
    ranks[0].begin()
    ranks[0].speak(WordKind.OUT_OF_MEMORY)
    word = ranks[1].begin()
    assert word is not None
    assert word.rank == 0


def test_what_is_said_is_heard_in_the_order_of_the_ranks(ranks: list[Circle]) -> None:
    for one in ranks:
        one.begin()

    def talk(one: Circle) -> Any:
        one.say("vote", 0, {"of": one.rank})
        return one.hear("vote", 0, range(WORLD), 20)

    assert at_once(*(lambda one=one: talk(one) for one in ranks)) == [[{"of": rank} for rank in range(WORLD)]] * WORLD


def test_a_rank_that_does_not_answer_is_told_as_silent(ranks: list[Circle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.3)
    monkeypatch.setattr(circles, "ASK_S", 0.1)
    for one in ranks:
        one.begin()
    ranks[2].close()  # as one that was killed: its thread answers no more
    begun = time.monotonic()
    with pytest.raises(SilentRank, match="rank 2 has not answered"):
        ranks[0].finish()
    assert time.monotonic() - begun < 10


def test_one_that_is_alive_and_has_nothing_to_say_is_waited_for_until_the_deadline(ranks: list[Circle]) -> None:
    ranks[0].begin()
    with pytest.raises(SilentRank, match="ranks 1, 2 had nothing to say within 1 s"):
        ranks[0].hear("vote", 0, [1, 2], 1)


def test_one_that_goes_on_no_more_is_waited_for_no_longer(ranks: list[Circle]) -> None:
    ranks[0].begin()
    ranks[2].begin()
    ranks[2].leave_talk("interrupted")
    with pytest.raises(RankLeft, match="rank 2 goes on no more: interrupted"):
        ranks[0].hear("vote", 7, [2], 20)


def test_a_release_that_hangs_is_told(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circles, "_ANSWER_S", 0.5)
    hangs = threading.Event()
    one = Circle(rank=0, world=2, host="127.0.0.1", port=server.port, release=hangs.wait)
    one.begin()
    with pytest.raises(SilentRank, match="this rank could not be released"):
        one.speak(WordKind.OUT_OF_MEMORY)
    hangs.set()
    one.close()


def test_the_thread_sleeps_while_nothing_happens(ranks: list[Circle]) -> None:
    for one in ranks:
        one.begin()
    begun = time.process_time()
    time.sleep(2.0)
    used = time.process_time() - begun
    assert used / WORLD < 0.001 * 2, used  # 0.1 % of one rank, with its share of the store's server
