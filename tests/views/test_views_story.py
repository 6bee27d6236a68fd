from __future__ import annotations

from dataclasses import replace

import cases
import pytest
from cases import CASES, blocks

from oomdoctor.model.case import Case, Outcome, OutcomeKind
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.fix import Dose, Edit, Effect, Patch
from oomdoctor.model.incident import CellLine, Family
from oomdoctor.model.memory import Census, Holding, HostHolding, Role
from oomdoctor.model.plan import FROM_FAILURE, FROM_PEAK, Candidate, Forecast, MeasuredPeak, Plan, Verdict
from oomdoctor.model.sizes import GIB
from oomdoctor.model.unavailable import Refused, Unavailable
from oomdoctor.pipeline.failure import with_made
from oomdoctor.views import text
from oomdoctor.views.device_card import device_bar
from oomdoctor.views.diagnosis import answer, headline, missing, tell
from oomdoctor.views.document import Bar, Causes, Line, Table, Timeline
from oomdoctor.views.holder_groups import within
from oomdoctor.views.holders import holders
from oomdoctor.views.host_card import host_bar
from oomdoctor.views.labels import clean
from oomdoctor.views.memory_report import cards
from oomdoctor.views.outcome import FOLLOWED, Retry, aftermath, next_steps, why_nothing
from oomdoctor.views.prices import fix_row, fix_rows, offered, pace, prices


def test_the_headline_says_who_asked_for_how_much_and_what_fills_the_memory() -> None:
    assert headline(cases.incident(), cases.evidence()) == (
        "`loss.backward()` (In[5], line 7) asked for 2.41 GiB, 2.10 GiB more than was free of the 8.00 GiB of cuda:0; "
        "71 % of what is held is activations."
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"requested": None}, "ran out of the 8.00 GiB of cuda:0."),
        ({"requested": None, "total": None}, "ran out of memory on cuda:0."),
        ({"total": None}, "asked for 2.41 GiB of cuda:0 and was refused."),
        ({"free": None}, "asked for 2.41 GiB of the 8.00 GiB of cuda:0 and was refused."),
        (
            {"free": 3 * GIB},
            "asked for 2.41 GiB and was refused although 3.00 GiB of the 8.00 GiB of cuda:0 was free.",
        ),
        ({"family": Family.SHM}, "ran out of shared memory (/dev/shm)."),
        ({"family": Family.WORKER_KILLED, "format": "dl_killed"}, "lost a DataLoader worker, which was killed."),
        ({"family": Family.WORKER_KILLED, "format": "ray"}, "lost a worker process, which was killed."),
        ({"family": Family.WORKER_KILLED, "format": "pool_killed"}, "lost a worker process, which was killed."),
        ({"family": Family.RANK_KILLED, "format": "torchrun_killed"}, "lost a rank, which was killed."),
        ({"family": Family.RANK_KILLED, "format": "slurm"}, "failed when a process was killed."),
        ({"device": "cpu", "total": None}, "asked for 2.41 GiB of host memory and was refused."),
        ({"device": None, "total": None}, "asked for 2.41 GiB of the device and was refused."),
        ({"is_oom": False, "exc_type": "ValueError"}, "failed with ValueError, not for lack of memory."),
    ],
)
def test_the_headline_says_no_more_than_is_known(changes: dict[str, object], sentence: str) -> None:
    assert headline(cases.incident(**changes)) == f"`loss.backward()` (In[5], line 7) {sentence}"


def test_the_headline_says_what_was_kept_back_of_what_was_free() -> None:
    found = cases.evidence()
    host = replace(found.host, kept_back=GIB)
    asked = cases.incident(device="cpu", free=3 * GIB)
    assert headline(asked, replace(found, host=host, devices=(replace(found.device, name="cpu"),))).startswith(
        "`loss.backward()` (In[5], line 7) asked for 2.41 GiB, 420 MiB more than was free of the 8.00 GiB of host "
        "memory; 1.00 GiB was kept back for this diagnosis"
    )


def test_what_holds_the_host_is_told_of_arrays_as_well() -> None:
    found = cases.evidence()
    beside = (HostHolding(path="frames", bytes=4 * GIB, array_bytes=4 * GIB, arrays=71, objects=1),)
    on_host = replace(found, beside_tensors=beside, devices=(replace(found.device, name="cpu"),))
    case = replace(cases.offered(), incident=cases.incident(device="cpu"), evidence=on_host)
    first = blocks(tell(case), Table)[0].rows[0]
    assert list(map(str, first)) == ["4.00 GiB", "", "no tensor", "frames  71 NumPy arrays"]
    assert "no tensor  frames  71 NumPy arrays" in text.render(tell(case))


