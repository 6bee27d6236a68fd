from __future__ import annotations

from dataclasses import replace

import pytest
from observed import site
from scenes import CUDA, LOOP, SCENES, TRAINING, evidence, held, of, training

from oomdoctor import fixes
from oomdoctor.incident import from_text
from oomdoctor.model.case import Cause
from oomdoctor.model.code import CodeFacts, ModelFacts, OptimizerFacts
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.sizes import GIB, MIB, parse_size
from oomdoctor.rulebook import load, locate
from oomdoctor.rulebook.context import kind_of
from oomdoctor.rulebook.facts import complete
from oomdoctor.rulebook.loading import files_in

BOOK = load([locate()], known_fixes=fixes.ids())


def test_no_shipped_rule_has_a_fault():
    assert BOOK.faults == ()


@pytest.mark.parametrize("path", sorted(files_in([locate()], [])), ids=lambda path: path.stem)
def test_the_examples_of_each_rule_hold(path):
    """Loading matches each example of the file against its rule and refuses the file where one does not hold."""
    others = {one.stem for one in files_in([locate()], [])} - {path.stem}
    (rule,) = load([path], known_fixes=fixes.ids(), known_rules=others).rules
    assert rule.file.id == path.stem


def test_activations_that_fill_the_device_are_named_with_the_users_numbers():
    holding = Holding(bytes=4 * GIB, device="cuda:0", role=Role.ACTIVATION, path="loss → graph")
    found = BOOK.match(CUDA, evidence(roles=((Role.ACTIVATION, 4 * GIB), (Role.PARAMETER, GIB)), holdings=(holding,)))
    assert found[0].rule == "activations_dominate"
    assert found[0].cause is Cause.BATCH_OR_ACTIVATION
    assert "4.00 GiB of 5.00 GiB found on cuda:0 are activations." in found[0].because
    assert "The largest group of them is held by loss → graph." in found[0].because


def test_a_leak_comes_before_what_it_makes_large():
    roles = ((Role.ACTIVATION, 4 * GIB), (Role.GRAPH_KEPT_ALIVE, 2 * GIB))
    code = CodeFacts(sites={"detach_history": (site("In[3] line 7: losses.append(loss)"),)})
    found = BOOK.match(CUDA, evidence(roles=roles, code=code))
    assert [finding.rule for finding in found[:2]] == ["graph_kept_alive", "activations_dominate"]
    assert found[0].fixes[0] == "detach_history"
    assert "In[3] line 7: losses.append(loss) keeps a tensor with its graph." in found[0].because


def test_evaluation_with_gradients_takes_the_place_of_activations():
    model = ModelFacts(path="net", type_name="Net", training=False, parameter_bytes=MIB)
    roles = ((Role.ACTIVATION, 5 * GIB),)
    found = BOOK.match(CUDA, evidence(roles=roles, code=CodeFacts(models=(model,))))
    assert found[0].rule == "evaluation_with_gradients"
    assert "activations_dominate" not in {finding.rule for finding in found}
    found = BOOK.match(CUDA, evidence(roles=roles, code=CodeFacts(models=(model,), grad_disabled=True)))
    assert "evaluation_with_gradients" not in {finding.rule for finding in found}


def test_a_collector_that_could_not_read_keeps_its_rules_silent():
    host = Incident(is_oom=True, family=Family.HOST, device="cpu", requested=MIB)
    roles = ((Role.ACTIVATION, 4 * GIB),)
    limited = {"process_limit": 2 * GIB, "process_used": 2 * GIB - MIB}
    rules = {finding.rule for finding in BOOK.match(host, evidence(roles=roles, host=limited))}
    assert "limit_reached_by_activations" in rules
    rules = {finding.rule for finding in BOOK.match(host, evidence(roles=roles))}
    assert "limit_reached_by_activations" not in rules


