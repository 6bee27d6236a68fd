"""Iterations that a dry run leaves out are put back, few integers are drawn, and what is only a lower bound says so."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from forecast_lab import forecast, nothing, session
from planned import INCIDENT, MIB, besides, evidence, fix, program, shrinking

from oomdoctor import pipeline
from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.errors import OomDoctorError
from oomdoctor.forecast import price
from oomdoctor.forecast.dry_run_result import Reading, no_reading
from oomdoctor.forecast.growth import Cut, Growth
from oomdoctor.forecast.outcome import replay
from oomdoctor.forecast.planner import Planner
from oomdoctor.forecast.ranking import make_plan
from oomdoctor.model.fix import Effect
from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.plan import Forecast, Verdict
from oomdoctor.model.session import Attempt
from oomdoctor.model.unavailable import Refused


def grown(events, *cuts):
    allocator = CachingAllocator()
    replay(Growth(events, cuts).events(), allocator=allocator)
    return allocator


def test_what_each_iteration_keeps_is_kept_by_those_that_were_left_out():
    events = [("alloc", 1, 30 * MIB), ("alloc", 2, 30 * MIB)]
    assert grown(events, Cut(1, 2, 5, 2, 0)).allocated == 7 * 30 * MIB


def test_what_each_iteration_lets_go_of_the_one_before_is_let_go_of():
    # Each iteration makes its result, and with that lets go of the one before; the last is let go of after the loop.
    events = [("alloc", 1, 30 * MIB), ("alloc", 2, 30 * MIB), ("free", 1), ("free", 2), ("alloc", 3, 40 * MIB)]
    found = grown(events, Cut(1, 3, 10**9, 2, 0))
    assert (found.allocated, found.peak_allocated) == (40 * MIB, 60 * MIB)


def test_a_loop_around_one_that_was_cut_is_left_as_it_is():
    events = [("alloc", 1, MIB), ("alloc", 2, MIB), ("alloc", 3, MIB)]
    assert grown(events, Cut(1, 2, 1, 2, 0), Cut(0, 3, 1, 1, 0)).allocated == 4 * MIB


KEEPING = """
weight = torch.ones(256, requires_grad=True)
optimizer = torch.optim.SGD([weight])
kept = []
for step in range(12):
    kept.append((weight * torch.ones(4096, 256)).sin())
    kept[-1].sum().backward()
    optimizer.step()