def test_what_is_free_of_host_memory_is_told_as_of_after_the_call() -> None:
    found = cases.evidence()
    host = replace(found.host, kept_back=GIB)
    asked = cases.incident(device="cpu", free=4 * GIB)
    assert headline(asked, replace(found, host=host, devices=(replace(found.device, name="cpu"),))).startswith(
        "`loss.backward()` (In[5], line 7) asked for 2.41 GiB and was refused; 3.00 GiB of the 8.00 GiB of "
        "host memory was free after the call had ended"
    )


def test_the_headline_without_a_cell_and_within_a_function() -> None:
    assert headline(cases.incident(cell=None, total=None, requested=None)) == "The program ran out of memory on cuda:0."
    inside = CellLine(number=None, line=2, source_line="y = f(x)", function="train")
    assert headline(cases.incident(cell=inside, requested=None)).startswith("`y = f(x)` (line 2, in `train`) ran")


def test_the_share_is_left_out_where_another_device_was_searched() -> None:
    found = cases.evidence(devices=(cases.device(name="cuda:1"),))
    assert "of what is held" not in headline(cases.incident(device="cuda:1"), found)


def test_a_simulated_device_is_called_so_everywhere() -> None:
    case = cases.simulated()
    story = tell(case)
    assert "cuda:0 (simulated)" in str(blocks(story, Line)[1].text)
    assert blocks(story, Bar)[0].title == "cuda:0 (simulated)"
    assert cards(case.evidence)[0].title == "cuda:0 (simulated)"


def test_the_bar_splits_the_request_at_the_budget() -> None:
    (bar,) = blocks(tell(cases.offered()), Bar)
    by_kind = {segment.kind: segment for segment in bar.segments}
    assert list(by_kind)[:4] == ["activation", "optimizer_state", "parameter", "gradient"]
    assert by_kind["over"].size == "2.10 GiB"
    assert by_kind["asked"].size == "317 MiB"
    assert by_kind["outside"].size == "461 MiB"
    assert "free" not in by_kind
    assert sum(segment.ratio for segment in bar.segments) == pytest.approx(1)
    before_budget = sum(segment.ratio for segment in bar.segments if segment.kind != "over")
    assert before_budget == pytest.approx(bar.budget_ratio)


def test_the_bar_of_a_request_that_would_fit_keeps_free_memory() -> None:
    bar = device_bar(cases.device(free=4 * GIB, allocated=3 * GIB, reserved=3 * GIB), None, asked=GIB)
    assert bar is not None
    assert [(segment.kind, segment.size) for segment in bar.segments] == [
        ("unexplained", "3.00 GiB"),
        ("outside", "1.00 GiB"),
        ("asked", "1.00 GiB"),
        ("free", "3.00 GiB"),
    ]
    assert bar.budget_ratio == 1


def test_the_bar_takes_the_total_from_the_message_where_the_device_cannot_say() -> None:
    blind = cases.device(total=Unavailable("no driver"), free=Unavailable("no driver"))
    without = device_bar(blind, cases.census())
    assert without is not None
    assert without.budget is None
    with_total = device_bar(blind, cases.census(), total=8 * GIB)
    assert with_total is not None
    assert with_total.budget == "8.00 GiB"


def test_there_is_no_bar_without_any_number() -> None:
    assert blocks(tell(cases.unavailable()), Bar) == []
    assert host_bar(cases.unavailable().evidence.host) is None


def test_a_census_that_saw_more_than_the_allocator_leaves_nothing_unexplained() -> None:
    bar = device_bar(cases.device(allocated=GIB), cases.census())
    assert bar is not None
    assert Role.UNEXPLAINED.value not in {segment.kind for segment in bar.segments}


def test_each_unavailable_value_is_named_once_with_its_reason() -> None:
    assert missing(cases.unavailable().evidence.device) == (
        "total, free, allocated, reserved not available: the driver does not answer",
    )


def test_estimates_are_marked_and_their_basis_is_named() -> None:
    micro_batch, checkpoint, autocast, shard = fix_rows(cases.PLAN)
    assert (micro_batch.peak, micro_batch.basis) == ("≈ 5.90 GiB of 8.00 GiB", "dry run, ± 3 %")
    assert (micro_batch.slowdown, micro_batch.verdict_text) == ("about 7 % slower", "✓ fits")
    assert (checkpoint.verdict, checkpoint.basis) == (Verdict.BORDERLINE, "dry run, ± 3 %")
    assert autocast.verdict is Verdict.TOO_LARGE
    assert autocast.basis == "analytic estimate, ± 20 %; ≈ 7.20 GiB in tensors"
    assert (shard.peak, shard.basis, shard.verdict) == ("no forecast", "", Verdict.UNKNOWN)