# The hint about fragmentation and expandable segments is printed always; only the numbers may decide.
@pytest.mark.parametrize(("unallocated", "fires"), [("10.00 MiB", False), ("2.00 GiB", True)])
def test_fragmentation_is_measured_and_not_read_from_the_hint(unallocated, fires):
    (incident,) = from_text(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 100.00 MiB is "
        f"free. Of the allocated memory 5.50 GiB is allocated by PyTorch, and {unallocated} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    assert ("fragmentation" in {finding.rule for finding in BOOK.match(incident, None)}) == fires


def test_memory_that_this_process_holds_outside_of_pytorch_is_not_blamed_on_others():
    def text(process):
        return (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which "
            f"8.00 MiB is free. Including non-PyTorch memory, this process has {process} memory in use. Of the "
            "allocated memory 9.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
        )

    def rules(process):
        return [finding.rule for finding in BOOK.match(from_text(text(process))[0], None)]

    assert rules("9.50 GiB")[0] == "other_process"
    assert "other_process" not in rules("23.90 GiB")


def test_what_is_no_lack_of_memory_gets_no_finding():
    assert BOOK.match(Incident(is_oom=False, family=Family.NOT_OOM, requested=2, free=1), None) == ()


def test_findings_come_most_likely_first():
    roles = ((Role.OUTPUT_CACHE, GIB), (Role.TRACEBACK, GIB), (Role.ACTIVATION, 4 * GIB))
    found = BOOK.match(CUDA, evidence(roles=roles))
    confidences = [finding.confidence for finding in found]
    assert confidences == sorted(confidences, reverse=True)
    assert len(confidences) >= 3


FROM_TEXT_ALONE = {
    "pool_fills_device",
    "request_larger_than_free",
    "many_small_requests",
    "large_card_filled_in_pieces",
    "driver_refused",
    "refused_while_free",
    "model_before_handle",
    "message_without_sizes",
    "engine_buffer_refused",
    "numbers_contradict",
}
LEAST_SURE = 0.35


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.first)
def test_what_was_found_names_the_rule_that_fits_it_best(scene):
    found = BOOK.match(scene.incident, of(scene))
    assert (found[0].rule, found[0].cause) == (scene.first, scene.cause), [finding.rule for finding in found]
    assert found[0].because
    assert not {finding.rule for finding in found} & {*scene.silent, *FROM_TEXT_ALONE}


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.first)
def test_a_finding_that_rests_on_little_never_stands_beside_one_that_rests_on_much(scene):
    """What is generic is silent or far below, and advice comes last and does not crowd the rest."""
    found = BOOK.match(scene.incident, of(scene))
    assert sum(finding.title.startswith("Advice:") for finding in found) <= 3
    generic = [finding.confidence for finding in found if finding.rule in ("several_roles_share", "holder_not_found")]
    assert all(confidence <= LEAST_SURE for confidence in generic)
    assert len(found) <= 7, [finding.rule for finding in found]


def message(tried, *, total="8.00 GiB", free="1.00 MiB", allocated="7.00 GiB", unallocated="10.00 MiB"):
    (incident,) = from_text(
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of which {free} is "
        f"free. Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by PyTorch "
        "but unallocated."
    )
    return incident


def rules_of(incident, found=None):
    return [finding.rule for finding in BOOK.match(incident, found)]


# The message prints the segment that the pool wanted: 2 MiB is the small pool's, which never uses blocks of the large.
@pytest.mark.parametrize(("tried", "fires"), [("2.00 MiB", False), ("20.00 MiB", True), ("1.00 GiB", True)])
def test_a_request_of_the_small_pool_proves_no_fragmentation(tried, fires):
    incident = message(tried, allocated="4.50 GiB", unallocated="3.00 GiB")
    assert ("fragmentation" in rules_of(incident)) == fires
    measured = evidence(roles=((Role.PARAMETER, 5 * GIB),), device={"inactive_split": 3 * GIB})
    assert ("fragmentation" in rules_of(incident, measured)) == fires


