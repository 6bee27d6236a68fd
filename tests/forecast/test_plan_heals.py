"""With forecasts on, the first retry is the one that heals: a few of the cases that ``benchmarks/plan.py`` tries."""

from models import FAMILIES
from plan_lab import Ready, failed, grown, healed, steps_off, unfixed

from oomdoctor.model.plan import Verdict

LEAST_BYTES = 64 << 20


def test_the_first_retry_heals_with_a_dose_no_more_than_a_step_too_strong():
    family = grown(FAMILIES["mlp"], LEAST_BYTES)
    _, peak = unfixed(family)
    with failed(family, int(peak * 0.7), time_budget_s=60.0) as ready:
        assert isinstance(ready, Ready), ready
        best = ready.case.plan.candidates[0]
        assert best.forecast.verdict is Verdict.FITS
        assert best.forecast.basis == "shadow run"
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