def test_what_a_trial_has_not_shown_yet_is_to_be_checked() -> None:
    unchanged = Plan(unchanged=cases.forecast(1 << 30))
    promised = fix_row(1, replace(cases.MICRO_BATCH, is_tried=True), unchanged).promise
    assert promised == "same results up to rounding, to be checked"
    told = replace(cases.MICRO_BATCH, is_tried=True, refuted="`model` differs")
    assert "checked" not in fix_row(1, told, unchanged).promise
    assert "checked" not in fix_row(1, replace(told, effect=Effect.CHANGES_RESULT, refuted=None), unchanged).promise


@pytest.mark.parametrize(
    ("unchanged", "forecast", "told", "counted"),
    [
        ((9.4, 9.6), (7.6, 8.1), "≈ 8.10 GiB of 8.00 GiB (dry run, ± 3 %; ≈ 7.60 GiB in tensors)", 8.1),
        (
            *((9.4, 9.6), (6.0, None)),
            *("≈ 6.00 GiB of 8.00 GiB (dry run, ± 3 %; tensors alone, the allocator may hold more)", 6.0),
        ),
        ((9.4, None), (7.8, 8.1), "≈ 8.10 GiB of 8.00 GiB (dry run, ± 3 %)", 8.1),
        ((None, None), (7.8, 8.1), "≈ 8.10 GiB of 8.00 GiB (dry run, ± 3 %)", 8.1),
    ],
)
def test_the_number_the_bar_and_the_verdict_are_of_one_quantity(
    unchanged: tuple[float | None, float | None], forecast: tuple[float, float | None], told: str, counted: float
) -> None:
    priced = cases.forecast(forecast[0], reserved=forecast[1])
    plan = Plan(unchanged=cases.forecast(unchanged[0], reserved=unchanged[1]))
    row = fix_row(1, replace(cases.MICRO_BATCH, forecast=priced), plan)
    assert f"{row.peak} ({row.basis})" == told
    assert row.gauge is not None
    assert row.gauge.peak_ratio / row.gauge.budget_ratio == pytest.approx(counted / 8)
    assert (row.verdict is Verdict.TOO_LARGE) == (counted > 8), "a number below the budget is not called too large"


def test_what_the_unchanged_cell_needs_is_what_its_verdict_goes_by() -> None:
    priced = prices(Plan(unchanged=cases.forecast(7.0, reserved=8.2)))
    assert priced.unchanged == (
        "As written, this cell needs ≈ 8.20 GiB of 8.00 GiB: ✗ too large (dry run, ± 3 %; ≈ 7.00 GiB in tensors)."
    )


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"model.encoder.layers[0].up.kept": 3, "model.encoder.layers[1].kept": 5}, " of `model.encoder.layers`"),
        ({"model.encoder.layers[0].kept": 7.9, "model.head.kept": 0.1}, " of `model.encoder.layers[0]`"),
        ({"model.encoder.kept": 4, "model.head.kept": 4}, " of `model`"),
        ({"model.encoder.kept": 4, "loss → graph": 4}, ""),
        ({"model.encoder.kept → graph": 8}, ""),
        ({"modelled.kept": 8}, ""),
    ],
)
def test_the_headline_names_the_module_that_has_nearly_all_where_paths_tell_it(
    held: dict[str, float], told: str
) -> None:
    holdings = tuple(
        Holding(bytes=int(size * GIB), device="cuda:0", role=Role.ACTIVATION, path=path) for path, size in held.items()
    )
    whole = sum(one.bytes for one in holdings)
    census = Census(device="cuda:0", found=whole, allocated=whole, roles=((Role.ACTIVATION, whole),), holdings=holdings)
    model = ModelFacts(path="model", type_name="Net", training=True, parameter_bytes=GIB)
    evidence = cases.evidence(censuses=(census,), code=CodeFacts(models=(model,)))
    assert headline(cases.incident(), evidence).endswith(f"; 100 % of what is held is activations{told}.")


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"model.encoder.layers[0].up": 3, "model.encoder.layers[1]": 5}, " of `model.encoder.layers`"),
        ({"model.encoder.layers[0].up": 7.9, "model.head": 0.1}, " of `model.encoder.layers[0].up`"),
        ({"model.encoder": 1, "model.encoder.layers[1].up": 7}, " of `model.encoder`"),
        ({"model.encoder": 4, "model.head": 4}, " of `model`"),
        ({"model": 8}, " of `model`"),
        ({"model.encoder": 7}, ""),  # of the rest no module is known
        ({"model.encoder": 4, "critic": 4}, ""),
        ({"modelled.encoder": 8}, ""),
        ({"model._modules['a[0].b'].up": 8}, " of `model._modules['a[0].b'].up`"),
        ({"model.encoder → _modules.up": 8}, " of `model.encoder`"),
        ({"model.blocks._modules['a-1'][0]": 4, "model.blocks._modules['a-2'][0]": 4}, " of `model.blocks`"),
        ({"model._modules['a → b'][0]": 8}, " of `model._modules['a → b'][0]`"),
        ({"step → net[6]": 4, "step → net[2]": 4}, " of `step → net`"),
    ],
)
@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE])
def test_the_headline_names_the_module_that_graphs_saved_nearly_all_in(
    role: Role, saved: dict[str, float], told: str
) -> None:
    parts = tuple((module, int(size * GIB)) for module, size in saved.items())
    holdings = (
        Holding(bytes=6 * GIB, device="cuda:0", role=role, path="loss → graph", saved_in=parts[:1]),
        Holding(bytes=2 * GIB, device="cuda:0", role=role, path="local `h` of forward at In[5]", saved_in=parts[1:]),
    )
    census = Census(device="cuda:0", found=8 * GIB, allocated=8 * GIB, roles=((role, 8 * GIB),), holdings=holdings)
    models = tuple(
        ModelFacts(path=path, type_name="Net", training=True, parameter_bytes=1)
        for path in ("model", "cri", "step → net")
    )
    evidence = cases.evidence(censuses=(census,), code=CodeFacts(models=models))
    what = {Role.ACTIVATION: "activations", Role.GRAPH_KEPT_ALIVE: "graphs kept alive"}[role]
    assert headline(cases.incident(), evidence).endswith(f"; 100 % of what is held is {what}{told}.")