@pytest.mark.parametrize(("largest", "fires"), [(32 * MIB, True), (512 * MIB, False)])
def test_a_free_block_that_would_have_served_speaks_against_fragmentation(largest, fires):
    measured = evidence(device={"inactive_split": 900 * MIB, "largest_free_block": largest})
    assert ("fragmentation" in rules_of(CUDA, measured)) == fires


def test_from_the_text_alone_a_full_device_has_two_readings():
    found = BOOK.match(message("20.00 MiB", allocated="7.90 GiB"), None)
    assert [finding.cause for finding in found[:2]] == [Cause.BATCH_OR_ACTIVATION, Cause.MODEL_TOO_LARGE]
    assert found[0].confidence < 0.5
    large = BOOK.match(message("48.00 MiB", total="79.00 GiB", allocated="78.00 GiB"), None)
    assert [finding.cause for finding in large[:2]] == [Cause.MODEL_TOO_LARGE, Cause.BATCH_OR_ACTIVATION]


def test_a_bare_error_of_the_driver_is_guessed_at_with_little_confidence():
    (incident,) = from_text("RuntimeError: CUDA error: out of memory")
    found = BOOK.match(incident, None)
    assert {finding.cause for finding in found[:2]} == {Cause.BATCH_OR_ACTIVATION, Cause.HOST_RAM}
    assert all(finding.confidence <= LEAST_SURE for finding in found)


def test_rules_that_know_nothing_say_nothing():
    """Null is not below null: an expression over two facts that are not known must not hold."""
    assert [rule.id for rule in BOOK.rules if rule.fires(complete({}))] == []
    for family in (Family.CUDA, Family.HIP, Family.XPU):
        assert rules_of(Incident(is_oom=True, family=family)) == []


def test_what_the_census_did_not_see_is_said_and_not_guessed():
    found = BOOK.match(CUDA, evidence(roles=((Role.PARAMETER, GIB),), device={"allocated": 7 * GIB}))
    assert [finding.rule for finding in found] == ["holder_not_found"]
    assert found[0].cause is Cause.UNKNOWN


def test_autocast_is_not_sold_for_what_it_does_not_save():
    roles = ((Role.ACTIVATION, 5 * GIB), (Role.PARAMETER, GIB))
    weights = (held(Role.PARAMETER, GIB, "model"),)
    found = {
        finding.rule: finding for finding in BOOK.match(CUDA, evidence(roles=roles, holdings=weights, code=TRAINING))
    }
    assert "It would leave 1.00 GiB of parameters" in " ".join(found["mixed_precision_not_used"].because)
    state = ((Role.PARAMETER, 2 * GIB), (Role.GRADIENT, 2 * GIB), (Role.OPTIMIZER_STATE, GIB), (Role.ACTIVATION, GIB))
    rules = rules_of(CUDA, evidence(roles=state, holdings=weights, code=training(autocast=True)))
    assert "master_weights_stay" in rules
    assert "mixed_precision_not_used" not in rules


def test_accumulation_is_not_sold_for_what_it_does_not_divide():
    accumulating = training(loops=(replace(LOOP, accumulates=True),))
    state = ((Role.PARAMETER, 2 * GIB), (Role.GRADIENT, 2 * GIB), (Role.OPTIMIZER_STATE, GIB), (Role.ACTIVATION, GIB))
    assert "accumulation_cannot_help" in rules_of(CUDA, evidence(roles=state, code=accumulating))
    assert "accumulation_cannot_help" not in rules_of(CUDA, evidence(roles=state, code=TRAINING))


def test_a_larger_card_is_named_where_no_smaller_batch_would_do():
    state = ((Role.PARAMETER, 3 * GIB), (Role.OPTIMIZER_STATE, 4 * GIB))
    asked = replace(CUDA, requested=2 * GIB, allocated=7 * GIB)
    found = {f.rule: f for f in BOOK.match(asked, evidence(roles=state, device={"allocated": 7 * GIB}))}
    assert "a card such as T4 16 GB." in found["larger_card"].because[0]
    batch = ((Role.PARAMETER, GIB), (Role.ACTIVATION, 6 * GIB))
    assert "larger_card" not in rules_of(asked, evidence(roles=batch, device={"allocated": 7 * GIB}))


