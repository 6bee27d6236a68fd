"""The decision of the ranks: the same from the same votes, and nothing where one of them refuses."""

from __future__ import annotations

import itertools
import json

from oomdoctor.model.fix import Dose, Edit, Effect, Patch
from oomdoctor.model.unavailable import Refused
from oomdoctor.ranks.vote import Condition, Offer, OfferedDose, Vote, decide, digest, objection


def test_the_strongest_of_the_mildest_doses_is_taken_whoever_votes_first() -> None:
    votes = [Vote(rank=0, least=0), Vote(rank=1, least=2), Vote(rank=2, least=1)]
    assert {decide(order) for order in itertools.permutations(votes)} == {2}


def test_one_rank_that_refuses_is_enough_and_its_reason_is_told() -> None:
    decision = decide([Vote(rank=0, least=0), Vote(rank=1, least=None, why="it does not fit")])
    assert decision == Refused("rank 1: it does not fit")


def test_what_one_rank_has_lost_all_refuse() -> None:
    whole = Condition(rank=0, program="a")
    assert objection([whole, Condition(rank=1, program="a")]) is None
    told = objection([whole, Condition(rank=1, program="a", losses=("it wrote a file",))])
    assert told == "rank 1: it wrote a file"


def test_ranks_with_other_programs_are_not_changed_alike() -> None:
    conditions = [Condition(rank=rank, program=digest([text])) for rank, text in enumerate("aab")]
    assert objection(conditions) == "rank 2 runs another program than rank 0"


def test_only_a_restart_helps_where_a_rank_is_stuck() -> None:
    told = objection(
        [Condition(rank=0, program="a", losses=("a file",)), Condition(rank=1, program="a", stuck="stuck")]
    )
    assert told == "rank 1: stuck; only a restart helps"


def test_an_offer_arrives_as_it_was_made() -> None:
    edit = Edit(cell=1, before="a", after="b", replay="b")
    dose = OfferedDose(label="micro_batch(parts=2)", dose=Dose.of(parts=2, dim=0), patch=Patch(edits=(edit,)))
    offer = Offer(fix="micro_batch", title="t", effect=Effect.EQUIVALENT, made_of=("micro_batch",), doses=(dose,))
    assert Offer.from_plain(json.loads(json.dumps(offer.to_plain()))) == offer