def test_what_a_graph_saved_counts_beside_what_hangs_on_the_model_itself() -> None:
    model = ModelFacts(path="model", type_name="Net", training=True, parameter_bytes=GIB)
    kept = Holding(bytes=GIB, device="cuda:0", role=Role.ACTIVATION, path="model.encoder.kept")
    graph = replace(kept, path="loss → graph", saved_in=(("model.encoder.up", GIB),))
    both = replace(kept, saved_in=(("model.head", GIB),))
    of_both = "model.encoder"
    for held, module in (((kept, graph), of_both), ((both, graph), of_both), ((graph,), "model.encoder.up")):
        size = sum(one.bytes for one in held)
        census = Census(device="cuda:0", found=size, allocated=size, roles=((Role.ACTIVATION, size),), holdings=held)
        assert within(census, Role.ACTIVATION, (model,)) == module


def test_parameters_and_their_gradients_are_of_the_same_module() -> None:
    model = ModelFacts(path="model", type_name="Net", training=True, parameter_bytes=GIB)
    for role, ending in ((Role.PARAMETER, ""), (Role.GRADIENT, ".grad")):
        only = Holding(bytes=GIB, device="cuda:0", role=role, path=f"model.table.weight{ending}")
        census = Census(device="cuda:0", found=GIB, allocated=GIB, roles=((role, GIB),), holdings=(only,))
        assert within(census, role, (model,)) == "model.table"


def test_the_basis_of_a_forecast_is_told_to_its_end() -> None:
    of_each = (
        "analytic estimate: the two moments that AdamW keeps take 1.23 GiB, and those of the lighter one next to none"
    )
    row = fix_row(
        1,
        replace(cases.MICRO_BATCH, forecast=cases.forecast(5.0, basis=f"{of_each}; {of_each}")),
        Plan(unchanged=cases.forecast(9.0)),
    )
    assert row.basis == f"{of_each}; {of_each}, ± 3 %"


def test_a_cell_that_fits_needs_no_change() -> None:
    priced = prices(Plan(unchanged=cases.forecast(5.0, reserved=5.1)))
    assert priced.unchanged == "As written, this cell needs ≈ 5.10 GiB of 8.00 GiB: ✓ fits (dry run, ± 3 %)."
    assert priced.unfixed == "No change is needed."
    assert prices(Plan(unchanged=cases.forecast(9.0))).unfixed == "No fix applies here."


@pytest.mark.parametrize("peak", [0.0, 5.0])
def test_a_failure_without_a_size_is_not_said_to_fit(peak: float) -> None:
    plan = Plan(unchanged=cases.forecast(peak, reserved=peak))
    priced = prices(plan, cases.incident(requested=None))
    told = "As written, this cell needs more than 8.00 GiB."
    assert priced.unchanged == told
    assert priced.unfixed == "No fix applies here."
    story = tell(replace(cases.offered(), incident=cases.incident(requested=None), plan=plan))
    assert told in [line.text for line in blocks(story, Line)]
    refused = replace(plan.unchanged, peak=0, refused="the cell failed.")
    assert prices(Plan(unchanged=refused), cases.incident(requested=None)).unchanged.endswith(
        "more than 8.00 GiB. No forecast: the cell failed."
    )


def test_only_what_can_be_applied_or_shown_has_a_command() -> None:
    commands = [(row.apply, row.diff) for row in fix_rows(cases.PLAN)]
    assert commands == [
        ("%oomdoctor fix 1", "%oomdoctor diff 1"),
        ("%oomdoctor fix 2", None),
        ("%oomdoctor fix 3", "%oomdoctor diff 3"),
        (None, None),
    ]


