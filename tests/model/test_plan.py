"""A plan after a retry: what healed the cell stands in it, whatever was refuted on the way."""

from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.unavailable import Refused
from oomdoctor.pipeline.candidates import with_made


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
    healed = with_made(plan.without({"one": "it differs"}), made)
    assert [found.fix for found in healed.candidates] == ["one", "one + two", "two"]
    assert healed.candidates[1] is made
    assert [found.refuted for found in healed.candidates] == ["it differs", None, None]
    assert healed.refusals == (("one", "it differs"),)
    assert with_made(plan, candidate("three", parts=1)).candidates[0].fix == "three"
    assert with_made(plan, None) is plan
