"""With forecasts on, the first retry is the one that heals: a few of the cases that ``benchmarks/plan.py`` tries."""

import asyncio
import re
from dataclasses import replace

import torch
from forecast_lab import nothing
from models import FAMILIES
from plan_lab import ROOMY_BYTES, Ready, failed, grown, healed, steps_off, unfixed
from planned import CELL, INCIDENT, evidence, program, shrinking

from oomdoctor import fixes, pipeline
from oomdoctor.allocator.virtual import simulate
from oomdoctor.forecast.ranking import make_plan
from oomdoctor.model.case import Case
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.plan import Course, Forecast, Verdict
from oomdoctor.retry import Transaction

LEAST_BYTES = 64 << 20


def test_the_first_retry_heals_with_a_dose_no_more_than_a_step_too_strong():
    family = grown(FAMILIES["mlp"], LEAST_BYTES)
    _, peak = unfixed(family)
    with failed(family, int(peak * 0.7), time_budget_s=60.0) as ready:
        assert isinstance(ready, Ready), ready
        best = ready.case.plan.candidates[0]
        assert best.forecast.verdict is Verdict.FITS
        assert best.forecast.basis == "dry run"
        result = healed(ready, "exact")
        assert (result["kind"], result["attempts"], result["fixes"]) == ("healed", 1, [best.label])
        assert steps_off(ready, best) in (0, 1)


def test_what_cannot_be_healed_is_refused_and_not_looped():
    family = FAMILIES["cnn"]
    _, peak = unfixed(family)
    with failed(family, int(peak * 0.3), time_budget_s=60.0) as ready:
        assert isinstance(ready, Ready), ready
        result = healed(ready, "exact")
        assert result["kind"] in ("none admitted", "rolled_back", "refused")
        assert result["attempts"] <= 3


def test_what_was_seen_to_fit_is_tried_before_any_estimate_and_any_stronger_dose(monkeypatch):
    sizes = {"estimated": [31, 32, 33], "fits": [11, 12], "fits_too": [21, 22]}
    made = {name: shrinking(name, "first", of) for name, of in sizes.items()}
    monkeypatch.setattr(fixes, "get", made.__getitem__)
    estimate = Forecast(basis="a guess", budget=1 << 30, peak=1, error_ratio=0.3)
    seen = replace(estimate, basis="dry run", error_ratio=0.0, course=Course())
    tried = []

    async def run(attempt):
        tried.append(int(re.search(r"first = torch.zeros\((\d+)", attempt.source)[1]))
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with simulate(ROOMY_BYTES) as device:
        session = replace(program(), accelerator=device)
        given = (session, INCIDENT, evidence(), list(made.values()))
        plan = make_plan(*given, budget=1 << 30, prepare=nothing, time_budget_s=0)
        candidates = [
            replace(
                one,
                dose=Dose.of(strength=0),
                stronger=tuple(made[one.fix].propose(INCIDENT, evidence()))[1:],
                forecast=estimate if one.fix == "estimated" else seen,
            )
            for one in plan.candidates
        ]
        assert [one.fix for one in candidates] == list(sizes)
        priced = replace(plan, candidates=tuple(candidates))
        case = Case(number=1, incident=INCIDENT, evidence=evidence(), findings=(), plan=priced)
        chosen = pipeline.admitted(case, "exact")
        assert [one.fix for one in chosen] == ["fits", "fits_too", "estimated"]
        transaction = Transaction(session.namespace, CELL, lambda: ROOMY_BYTES)
        asyncio.run(pipeline.heal(case, session, transaction, chosen, run, most_attempts=9, time_budget_s=60))
    assert tried == [11, 21, 12, 22, 31, 33]


def test_what_healed_in_a_stronger_dose_tells_the_caveat_of_that_dose(monkeypatch):
    made = shrinking("smaller", "first", [31, 32, 33], effect=Effect.CHANGES_RESULT)
    proposals = [replace(one, caveat=f"caveat {at}") for at, one in enumerate(made.propose(INCIDENT, evidence()))]
    made = replace(made, propose=lambda *_: tuple(proposals))
    monkeypatch.setattr(fixes, "get", lambda _id: made)
    ran = []

    async def run(attempt):
        ran.append(attempt)
        return torch.OutOfMemoryError("CUDA out of memory.") if len(ran) < 2 else None

    with simulate(ROOMY_BYTES) as device:
        session = replace(program(), accelerator=device)
        plan = make_plan(session, INCIDENT, evidence(), [made], budget=1 << 30, prepare=nothing, time_budget_s=0)
        (first,) = plan.candidates
        first = replace(first, dose=Dose.of(strength=0), caveat="caveat 0", stronger=tuple(proposals[1:]))
        case = Case(number=1, incident=INCIDENT, evidence=evidence(), findings=(), plan=plan)
        transaction = Transaction(session.namespace, CELL, lambda: ROOMY_BYTES)
        healing = pipeline.heal(case, session, transaction, [first], run, most_attempts=9, time_budget_s=60)
        case, _ = asyncio.run(healing)
    assert case.outcome.fixes == ("smaller(strength=2)",)
    assert [one.caveat for one in case.plan.candidates] == ["caveat 2"]