def test_the_holdings_are_the_largest_and_the_rest_is_summed() -> None:
    found = cases.offered().evidence
    held = holders(found.census, found.code.models, top=5)
    assert [row.path for row in held.rows][:2] == ["loss.grad_fn (encoder.layers)", "optimizer.state"]
    assert held.more == "and 2 smaller holders, 246 MiB in all"
    assert held.rows[0].share == "58 %"
    assert held.accounted == ("Accounted for 99.6 % of allocated (7.02 GiB of 7.05 GiB); no holder found for 30.7 MiB.")


def test_a_healed_case_shows_forecast_and_measurement_side_by_side() -> None:
    facts = dict(aftermath(cases.healed()).facts)
    assert facts["Peak"] == (
        "measured 5.83 GiB of 8.00 GiB (5.55 GiB in tensors); "
        "forecast ≈ 5.90 GiB (dry run, ± 3 %); forecast 1.2 % too high"
    )
    assert facts["Time"] == (
        "the cell ran in 8.1 s; forecast: about 7 % slower; checks and failed attempts took 4.2 s more"
    )
    assert facts["Keep it"].startswith("`%oomdoctor diff 1`")
    assert facts["State"].startswith("clean")


def test_what_was_measured_stands_in_the_place_of_the_forecast() -> None:
    (row,) = [row for row in fix_rows(cases.healed().plan) if row.number == 1]
    assert (row.verdict_text, row.peak, row.basis) == ("✓ measured", "5.83 GiB of 8.00 GiB", "5.55 GiB in tensors")
    took = replace(cases.MICRO_BATCH, measured=MeasuredPeak(tensors=5 * GIB, measure="resident set"))
    told = fix_row(1, took, cases.PLAN)
    assert (told.peak, told.basis) == ("5.00 GiB", "resident set"), "no allocator counts, so no limit is compared with"
    assert offered(took).endswith("measured peak 5.00 GiB.")


def test_a_change_that_was_not_asked_for_is_told_with_its_reason() -> None:
    case = cases.healed()
    more = replace(
        cases.MICRO_BATCH,
        fix="micro_batch + checkpoint_blocks",
        dose=Dose((*cases.MICRO_BATCH.dose.values, *cases.CHECKPOINT.dose.values)),
        parts=((cases.MICRO_BATCH.fix, cases.MICRO_BATCH.dose), (cases.CHECKPOINT.fix, cases.CHECKPOINT.dose)),
        follows=cases.MICRO_BATCH.label,
    )
    stronger = replace(cases.MICRO_BATCH, dose=Dose.of(parts=64), follows=cases.MICRO_BATCH.label)
    for made, changes, ending in ((more, "2 changes", "was added"), (stronger, "1 change", "was taken")):
        outcome = replace(case.outcome, fixes=(made.label,))
        end = aftermath(replace(case, plan=with_made(cases.PLAN, made, outcome), outcome=outcome))
        assert f"with {changes} in place" in end.title
        told = dict(end.facts)[FOLLOWED]
        assert told.startswith(f"`{cases.MICRO_BATCH.label}` alone ran out of memory too, so `")
        assert told.endswith(ending)


def test_what_a_retry_makes_anew_of_an_earlier_cell_is_told_before_and_after() -> None:
    edit = Edit(cell=3, before="loader = old", after="loader = new", replay="loader = new", anew=("loader", "steps"))
    one = replace(cases.MICRO_BATCH, patch=Patch(edits=(edit,)))
    told = "a retry makes `loader`, `steps` of In[3] anew and runs nothing else of that cell"
    assert told in fix_row(1, one, cases.PLAN).notes
    case = cases.healed()
    end = aftermath(replace(case, plan=with_made(cases.PLAN, one, case.outcome)))
    assert ("Mind", told) in end.facts


def test_a_need_far_over_the_limit_is_told_in_words() -> None:
    far = replace(cases.MICRO_BATCH, forecast=cases.forecast(70))
    assert fix_row(1, far, cases.PLAN).peak == "≈ 70.0 GiB, far over the 8.00 GiB for tensors"
    assert fix_row(1, replace(far, forecast=cases.forecast(9)), cases.PLAN).peak == "≈ 9.00 GiB of 8.00 GiB"
    row = fix_row(1, replace(far, forecast=cases.forecast(9, reserved=30)), cases.PLAN)
    assert row.peak == "≈ 9.00 GiB in tensors of 8.00 GiB", "a cache is given back where memory is short"
    assert row.basis.endswith("; with no limit the allocator would hold ≈ 30.0 GiB")


