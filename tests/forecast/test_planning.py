"""The plan: doses found by forecast, ranked, told as they come, and none worse than an estimate that says so."""

import asyncio
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forecast_lab import nothing, open_descriptors
from planned import CELL, INCIDENT, MIB, besides, evidence, fix, program, shrinking

from oomdoctor.fixes import get
from oomdoctor.fixes.sdpa_attention import guard
from oomdoctor.forecast.dry_run_result import Reading
from oomdoctor.forecast.planner import Planner
from oomdoctor.forecast.ranking import Planning, make_plan
from oomdoctor.model.case import Case
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Forecast, Verdict
from oomdoctor.model.unavailable import Refused
from oomdoctor.pipeline import admitted


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = open_descriptors(), _children()
    yield
    assert (open_descriptors(), _children()) == before


def plan(fixes, budget, *, session=None, allocated=0, time_budget_s=60.0, make=make_plan, **kwargs):
    return make(
        *(session or program(), INCIDENT, evidence(allocated), fixes),
        budget=besides(budget),
        prepare=nothing,
        time_budget_s=time_budget_s,
        **kwargs,
    )


def _case(found):
    return Case(number=1, incident=INCIDENT, evidence=evidence(), findings=(), plan=found)


SHRINKING = shrinking("shrink", "first", [36, 30, 24, 18, 12, 6])


@pytest.mark.parametrize(("room", "dose"), [(92, 0), (84, 1), (72, 3), (62, 5)])
def test_the_mildest_dose_that_fits_by_its_dry_run_is_chosen(room, dose):
    (found,) = plan([SHRINKING], room * MIB).candidates
    assert found.dose["strength"] == dose
    assert found.forecast.basis == "dry run"
    assert found.forecast.verdict is Verdict.FITS
    assert abs(found.forecast.peak - (50 + 36 - 6 * dose) * MIB) < MIB


def test_where_no_dose_fits_the_strongest_is_told_with_its_forecast():
    (found,) = plan([SHRINKING], 40 * MIB).candidates
    assert found.dose["strength"] == 5
    assert found.forecast.verdict is Verdict.TOO_LARGE
    assert found.forecast.basis == "dry run"