"""


def test_a_list_that_grows_in_a_loop_that_is_cut_is_forecast_to_its_end():
    attempts = [Attempt(source=text) for text in (KEEPING, KEEPING.replace("12", "4"), KEEPING + "kept[11]\n", "[][1]")]
    long, short, late, broken = price(
        session({"torch": torch}, KEEPING, simulated=True), attempts, budget=None, prepare=nothing, timeout_s=60
    )
    assert long.peak - short.peak == pytest.approx(8 * 4 * MIB, rel=0.1)
    # An error after a loop that was cut is none of the cell's.
    assert late.peak == long.peak
    assert "IndexError" in broken.refused


DRAWN = """
order = torch.randint(len(data) - 32, (8,))
batch = torch.stack([data[begin : begin + 32] for begin in order])
assert batch.shape == (8, 32)
assert sorted(torch.randperm(5).tolist()) == [0, 1, 2, 3, 4]
before = torch.get_rng_state().numpy().tobytes()
torch.randn(4000, 4000)
assert before != torch.get_rng_state().numpy().tobytes()
"""


def test_few_integers_are_drawn_for_real_and_drawing_moves_the_generator():
    found = forecast({"torch": torch, "data": torch.arange(4000)}, DRAWN)
    assert found.refused is None


# What is known too little of ----------------------------------------------------------------------------------------


def plan(fixes, budget, *, allocated=0, source=None, **names):
    held = program(**names) if source is None else program(source, **names)
    return make_plan(
        held, INCIDENT, evidence(allocated), fixes, budget=besides(budget), prepare=nothing, time_budget_s=60.0
    )


def test_a_lower_bound_never_fits():
    known = Forecast(basis="", peak=10, budget=100)
    assert known.verdict is Verdict.FITS
    assert replace(known, at_least=True).verdict is Verdict.UNKNOWN
    assert replace(known, at_least=True, budget=9).verdict is Verdict.TOO_LARGE


def test_where_only_the_least_is_known_the_strongest_dose_is_offered_as_unknown():
    change = shrinking("shrink", "first", [36, 30, 24, 18, 12, 6])
    (found,) = plan([change], 300 * MIB, allocated=310 * MIB).candidates
    assert found.forecast.verdict is Verdict.UNKNOWN
    assert found.dose["strength"] == 5


def test_where_no_dry_run_tells_what_is_needed_the_dose_leaves_room_for_as_much_again():
    # Twice as much is supposed as was held, or as there was; the estimate is taken to be off by a third.
    saves = [part * MIB for part in (20, 44, 52, 58, 62, 64)]
    change = shrinking("shrink", "first", [36, 30, 24, 18, 12, 6], saves=saves)
    for budget, strength in ((100, 1), (40, 2), (10, 4), (2, 5)):
        terms = {"budget": budget * MIB, "prepare": nothing, "time_budget_s": 0.0}
        (found,) = make_plan(program(), INCIDENT, evidence(63 * MIB), [change], **terms).candidates
        assert found.dose["strength"] == strength, budget
        assert found.forecast.verdict is Verdict.UNKNOWN


class DryRuns:
    """Tells one reading of whatever is begun, and notes what that is."""

    left_s, busy = 60.0, True

    def __init__(self, reading):
        self.reading, self.waiting, self.asked = reading, [], []

    @property
    def has_room(self):
        return len(self.waiting) < 2

    def begin(self, key, attempt):
        self.waiting.append(key)
        self.asked.append(key and key[:2])

    def next(self):
        return (self.waiting.pop(0), self.reading) if self.waiting else None


MEASURED = replace(shrinking("measured", "first", [10]), is_measured=True)


def asked(fixes, reading, **terms):
    dry_runs = DryRuns(reading)
    given = (program(), INCIDENT, evidence(63 * MIB), fixes, 70 * MIB, frozenset(), 60.0)
    list(Planner(*given, **terms).plans(dry_runs))
    return dry_runs.asked


def test_before_a_retry_what_changes_the_results_waits_for_all_that_keeps_them():
    given = [shrinking("other", "second", [10], effect=Effect.CHANGES_RESULT), MEASURED], no_reading("nothing")
    assert asked(*given, is_hurried=True)[:3] == [None, (1, 0), (0, 0)]
    assert asked(*given, is_hurried=False)[:3] == [None, (0, 0), (1, 0)]


@pytest.mark.parametrize(("slowdown", "basis"), [(2.5, "seen"), (1.2, "a guess")])
def test_a_retry_waits_for_what_promises_much_less_time_than_what_was_seen_to_fit(slowdown, basis):
    slow = shrinking("slow", "second", [10], slowdown=slowdown)
    dry_runs = DryRuns(Reading(forecast=Forecast(basis="seen", peak=62 * MIB, error_ratio=0.0)))
    given = (program(), INCIDENT, evidence(63 * MIB), [slow, MEASURED], 70 * MIB, frozenset(), 60.0)
    *_, plan = Planner(*given, is_hurried=True).plans(dry_runs)
    assert dry_runs.asked == [None, (0, 0), (1, 0)]
    assert {one.fix: one.forecast.basis for one in plan.candidates} == {"slow": "seen", "measured": basis}


def test_what_seems_to_save_nothing_by_what_modules_keep_is_still_run():
    row = ModuleMemory(("Net", 1), "lstm", 1, 1, 1.0, False, False)
    fix = replace(MEASURED, propose=lambda _, known: Refused("") if known.modules else MEASURED.propose(_, known))
    seen = Reading(forecast=Forecast(basis="", peak=90 * MIB), modules=(row,))
    assert asked([fix], seen) == [None, (0, 0)]


class Unfit:
    def __init__(self, least):
        self.least = least

    def __call__(self, parts):
        if parts > self.least:
            raise OomDoctorError("too few rows for so many parts")


def test_a_change_that_finds_itself_unfit_in_its_dry_run_is_refused_in_its_words():
    never = fix("never", {"# between": ["check(1)", "check(2)"]})
    found = plan([never], 70 * MIB, check=Unfit(0))
    assert found.candidates == ()
    assert dict(found.refusals) == {"never": "too few rows for so many parts"}


def test_doses_below_one_that_finds_itself_unfit_are_found():
    some = fix(
        "some",
        {
            "# between": ["check(1)", "check(2)", "check(3)", "check(4)"],
            "first = torch.zeros(40": [f"first = torch.zeros({size}" for size in (30, 20, 10, 5)],
        },
    )
    (found,) = plan([some], 72 * MIB, check=Unfit(2)).candidates
    assert found.dose["strength"] == 1
    assert found.forecast.verdict is Verdict.FITS


def test_what_broke_in_its_dry_run_is_not_retried_by_itself():
    breaking = fix("set_to_none", {"third = torch": ["third = missing"]})
    fitting = shrinking("micro_batch", "first", [4])
    made = plan([breaking, fitting], 70 * MIB)
    case = SimpleNamespace(plan=made, incident=INCIDENT, findings=())
    assert [one.fix for one in made.candidates] == ["micro_batch"]
    assert "NameError" in dict(made.refusals)["set_to_none"]
    assert [one.fix for one in pipeline.admitted(case, "any")] == ["micro_batch"]