def test_a_range_that_says_nothing_is_told_as_what_is_needed_at_least() -> None:
    rough = replace(cases.MICRO_BATCH, forecast=cases.forecast(2, estimated=FROM_FAILURE))
    row = fix_row(1, rough, cases.PLAN)
    assert row.peak == "more than 2.00 GiB of 8.00 GiB"
    assert "; a rough estimate: the real peak may be far higher" in row.basis
    row = fix_row(1, replace(rough, forecast=cases.forecast(2, estimated=FROM_PEAK)), cases.PLAN)
    assert row.peak == "≈ 2.00 GiB of 8.00 GiB"
    assert "a rough estimate: 9 in 10 such peaks lie between 819 MiB and 4.80 GiB" in row.basis


def test_a_forecast_that_was_too_low_is_called_so() -> None:
    case = cases.healed()
    twice = 2 * (cases.MICRO_BATCH.forecast.peak or 0)
    low = replace(case, outcome=replace(case.outcome, peak=twice, peak_reserved=None))
    assert "forecast 50.0 % too low" in dict(aftermath(low).facts)["Peak"]
    met = replace(case, outcome=replace(case.outcome, peak_reserved=cases.MICRO_BATCH.forecast.reserved))
    assert "forecast met" in dict(aftermath(met).facts)["Peak"]


def test_a_fix_that_is_not_in_the_plan_is_named_all_the_same() -> None:
    assert dict(aftermath(cases.failed()).facts)["Tried"] == "`unheard_of(dose=2)`"


def test_an_estimate_in_place_of_a_refused_forecast_says_both() -> None:
    least = cases.forecast(9.5, basis="held and asked for", error_ratio=0.3, refused="the cell opens a file.")
    assert prices(Plan(unchanged=least)).unchanged == (
        "As written, this cell needs ≈ 9.50 GiB of 8.00 GiB: ✗ too large (held and asked for, ± 30 %). "
        "Rough estimate: the cell opens a file."
    )
    own = replace(least, refused="the changed cell opens two files.")
    (row,) = fix_rows(Plan(unchanged=least, candidates=(replace(cases.MICRO_BATCH, caveat=None, forecast=own),)))
    assert row.notes == ("Rough estimate: the changed cell opens two files.",)


def test_what_was_not_priced_yet_is_not_called_impossible() -> None:
    priced = prices(Plan(unchanged=Forecast(basis="not priced yet")))
    assert priced.unchanged == "As written, this cell has no forecast: not priced yet."
    assert priced.unfixed is None


@pytest.mark.parametrize("kind", OutcomeKind)
def test_every_ending_has_a_notice(kind: OutcomeKind) -> None:
    end = aftermath(cases.offered(outcome=Outcome(kind=kind, why="because of the log")))
    assert "In[5]" in end.title
    assert ("Why", "because of the log") in end.facts
    assert (end.mark == "✓") is (kind is OutcomeKind.HEALED)


def test_a_change_that_would_be_refused_for_the_same_reason_is_not_offered() -> None:
    facts = dict(aftermath(cases.refused()).facts)
    assert "Offered" not in facts
    assert facts["Anyway"].startswith("`%oomdoctor fix 1 --anyway` (Run each batch in micro-batches")


def test_going_on_anyway_is_advised_only_where_it_would_go_on() -> None:
    case = cases.refused()
    alone = replace(case, outcome=replace(case.outcome, why="this process is one of 2 ranks", anyway=False))
    assert not {"Offered", "Anyway"} & dict(aftermath(alone).facts).keys()


def test_the_diagnosis_says_why_a_cell_was_not_retried() -> None:
    """What a button puts out is not in the notebook's file."""
    case = cases.refused()
    assert f"Why: {case.outcome.why}." in next_steps(case, Retry.of(case.plan))


def test_a_fix_that_has_no_diff_says_so_where_it_healed() -> None:
    case = cases.healed()
    bare = tuple(replace(one, patch=Refused("no loop <was> found")) for one in case.plan.candidates)
    facts = dict(aftermath(replace(case, plan=replace(case.plan, candidates=bare))).facts)
    assert facts["Keep it"] == "there is no diff: no loop <was> found"


def test_a_reason_that_is_said_of_the_cell_is_not_said_of_each_fix() -> None:
    why = "the cell would write to log.txt"
    plan = Plan(unchanged=cases.forecast(None, refused=why))
    same, other = (
        fix_row(1, replace(cases.MICRO_BATCH, forecast=cases.forecast(None, refused=reason)), plan).notes
        for reason in (why, "the exact forecast timed out after 10 s")
    )
    assert not any(why in note for note in same)
    assert "No forecast: the exact forecast timed out after 10 s" in other