@pytest.mark.parametrize("rule", [rule for rule in BOOK.rules if "advice" in rule.path], ids=lambda rule: rule.id)
def test_advice_calls_itself_so_names_no_fix_and_stays_below_every_diagnosis(rule):
    assert rule.title.startswith("Advice: ")
    assert rule.file.fixes == []
    assert rule.file.confidence < 0.3
    assert any(letter.isdigit() for letter in rule.file.why) or any(":size}" in text for text in rule.file.because)


def test_the_rule_base_is_as_wide_as_it_says():
    assert len(BOOK.rules) >= 50
    assert {rule.file.cause for rule in BOOK.rules} == set(Cause)
    assert all(rule.file.references for rule in BOOK.rules)


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.id)
def test_a_rule_that_fires_on_the_message_alone_has_something_to_say(rule):
    for example in rule.file.examples.fires:
        if set(example) == {"incident"}:
            facts = complete(read(example))
            assert rule.finding(facts).because, example


def read(example):
    return {
        group: {
            name: parse_size(value) if kind_of(f"{group}.{name}") is float and isinstance(value, str) else value
            for name, value in names.items()
        }
        for group, names in example.items()
    }


def test_square_images_are_not_taken_for_the_scores_of_attention():
    square = held(Role.ACTIVATION, 2 * GIB, "loss → graph", (8, 64, 512, 512))
    images = held(Role.BATCH, 24 * MIB, "images", (8, 3, 512, 512))
    roles = ((Role.ACTIVATION, 5 * GIB), (Role.BATCH, 24 * MIB))
    assert "attention_scores_saved" in rules_of(CUDA, evidence(roles=roles, holdings=(square,), code=TRAINING))
    seen = evidence(roles=roles, holdings=(square, images), code=TRAINING)
    assert rules_of(CUDA, seen)[0] == "activations_dominate"
    normed = training(
        models=(ModelFacts(path="net", type_name="Net", training=True, parameter_bytes=1, batch_norm=("n",)),)
    )
    assert rules_of(CUDA, evidence(roles=roles, holdings=(square,), code=normed))[0] == "activations_dominate"


def test_attention_on_short_sequences_is_not_blamed():
    wide = held(Role.ACTIVATION, 2 * GIB, "loss → graph", (64, 128, 4096))
    code = training(sites={"sdpa_attention": (site("In[2] line 8: (q @ k.mT).softmax(-1)"),)})
    found = rules_of(CUDA, evidence(roles=((Role.ACTIVATION, 5 * GIB),), holdings=(wide,), code=code))
    assert found[0] == "activations_dominate"
    assert "eager_attention" not in found


def test_a_long_last_dimension_is_a_vocabulary_only_where_the_model_has_one():
    def found(classes):
        long = held(Role.ACTIVATION, 2 * GIB, "loss → graph", (64, 64, 160_000))
        return rules_of(
            CUDA, evidence(roles=((Role.ACTIVATION, 5 * GIB),), holdings=(long,), code=training(classes=classes))
        )

    assert found((160_000, 768))[0] == "logits_of_large_vocabulary"
    assert "logits_of_large_vocabulary" not in found((10,))


@pytest.mark.parametrize(("frees", "fires"), [("del optimizer, picture", False), ("del optimizer", True)])
def test_a_tensor_that_is_optimised_by_itself_is_no_old_model(frees, fires):
    picture = replace(
        held(Role.PARAMETER, 2 * GIB, "optimizer.param_groups[0]['params'][0]"), expression="x", frees=frees
    )
    found = rules_of(CUDA, evidence(roles=((Role.PARAMETER, 2 * GIB),), holdings=(picture,)))
    assert ("old_model_alive" in found) == fires