def test_what_is_close_is_borderline_and_no_dose_to_stop_at():
    (found,) = plan([SHRINKING], 86 * MIB + MIB // 2).candidates
    assert found.dose["strength"] == 1
    (close,) = plan([shrinking("shrink", "first", [36])], 86 * MIB + MIB // 2).candidates
    assert close.forecast.verdict is Verdict.BORDERLINE


def test_leaks_come_first_then_what_keeps_the_result_then_what_costs_least():
    fixes = [
        shrinking("changing", "first", [4], effect=Effect.CHANGES_RESULT),
        fix(
            "slow", {"first = torch.zeros(40, 1 << 18)": ["first = torch.zeros(4, 1 << 18); torch.mm(first, first.T)"]}
        ),
        shrinking("freeing", "first", [5], effect=Effect.CHANGES_RESULT),
        shrinking("quick", "first", [4]),
        shrinking("weak", "first", [39]),
    ]
    found = plan(fixes, 70 * MIB, leaks={"freeing"}).candidates
    assert [one.fix for one in found] == ["freeing", "quick", "slow", "changing", "weak"]
    assert found[2].forecast.slowdown > found[1].forecast.slowdown


def test_the_plan_is_told_as_it_comes_estimates_first():
    told = list(plan([SHRINKING, shrinking("other", "second", [4])], 70 * MIB, make=Planning, waits=True).wait())
    last = plan([SHRINKING, shrinking("other", "second", [4])], 70 * MIB)
    assert [one.forecast.basis for one in told[0].candidates] == ["a guess", "a guess"]
    assert told[-1] == last
    assert {one.forecast.basis for one in last.candidates} == {"dry run"}
    assert len({sum(one.forecast.basis == "dry run" for one in now.candidates) for now in told}) == 3


def test_out_of_time_the_price_is_an_estimate_that_says_so():
    source = "count = 200\nwhile count:\n    pass\n"
    found = plan([fix("shrink", {"200": ["100"]})], 70 * MIB, session=program(source), time_budget_s=1.0)
    (one,) = found.candidates
    assert found.unchanged.refused == "the exact forecast timed out after 1 s"
    assert one.forecast.basis == "a guess"
    assert one.forecast.refused in (
        "the exact forecast timed out after 1 s",
        None,
    )  # None if not even the plan came in time


def test_without_forecasts_the_price_is_an_estimate():
    found = plan([SHRINKING], 70 * MIB, allocated=90 * MIB, time_budget_s=0)
    assert found.unchanged.refused == "forecasts are switched off"
    assert [one.forecast.basis for one in found.candidates] == ["a guess"]
    assert found.candidates[0].forecast.estimated


def test_no_estimate_is_below_what_lasts_and_the_change_leaves():
    fixes = [fix("rest", {"x": ["x"]}, saves=[1000 * MIB]), fix("state", {"x": ["x"]}, saves=[1000 * MIB])]
    fixes[1] = replace(fixes[1], frees=(Role.OPTIMIZER_STATE,))
    roles = ((Role.PARAMETER, 8 * MIB), (Role.OPTIMIZER_STATE, 16 * MIB))
    held = replace(evidence(48 * MIB), censuses=(replace(evidence().census, roles=roles),))
    made = make_plan(*(program(), INCIDENT, held, fixes), budget=64 * MIB, prepare=nothing, time_budget_s=0)
    assert {one.fix: one.forecast.peak for one in made.candidates} == {"rest": 24 * MIB, "state": 8 * MIB}


def test_an_estimate_that_could_not_fit_by_any_error_seen_comes_last():
    hopeless = fix("hopeless", {"1": ["1"]}, saves=[MIB])
    may_do = fix("may_do", {"1": ["1"]}, saves=[12 * MIB], effect=Effect.CHANGES_RESULT)
    told = list(plan([hopeless, may_do], 30 * MIB, make=Planning, waits=True).wait())
    now = next(now for now in told if now.unchanged.basis == "dry run")
    assert [one.fix for one in now.candidates] == ["may_do", "hopeless"]


def test_an_estimate_that_leaves_nothing_is_no_number_and_may_be_tried_all_the_same():
    all_of_it = fix("micro_batch", {"first": ["first"]}, saves=[1000 * MIB])
    found = plan([all_of_it], 70 * MIB, allocated=90 * MIB, time_budget_s=0)
    (one,) = found.candidates
    assert (one.forecast.peak, one.forecast.verdict) == (None, Verdict.UNKNOWN)
    assert found.unchanged.peak is not None
    assert admitted(_case(found), "exact") == (one,)


def test_a_dry_run_that_saw_too_little_does_not_undercut_the_estimate():
    found = plan([SHRINKING], 300 * MIB, allocated=400 * MIB)
    assert "memory grows" in found.unchanged.refused
    (one,) = found.candidates
    assert one.forecast.peak >= 400 * MIB - 180 * MIB
    assert one.forecast.estimated
    assert one.forecast.basis == "a guess"


def test_a_change_that_breaks_the_cell_is_refused_with_its_failure_and_its_milder_doses_are_asked():
    breaking = fix("micro_batch", {"third = torch": ["third = missing"]})
    found = plan([breaking, SHRINKING], 70 * MIB)
    assert [one.fix for one in found.candidates] == ["shrink"]
    assert "NameError" in dict(found.refusals)["micro_batch"]
    strongest = fix("strongest", {"first = torch.zeros(40": ["first = torch.zeros(4", "first = missing(4"]})
    (one,) = plan([strongest], 66 * MIB).candidates
    assert (one.dose["strength"], one.forecast.verdict) == (0, Verdict.FITS)


def test_a_change_that_breaks_the_cell_in_one_way_is_written_in_the_next():
    both = fix("strongest", {"first = torch.zeros(40": ["first = missing(4", "first = torch.zeros(4"]})
    (mildest, _) = both.propose(None, None)
    (one,) = plan([replace(both, propose=lambda *_: (mildest,), ways=(Dose.of(strength=1),))], 66 * MIB).candidates
    assert (dict(one.dose.values), one.forecast.verdict) == ({"strength": 1}, Verdict.FITS)


def test_what_fails_as_only_a_dry_run_may_comes_last_and_is_left_to_the_user():
    breaking = fix("micro_batch", {"third = torch": ["raise OSError(9, 'closed'); third = torch"]})
    too_large = shrinking("weak", "first", [39], effect=Effect.CHANGES_RESULT)
    found = plan([breaking, too_large], 70 * MIB)
    weak, broken = found.candidates
    assert (weak.fix, weak.breaks, weak.forecast.verdict) == ("weak", False, Verdict.TOO_LARGE)
    assert (broken.fix, broken.breaks, broken.forecast.peak) == ("micro_batch", True, None)
    assert "OSError" in broken.forecast.refused
    assert admitted(_case(found), "any") == ()


def test_what_keeps_the_results_is_priced_first():
    start = "first = torch.zeros(40"
    keeping = fix("keeping", {start: ["first = torch.zeros(4"]}, saves=[30 * MIB])
    slow = {start: ["sum(range(40_000_000)); first = torch.zeros(4"]}
    changing = [fix(f"changing_{number}", slow, effect=Effect.CHANGES_RESULT) for number in range(3)]
    told = list(plan([*changing, keeping], 66 * MIB, make=Planning, waits=True).wait())
    seen = [one.fix for now in told for one in now.candidates if one.forecast.course is not None]
    assert seen[0] == "keeping"


def test_a_fix_that_can_be_made_in_no_way_is_refused_and_its_stronger_doses_left_out():
    never = replace(fix("never", {"first": ["first"]}, live=True), apply=None)
    found = plan([never], 70 * MIB)
    assert found.candidates == ()
    assert dict(found.refusals) == {"never": "it cannot be written"}


def test_a_fix_whose_guard_would_refuse_the_changed_cell_is_refused_and_not_offered():
    written = "y = (q @ q.mT / 8**0.5 + bias).softmax(-1) @ q"
    fused = "y = torch.nn.functional.scaled_dot_product_attention(q, q, q, bias)"
    source = f"q = torch.zeros(2, 2, 512, 8, requires_grad=True)\n{written}\n"
    attention = replace(fix("sdpa_attention", {written: [fused]}), guard=guard)
    for learns in (False, True):  # PyTorch writes out the scores where it has to give a gradient of what is added
        bias = torch.zeros(512, 512, requires_grad=learns)
        found = plan([attention], 200 * MIB, session=program(source, bias=bias))
        assert ([one.fix for one in found.candidates] == ["sdpa_attention"]) is not learns
        assert ("it writes out the scores" in str(dict(found.refusals))) is learns


HALVES = [shrinking("checkpoint_blocks", "first", [30, 20]), shrinking("micro_batch", "second", [30, 24, 20])]


def test_two_are_put_together_where_no_single_one_fits():
    found = plan(HALVES, 68 * MIB)
    pair, *singles = found.candidates
    assert {fix_id for fix_id, _ in pair.made_of} == {"checkpoint_blocks", "micro_batch"}
    assert pair.forecast.verdict is Verdict.FITS
    assert abs(pair.forecast.peak - 64 * MIB) < MIB, "it is not the mildest"
    assert pair.label.startswith(f"{pair.fix}(strength=")
    assert " + " in pair.fix
    assert isinstance(pair.patch, Patch)
    (edit,) = pair.patch.edits
    assert "first = torch.zeros(40" not in edit.after
    assert "second = torch.zeros(40" not in edit.after
    assert [one.forecast.verdict for one in singles] == [Verdict.TOO_LARGE] * 2


def test_two_are_not_put_together_where_one_fits():
    found = plan([*HALVES, shrinking("sdpa_attention", "first", [1])], 68 * MIB)
    assert all(len(one.made_of) == 1 for one in found.candidates)


def test_two_that_keep_the_result_are_tried_where_the_single_one_that_fits_does_not():
    strong = shrinking("smaller_batch", "first", [1], effect=Effect.CHANGES_RESULT)
    found = plan([*HALVES, strong], 68 * MIB)
    assert len(found.candidates[0].made_of) == 2
    assert found.candidates[0].effect is Effect.EXACT
    assert found.candidates[1].fix == "smaller_batch"


class Late:
    """Answers for what is asked of single fixes that they need too much, and has no time for two together."""

    has_room = True

    def __init__(self, singles: int) -> None:
        self._singles = singles
        self._asked: list[Any] = []

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def begin(self, key: Any, _attempt: Any) -> None:
        self._asked.append(key)

    def next(self) -> Any:
        key = self._asked.pop(0)
        if key is not None and key[0] >= self._singles:
            return None
        peak = (90 if key is None else 80) * MIB
        return key, Reading(forecast=Forecast(basis="dry run", peak=peak))


def test_two_are_offered_without_a_price_where_no_single_one_fits_and_time_is_over():
    planner = Planner(program(), INCIDENT, evidence(), HALVES, 68 * MIB, frozenset(), 10.0)
    *_, found = planner.plans(Late(len(HALVES)))
    (pair,) = [one for one in found.candidates if len(one.made_of) == 2]
    assert {str(dose) for _, dose in pair.made_of} == {"strength=1", "strength=2"}, "not the strongest"
    assert pair.forecast.verdict is Verdict.UNKNOWN
    assert pair.forecast.refused == "the exact forecast timed out after 10 s"
    assert [one.forecast.verdict for one in found.candidates if one is not pair] == [Verdict.TOO_LARGE] * 2


def test_those_not_known_to_go_together_are_not():
    others = [shrinking("one", "first", [20], joins=False), shrinking("two", "second", [20])]
    assert all(len(one.made_of) == 1 for one in plan(others, 60 * MIB).candidates)


def test_two_that_change_the_same_place_are_not_put_together():
    same = [shrinking("checkpoint_blocks", "first", [30]), shrinking("micro_batch", "first", [29])]
    assert all(len(one.made_of) == 1 for one in plan(same, 60 * MIB).candidates)


def test_one_that_cannot_be_written_goes_with_one_that_can():
    @contextmanager
    def halved(session, _dose):
        session.namespace["rows"] = 20
        yield

    live = replace(fix("micro_batch", {"second": ["second"]}, live=True), apply=halved)
    session = program(CELL.replace("second = torch.zeros(40", "second = torch.zeros(rows"), rows=40)
    pair = plan([HALVES[0], live], 66 * MIB, session=session).candidates[0]
    assert pair.forecast.verdict is Verdict.FITS
    assert isinstance(pair.patch, Refused)
    assert pair.applies_live


# While the user's process goes on -----------------------------------------------------------------------------------


def test_a_loop_goes_on_while_it_listens():
    async def listen():
        planning, turns = plan([SHRINKING], 70 * MIB, make=Planning), 0

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.005)

        turning = asyncio.ensure_future(turn())
        plans = [found async for found in planning.listen()]
        turning.cancel()
        return turns, plans

    turns, plans = asyncio.run(listen())
    assert turns > 5
    assert plans[-1].candidates[0].forecast.basis == "dry run"


def test_a_plan_can_be_broken_off_and_keeps_what_it_knows():
    planning = plan([SHRINKING], 70 * MIB, allocated=90 * MIB, make=Planning)
    planning.cancel()
    assert planning.over
    assert planning.plan.unchanged.refused == "the forecasts were skipped"
    assert [one.forecast.basis for one in planning.plan.candidates] == ["a guess"]
    planning.cancel()


def test_breaking_off_wakes_who_listens():
    async def listen():
        planning = plan([SHRINKING], 70 * MIB, session=program("while True: pass"), make=Planning)
        asyncio.get_running_loop().call_later(0.3, planning.cancel)
        return [found async for found in planning.listen()]

    assert asyncio.run(asyncio.wait_for(listen(), 20))[-1].candidates


def test_a_plan_that_nobody_holds_any_more_ends_itself():
    planning = plan([SHRINKING], 70 * MIB, session=program("while True: pass"), make=Planning)
    assert _children()
    del planning


def test_a_copy_that_is_killed_leaves_a_plan_of_estimates():
    planning = plan([SHRINKING], 70 * MIB, allocated=90 * MIB, session=program("while True: pass"), make=Planning)
    os.kill(int(_children().split()[0]), 9)
    *_, last = planning.wait()
    assert [one.forecast.basis for one in last.candidates] == ["a guess"]
    assert last.unchanged.refused == "the dry run was ended by SIGKILL"


# Settings of the allocator ------------------------------------------------------------------------------------------

PIECES = "".join(
    f"passing = torch.zeros({30 + 2 * step}, 1 << 18)\ndel passing\nkept_{step} = torch.zeros(2, 1 << 18)\n"
    for step in range(5)
)
"""A piece of 2 MiB is kept in the first segment of 30 MiB, so that what passes, 38 MiB in the end, needs another."""
EXPANDING = get("expandable_segments")


def _planned(source, room, *others):
    return plan([EXPANDING, *others], room * MIB, session=program(source)).candidates


def test_a_setting_of_the_allocator_is_offered_where_the_trace_fits_with_it_and_not_without():
    (found,) = _planned(PIECES, 64)
    assert (found.fix, found.forecast.verdict) == ("expandable_segments", Verdict.FITS)
    assert found.forecast.peak < found.forecast.reserved <= besides(64 * MIB)
    assert _planned(PIECES, 80) == ()  # it fits as it is
    assert _planned(PIECES, 40) == ()  # its tensors do not


def test_it_is_put_beside_another_change_where_neither_is_enough():
    session = program(PIECES + "first = torch.zeros(40, 1 << 18)\nsecond = torch.zeros(60, 1 << 18)\n")
    change = shrinking("shrink", "first", [30, 0])
    both, alone = plan([EXPANDING, change], 85 * MIB, session=session).candidates
    assert (both.fix, both.forecast.verdict, both.dose["strength"]) == (
        "shrink + expandable_segments",
        Verdict.FITS,
        1,
    )
    assert (alone.fix, alone.forecast.verdict) == ("shrink", Verdict.TOO_LARGE)
    assert isinstance(both.patch, Refused)  # no cell imports torch