def test_a_limit_of_this_process_is_not_told_as_the_machines_memory() -> None:
    uncounted = Unavailable("the host's allocator keeps no count of tensors")
    sizes = {"total": 700, "free": 100, "allocated": uncounted, "reserved": uncounted}
    limited = cases.device(name="cpu", basis="RLIMIT_DATA", **sizes)
    bar = device_bar(limited, None, asked=150)
    assert bar is not None
    assert (bar.title, bar.segments[0].label) == ("host memory (RLIMIT_DATA)", "this process")
    asked = cases.incident(device="cpu", requested=150, total=None, free=None)
    told = headline(asked, cases.evidence(devices=(limited,)))
    assert "50 B more than was free of the 700 B of host memory (RLIMIT_DATA)" in told
    whole = device_bar(replace(limited, basis="the machine's memory"), None)
    assert whole is not None
    assert (whole.title, whole.segments[0].label) == ("host memory", "in use otherwise")


def test_what_was_tried_is_not_offered_again() -> None:
    end = aftermath(cases.offered(outcome=Outcome(kind=OutcomeKind.ROLLED_BACK, fixes=(cases.MICRO_BATCH.label,))))
    assert dict(end.facts)["Offered"].startswith("`%oomdoctor fix 2`")


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_told(name: str) -> None:
    story = tell(CASES[name]())
    assert str(blocks(story, Line)[1].text).endswith(".")


def test_clean_spells_out_what_could_drive_a_terminal_and_cuts_in_the_middle() -> None:
    assert clean("a\x1b[2Jb\u202ec\nd") == "a\\x1b[2Jb\\u202ec\\nd"
    assert clean("\ud800") == "\\ud800"
    assert clean("x" * 50 + "END", 20) == "x" * 12 + "…" + "xxxxEND"
    assert len(clean("x" * 50, 20)) == 20


def _priced(*candidates: Candidate) -> Case:
    return cases.offered(plan=replace(cases.PLAN, candidates=candidates))


LARGE = cases.forecast(8.9, reserved=9.1)
NOT_SURE = replace(cases.CHECKPOINT, forecast=cases.forecast(7.9))


@pytest.mark.parametrize(
    ("case", "retry", "sentence"),
    [
        (
            _priced(cases.MICRO_BATCH),
            None,
            "`%oomdoctor retry` runs the cell again with the best fix that fits; state is restored first.",
        ),
        (
            _priced(cases.AUTOCAST, NOT_SURE),
            None,
            (
                "`%oomdoctor retry` tries fix 2 first, though no change that keeps the result is certain to fit; "
                "state is restored first."
            ),
        ),
        (
            _priced(replace(cases.AUTOCAST, forecast=cases.forecast(5))),
            None,
            (
                "The fixes that apply change results, so none runs unasked. "
                "`%oomdoctor fix 1` changes results and runs only when you ask for it: "
                "Compute in bfloat16 under autocast (dtype=bfloat16): changes results, about 7 % slower, "
                "peak ≈ 5.00 GiB of 8.00 GiB."
            ),
        ),
        (
            _priced(replace(cases.MICRO_BATCH, forecast=LARGE)),
            None,
            (
                "`%oomdoctor retry` runs nothing. No fix that keeps the results is forecast to fit. "
                "`%oomdoctor fix 1` tries one all the same; state is restored first."
            ),
        ),
        (
            _priced(cases.MICRO_BATCH),
            Retry(why="other processes hold the device"),
            "`%oomdoctor retry` runs nothing: other processes hold the device.",
        ),
        (
            _priced(cases.MICRO_BATCH),
            Retry(),
            (
                "`%oomdoctor retry` runs nothing unasked: `%oomdoctor fix 1` applies the fix that fits; "
                "state is restored first."
            ),
        ),
        (
            cases.pending(),
            None,
            "`%oomdoctor retry` waits for the forecasts, then runs the cell again with the best fix that fits.",
        ),
    ],
)
def test_what_to_type_next_is_what_would_be_done(case: Case, retry: Retry | None, sentence: str) -> None:
    assert " ".join(next_steps(case, retry or Retry.of(case.plan))) == sentence


TOO_LARGE = replace(cases.MICRO_BATCH, forecast=LARGE)
CHANGING = replace(cases.MICRO_BATCH, effect=Effect.CHANGES_RESULT)
REFUTED = replace(cases.MICRO_BATCH, refuted="`model` differs")


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(unchanged=Forecast(basis="nothing was priced")), "No fix was looked for: nothing was priced."),
        (
            Plan(unchanged=cases.forecast(9), refusals=(("a", "no loop"), ("b", "no model"))),
            "No fix applies to this cell: 2 fixes were refused.",
        ),
        (Plan(unchanged=cases.forecast(9), candidates=(REFUTED,)), "No fix applies to this cell."),
        (
            Plan(unchanged=cases.forecast(9), candidates=(CHANGING,)),
            "The fixes that apply change results, so none runs unasked.",
        ),
        (
            Plan(unchanged=cases.forecast(9), candidates=(TOO_LARGE, CHANGING)),
            "No fix that keeps the results is forecast to fit.",
        ),
        (
            Plan(unchanged=cases.forecast(9), candidates=(TOO_LARGE, replace(NOT_SURE, breaks=True))),
            "The fixes that keep the results failed in their dry run.",
        ),
        (
            Plan(unchanged=cases.forecast(9), candidates=(NOT_SURE,)),
            "No fix that keeps the results is certain enough to run unasked.",
        ),
    ],
)
def test_why_nothing_would_be_tried_is_the_true_reason(plan: Plan, told: str) -> None:
    assert why_nothing(plan) == told


