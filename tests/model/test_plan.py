"""A plan after a retry: what healed the cell stands in it, whatever was refuted on the way."""

from oomdoctor.model.case import Outcome, OutcomeKind
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.unavailable import Refused
from oomdoctor.pipeline.failure import with_made


def candidate(*fixes: str, parts: int) -> Candidate:
    return Candidate(
        fix=" + ".join(fixes),
        title="",
        dose=Dose.of(parts=parts),
        effect=Effect.EXACT,
        forecast=Forecast(basis=""),
        patch=Refused("no"),
        applies_live=True,
        parts=tuple((fix, Dose()) for fix in fixes) if len(fixes) > 1 else (),
    )


def test_what_healed_stands_though_a_trial_had_refuted_one_of_it_alone() -> None:
    one, two, both = candidate("one", parts=2), candidate("two", parts=2), candidate("one", "two", parts=2)
    plan = Plan(unchanged=Forecast(basis=""), candidates=(one, both, two), refusals=())
    made = candidate("one", "two", parts=4)
    healed = with_made(plan.without({"one": "it differs"}), made, Outcome(kind=OutcomeKind.HEALED))
    assert [found.fix for found in healed.candidates] == ["one", "one + two", "two"]
    assert healed.candidates[1] is made
    assert [found.refuted for found in healed.candidates] == ["it differs", None, None]
    assert healed.refusals == (("one", "it differs"),)
    assert with_made(plan, candidate("three", parts=1), Outcome()).candidates[0].fix == "three"
    assert with_made(plan, None, Outcome()) is plan
    assert [one.fix for one in with_made(plan, candidate("two", "three", parts=1), Outcome()).candidates] == [
        *("one", "one + two", "two + three", "two")
    ], "it is no better than what it was made of stands"


def test_what_a_fix_is_called_by_stays_in_every_plan_of_a_case() -> None:
    one, two, three = (candidate(name, parts=2) for name in ("one", "two", "three"))
    plan = Plan(unchanged=Forecast(basis=""), candidates=(one, two))
    assert [plan.number(found) for found in plan.candidates] == [1, 2]
    anew = Plan(unchanged=Forecast(basis=""), candidates=(three, two)).after(plan)
    assert [anew.number(found) for found in anew.candidates] == [3, 2]
    again = Plan(unchanged=Forecast(basis=""), candidates=(two, three, one)).after(anew)
    assert [again.number(found) for found in again.candidates] == [2, 3, 1]
    healed = with_made(again, candidate("one", "three", parts=4), Outcome(kind=OutcomeKind.HEALED))
    assert [healed.number(found) for found in healed.candidates] == [2, 3, 4, 1]