def test_what_the_name_of_the_last_loss_leads_to_is_an_old_model_all_the_same():
    old = tuple(
        replace(held(Role.PARAMETER, GIB, f"optimizer.param_groups[0]['params'][{at}]"), expression="x", frees=line)
        for at, line in enumerate(["del optimizer, loss"] * 2)
    )
    assert "old_model_alive" in rules_of(CUDA, evidence(roles=((Role.PARAMETER, 2 * GIB),), holdings=old))


@pytest.mark.parametrize("line", ["trainer.train()", "trainer.fit(model, loader)", "learn.fit_one_cycle(4)"])
def test_a_call_of_a_trainer_is_training(line):
    weights = held(Role.PARAMETER, 5 * GIB, "model.weight")
    found = evidence(roles=((Role.PARAMETER, 5 * GIB),), holdings=(weights,), code=CodeFacts(reruns=1))
    at = CellLine(number=3, line=1, source_line=line)
    assert "weights_in_four_bytes" in rules_of(CUDA, found)
    assert "weights_in_four_bytes" not in rules_of(replace(CUDA, cell=at), found)
    assert "quantise_for_inference" not in rules_of(replace(CUDA, cell=at), found)


def test_a_cell_of_inference_that_is_run_again_builds_no_model():
    weights = held(Role.PARAMETER, 5 * GIB, "model.weight")
    found = evidence(roles=((Role.PARAMETER, 5 * GIB),), holdings=(weights,), code=CodeFacts(reruns=2))
    at = CellLine(number=3, line=1, source_line="out = model.generate(ids)")
    assert "model_built_beside_old" not in rules_of(replace(CUDA, cell=at), found)
    at = replace(at, source_line="model = AutoModel.from_pretrained(name)")
    assert rules_of(replace(CUDA, cell=at), found)[0] == "model_built_beside_old"


def test_state_that_is_small_beside_frozen_parameters_may_be_complete():
    steppers = (
        OptimizerFacts(
            path="opt", type_name="AdamW", home="torch.optim", parameter_bytes=GIB, largest_bytes=MIB, foreach=True
        ),
    )
    code = training(steppers=steppers)
    roles = ((Role.PARAMETER, 4 * GIB), (Role.GRADIENT, GIB), (Role.OPTIMIZER_STATE, 2 * GIB))
    step = replace(CUDA, framework_frame="torch/optim/adam.py:700 _multi_tensor_adam")
    found = rules_of(step, evidence(roles=roles, code=code))
    assert found[0] == "step_temporaries"
    assert "first_step_state" not in found


def test_page_cache_is_not_taken_for_memory_in_use():
    host = Incident(is_oom=True, family=Family.HOST, device="cpu", requested=GIB)
    limits = {"total": 256 * GIB, "cgroup_limit": 16 * GIB, "cgroup_used": 15 * GIB}
    full = rules_of(host, evidence(host={**limits, "cgroup_reclaimable": GIB}))
    cached = rules_of(host, evidence(host={**limits, "cgroup_reclaimable": 12 * GIB}))
    assert full[0] == "container_limit_reached"
    assert "page_cache_is_not_the_reason" not in full
    assert "container_limit_reached" not in cached
    assert "page_cache_is_not_the_reason" in cached


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.id)
def test_no_rule_is_surer_than_one_that_says_otherwise_of_its_own_example(rule):
    """Each example on which a rule fires is given to all rules: nothing that contradicts it may come before it.

    Left out are rules that do not claim to be the likeliest reading: those that are sure of little themselves.
    """
    if rule.file.confidence < 0.6:
        return
    for example in rule.file.examples.fires:
        facts = complete(read(example))
        before = [other for other in BOOK.rules if other.fires(facts) and other.file.confidence > rule.file.confidence]
        assert {other.file.cause for other in before} <= {rule.file.cause}, [other.id for other in before]