def test_the_headline_tells_the_cause_that_comes_first_and_no_other() -> None:
    case = cases.offered()
    other = replace(case.findings[0], title="Optimizer state fills the memory")
    for findings in (case.findings, (other, *case.findings)):
        told = replace(case, findings=findings)
        for document in (answer(told), tell(told)):
            lead = next(str(line.text) for line in blocks(document, Line) if line.look == "lead")
            assert lead.endswith(f" Likely cause: {findings[0].title}.")
            assert "activations" not in lead.removesuffix(f"{findings[0].title}.")
    assert "Largest part: activations (71 %)" in str(blocks(answer(replace(case, findings=())), Line)[0].text)


def test_a_healed_cell_that_passed_its_limit_says_so() -> None:
    case = cases.healed()
    assert aftermath(case).title.startswith("Healed: ")
    tight = replace(case.plan, unchanged=replace(case.plan.unchanged, budget=4 * GIB))
    end = aftermath(replace(case, plan=tight))
    assert end.mark == "!"
    assert end.title.startswith("Healed, but over the limit (5.55 GiB of 4.00 GiB): In[5]")


@pytest.mark.parametrize(
    ("effect", "ratio", "told"),
    [
        (Effect.EQUIVALENT, 1.31, "about 31 % slower"),
        (Effect.EQUIVALENT, 2.5, "about 2.5 times as long"),
        (Effect.EXACT, 1.04, "about as fast"),
        (Effect.EXACT, 0.19, "about as fast"),
        (Effect.CHANGES_RESULT, 0.19, ""),
        (Effect.EXACT, None, ""),
    ],
)
def test_operations_that_were_counted_make_nothing_faster(effect: Effect, ratio: float | None, told: str) -> None:
    """A change that does less work than was asked for is no faster, and a counted saving is no measured one."""
    one = replace(cases.MICRO_BATCH, effect=effect, forecast=cases.forecast(5, slowdown=ratio))
    assert pace(one) == told
    assert "faster" not in offered(one)


def test_a_change_that_lowers_nothing_is_not_offered() -> None:
    worse = replace(cases.CHECKPOINT, forecast=cases.forecast(9.5, reserved=9.7))
    better = replace(cases.MICRO_BATCH, forecast=cases.forecast(8.9, reserved=9.1))
    plan = Plan(unchanged=cases.forecast(9.41, reserved=9.6), candidates=(worse, better))
    first, second = fix_rows(plan)
    assert (first.apply, second.apply) == (None, "%oomdoctor fix 2")
    assert any("does not lower the peak" in note for note in first.notes)
    assert not any("does not lower the peak" in note for note in second.notes)


def test_all_rows_have_one_scale() -> None:
    limits = {row.gauge.budget_ratio for row in fix_rows(cases.PLAN) if row.gauge is not None}
    assert len(limits) == 1


def test_each_cause_names_its_rule_and_links_to_its_page() -> None:
    case = cases.offered()
    (shown,) = blocks(tell(case), Causes)
    assert [(one.rule, one.page) for one in shown.rows] == [(one.rule, "") for one in case.findings]
    linked = tuple(replace(one, page=f"https://example.org/rules/{one.rule}/") for one in case.findings)
    (shown,) = blocks(tell(replace(case, findings=linked)), Causes)
    assert shown.rows[0].page == linked[0].page
    unsafe = tuple(replace(one, page="javascript:alert(1)") for one in case.findings)
    (shown,) = blocks(tell(replace(case, findings=unsafe)), Causes)
    assert shown.rows[0].page == ""


def test_there_is_nothing_to_type_where_nothing_can_be_applied() -> None:
    assert next_steps(_priced(cases.SMALLER_MODEL), Retry()) == ()


def test_the_timeline_is_held_against_the_budget() -> None:
    (timeline,) = blocks(tell(cases.nothing_fits()), Timeline)
    assert timeline.sentence.startswith(
        "Memory ran out at line 7. With enough of it, the cell goes from 1.50 GiB at line 6 to"
    )
    columns = timeline.columns(20)
    over = [column for column in columns if column.kind == "over"]
    assert 0 < len(over) < len(columns)
    assert all(column.ratio > 8 / 9.41 for column in over)
    assert blocks(tell(cases.offered()), Timeline) == []
