"""What is left of a fix: its source for the next cell, the way back, and that it is tried first the next time."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel
from programs import DATA, MODEL, TRAIN
from state_programs import Planted, cells_of
from state_shell import besides, cleared, differing, known, run, said, seed, started

from oomdoctor import fixes, pipeline
from oomdoctor.forecast.attempts import attempt_with_all
from oomdoctor.model.case import Case, OutcomeKind, State
from oomdoctor.model.fix import Dose, Edit, Patch
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.leaves import state_digests
from oomdoctor.sandbox import primitives

CELLS: Final = cells_of("mlp", "AdamW")
SMALL: Final = (
    MODEL.replace("width=128, depth=6", "width=64, depth=3"),
    DATA.replace("512", "128").replace("32, 128", "32, 64").replace("batch_size=128", "batch_size=64"),
)
BUDGET: Final = "12MiB"
"""In two parts a batch of SMALL fits into it, and not beside 2 MiB more: then it takes four."""
FUNCTION: Final = "def train():\n" + "".join(f"    {line}\n" for line in TRAIN.splitlines())


CASE: Final = "__import__('oomdoctor').last_case()"
ENDED: Final = (
    "(lambda case: [str(case.outcome.kind), list(case.outcome.fixes), case.outcome.attempts,"
    f" case.plan.candidates[0].forecast.basis])({CASE})"
)


@pytest.fixture
def dosing(start_kernel: Callable[..., Kernel]) -> Kernel:
    """A kernel that heals by one fix alone, in the dose that forecasts find: all of its memory is the cells'."""
    kernel = start_kernel(PYTHONPATH=str(Path(__file__).parent))
    kernel.run("%load_ext oomdoctor\n%oomdoctor auto exact\n%config OomDoctor.forecast_time_s = 60", ok=True)
    kernel.value("__import__('state_held').know_only('micro_batch')")
    return kernel


@pytest.fixture(scope="module")
def module_shell() -> Iterator[InteractiveShell]:
    with started("micro_batch", "chunked_forward") as made:
        yield made


@pytest.fixture
def shell(module_shell: InteractiveShell) -> Iterator[InteractiveShell]:
    with cleared(module_shell):
        yield module_shell


def failed(shell: InteractiveShell, *cells: str, last: str = CELLS[-1]) -> Case:
    """Run a program whose last cell runs out of memory once, at its third iteration."""
    for cell in cells or CELLS[:-1]:
        assert run(shell, cell)[0].success
    with Planted("third iteration"):
        assert not run(shell, last)[0].success
    return known()


def test_of_a_case_without_a_change_it_is_not_said_that_one_was_offered(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = failed(shell)
    assert said(shell, "%oomdoctor cases").endswith(": offered\n")
    bare = replace(case, plan=replace(case.plan, candidates=()))
    monkeypatch.setattr(pipeline, "cases", lambda: (bare, replace(bare, plan=replace(bare.plan, pending=True))))
    without, pending = said(shell, "%oomdoctor cases").splitlines()
    assert without.endswith(": nothing to offer")
    assert pending.endswith(": offered")


# What stands in the next cell ---------------------------------------------------------------------------------------


def test_insert_puts_the_changed_cell_into_the_next_one_and_runs_nothing(shell: InteractiveShell) -> None:
    case = failed(shell)
    patch = case.plan.candidates[0].patch
    assert isinstance(patch, Patch)
    steps = shell.user_ns["progress"].steps
    told = said(shell, "%oomdoctor fix 1 --insert")
    assert shell.rl_next_input == patch.edits[-1].after
    assert shell.rl_next_input != CELLS[-1]
    assert re.fullmatch(
        rf"the next cell has In\[\d+\] with {re.escape(case.plan.candidates[0].label)}; nothing was run\n", told
    )
    assert shell.user_ns["progress"].steps == steps
    assert known().outcome.kind is OutcomeKind.OFFERED
    said(shell, "%oomdoctor fix 1")
    assert known().outcome.kind is OutcomeKind.HEALED, "the case can be retried as before"


def test_of_a_healed_cell_the_fix_in_place_is_inserted_and_that_it_has_run_is_told(shell: InteractiveShell) -> None:
    failed(shell)
    said(shell, "%oomdoctor fix chunked_forward")
    told = said(shell, "%oomdoctor fix --insert")
    assert "with chunked_forward(chunks=" in told
    assert "a second time: the healed run used chunked_forward(chunks=" in told
    others = [one for one in known().plan.candidates if one.fix != "chunked_forward" and isinstance(one.patch, Patch)]
    assert "a second time: the healed run used chunked_forward(" in said(
        shell, f"%oomdoctor fix {others[0].fix} --insert"
    )
    said(shell, "%oomdoctor fix --insert")
    assert "not in place" not in said(shell, "%oomdoctor diff")
    assert "in_parts(" in str(shell.rl_next_input)


def test_the_inserted_cell_of_a_fresh_shell_leaves_what_the_healed_one_left(shell: InteractiveShell) -> None:
    failed(shell)
    said(shell, "%oomdoctor fix 1")
    healed = state_digests(shell.user_ns)
    said(shell, "%oomdoctor fix --insert")
    inserted = shell.rl_next_input
    shell.reset(new_session=True)
    seed()
    for cell in (*CELLS[:-1], inserted):
        assert run(shell, cell)[0].success
    names = [name for name in differing(healed, state_digests(shell.user_ns)) if not name.startswith("_")]
    assert names == []


def test_a_fix_is_had_in_another_dose_than_the_plans(shell: InteractiveShell) -> None:
    case = failed(shell)
    planned = next(one for one in case.plan.candidates if one.fix == "chunked_forward")
    proposed = fixes.get("chunked_forward").propose(case.incident, case.evidence)
    assert not isinstance(proposed, Refused)
    other = next(one.dose for one in proposed if one.dose != planned.dose)
    told = said(shell, "%oomdoctor fix chunked_forward chunks=3000")
    assert told.startswith("oomdoctor: chunked_forward does not come with 'chunks=3000': chunks=")
    assert said(shell, f"%oomdoctor diff chunked_forward {other}") != said(shell, "%oomdoctor diff chunked_forward")
    said(shell, f"%oomdoctor fix chunked_forward {other}")
    assert known().outcome.fixes == (f"chunked_forward({other})",)


def test_the_cell_that_the_change_belongs_to_is_inserted(shell: InteractiveShell) -> None:
    for cell in (*SMALL, FUNCTION, f"%oomdoctor simulate {besides(BUDGET)}"):
        run(shell, cell)
    assert not run(shell, "train()  # go")[0].success
    told = said(shell, "%oomdoctor fix micro_batch --insert")
    assert re.fullmatch(r"the next cell has In\[3\] with micro_batch\(parts=\d+\); nothing was run\n", told)
    assert shell.rl_next_input.startswith(FUNCTION.partition("\n")[0])
    assert shell.rl_next_input != FUNCTION


def test_several_changed_cells_are_labelled(shell: InteractiveShell) -> None:
    case = failed(shell)
    edits = tuple(Edit(cell=at, before="", after=f"x = {at}", replay="") for at in (1, 2))
    first = replace(case.plan.candidates[0], patch=Patch(edits=edits))
    pipeline.record(replace(case, plan=replace(case.plan, candidates=(first,))))
    assert "the next cell has In[1] and In[2] with " in said(shell, "%oomdoctor fix 1 --insert")
    assert shell.rl_next_input == "# In[1], changed\nx = 1\n\n# In[2], changed\nx = 2"


def test_why_tells_all_of_the_last_failure(shell: InteractiveShell) -> None:
    assert "no cell that ran out of memory" in said(shell, "%oomdoctor why")
    case = failed(shell)
    told = said(shell, "%oomdoctor why")
    assert case.findings[0].title in told
    assert "What holds it" in told
    assert case.plan.candidates[-1].title in told


def test_a_fix_that_cannot_be_written_says_so_in_one_line(shell: InteractiveShell) -> None:
    case = failed(shell)
    first = replace(case.plan.candidates[0], patch=Refused("the loop is a library's"))
    pipeline.record(replace(case, plan=replace(case.plan, candidates=(first,))))
    told = said(shell, "%oomdoctor fix 1 --insert")
    assert told == f"oomdoctor: {first.label} cannot be written as a change of your cells: the loop is a library's\n"
    assert shell.rl_next_input is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fix 1 --insert --anyway", "--insert runs nothing"),
        ("fix 99 --insert", "unknown fix '99'"),
        ("fix 1 2 --insert", "one fix at a time"),
        ("fix 1 --insrt", "one fix at a time, not '1 --insrt'"),
    ],
)
def test_bad_input_is_told_in_one_line_and_inserts_nothing(shell: InteractiveShell, line: str, told: str) -> None:
    failed(shell)
    answer = said(shell, f"%oomdoctor {line}")
    assert told in answer
    assert answer.count("\n") == 1
    assert shell.rl_next_input is None
    assert known().outcome.kind is OutcomeKind.OFFERED


def test_it_is_inserted_after_later_cells_too(shell: InteractiveShell) -> None:
    failed(shell)
    run(shell, "later = 1")
    assert "nothing was run" in said(shell, "%oomdoctor fix 1 --insert")
    assert shell.rl_next_input


def test_a_kernel_is_sent_the_cell(kernel: Kernel) -> None:
    for cell in ("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0", *SMALL):
        kernel.run(cell, ok=True)
    kernel.run(f"%oomdoctor simulate {BUDGET}", ok=True)
    kernel.run(TRAIN, ok=False)
    reply = kernel.run("%oomdoctor fix micro_batch --insert", ok=True)
    (sent,) = reply.content["payload"]
    assert (sent["source"], sent["replace"]) == ("set_next_input", False)
    assert "nothing was run" in reply.stdout
    assert kernel.value("losses") == []
    kernel.run("%oomdoctor fix micro_batch", ok=True)
    kernel.run("%oomdoctor undo", ok=True)
    kernel.run(sent["text"], ok=True)
    assert kernel.value("len(losses)") == 2, "what was inserted fits"


# The way back -------------------------------------------------------------------------------------------------------


def test_before_any_failure_there_is_nothing_to_undo(shell: InteractiveShell) -> None:
    assert said(shell, "%oomdoctor undo") == (
        "oomdoctor: there is nothing to undo: no cell that ran out of memory was diagnosed so far\n"
    )


def test_undo_of_an_offered_case(shell: InteractiveShell) -> None:
    failed(shell)
    before = state_digests(shell.user_ns)
    assert re.search(r"nothing to undo: no change of In\[\d+\] is in place\n", said(shell, "%oomdoctor undo"))
    assert differing(before, state_digests(shell.user_ns)) == []


def test_undo_of_a_healed_case_says_that_all_went_back(shell: InteractiveShell) -> None:
    case = failed(shell)
    said(shell, "%oomdoctor fix 1")
    assert shell.user_ns["progress"].steps > 2
    label = case.plan.candidates[0].label
    assert said(shell, "%oomdoctor undo") == f"Undone: {label}. Everything is as before the cell ran\n"
    assert shell.user_ns["progress"].steps == 0
    outcome = known().outcome
    assert (outcome.kind, outcome.state, outcome.fixes) == (OutcomeKind.OFFERED, State.RESTORED, ())
    assert f"no change of In[{case.incident.cell.number}] is in place: {label} healed it" in said(  # type: ignore[union-attr]
        shell, "%oomdoctor undo"
    )
    said(shell, "%oomdoctor fix 2")
    assert known().outcome.kind is OutcomeKind.HEALED, "another fix can be tried"


def test_undo_prints_one_line_in_a_terminal(shell: InteractiveShell) -> None:
    failed(shell)
    assert run(shell, "%oomdoctor fix 1")[1].outputs, "displays are seen here: that of the notice"
    found_wrong = {known().plan.candidates[1].fix: "its results are others"}
    pipeline.record(replace(known(), plan=known().plan.without(found_wrong)))  # so the diagnosis is another one
    shown = run(shell, "%oomdoctor undo")[1]
    assert [str(one.data) for one in shown.outputs] == [], "a terminal prints an update below what it is an update of"
    assert len(shown.stdout.splitlines()) == 1


def test_undo_of_a_cell_that_was_healed_anyway_names_what_did_not_go_back(
    shell: InteractiveShell, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = "raw = torch.zeros(4, requires_grad=True)"
    failed(shell, *CELLS[:-1], first, last=f"open('out', 'w').close()\nwith torch.no_grad(): raw += 1\n{CELLS[-1]}")
    said(shell, "%oomdoctor fix 1 --anyway")
    assert known().outcome.kind is OutcomeKind.HEALED
    told = said(shell, "%oomdoctor undo")
    assert "Everything is as before the cell ran, except: `raw` was written in place" in told
    assert "`open('out', 'w')` cannot be undone" in told
    assert known().outcome.state is State.UNVERIFIED
    assert shell.user_ns["progress"].steps == 0


def test_undo_of_a_refused_case(shell: InteractiveShell) -> None:
    run(shell, "%oomdoctor auto exact")
    for cell in (*CELLS[:-1], "numbered = iter(range(9))"):
        run(shell, cell)
    with Planted("third iteration"):
        run(shell, f"next(numbered)\n{CELLS[-1]}")
    assert known().outcome.kind is OutcomeKind.REFUSED
    told = said(shell, "%oomdoctor undo")
    assert "no change of In[" in told
    assert "is in place: `numbered` is an iterator" in told


def test_undo_of_a_case_that_was_rolled_back(shell: InteractiveShell) -> None:
    for cell in (*SMALL, f"%oomdoctor simulate {besides(BUDGET)}"):
        run(shell, cell)
    run(shell, f"{TRAIN}huge = torch.ones(1 << 22)")
    said(shell, "%oomdoctor fix 1")
    assert known().outcome.kind is OutcomeKind.ROLLED_BACK
    assert re.match(
        r"not in place: \S+\(.*\) was tried, and did not heal the cell\n--- In", said(shell, "%oomdoctor diff")
    )
    told = said(shell, "%oomdoctor undo")
    assert "was not healed, its changes were undone, and everything is as before it ran" in told


@pytest.mark.parametrize(("later", "moves_on"), [("metrics = {}", True), ("print(len(metrics))", False)])
def test_undo_after_later_cells_changes_nothing_and_names_the_cell(
    shell: InteractiveShell, later: str, moves_on: bool
) -> None:
    failed(shell)
    said(shell, "%oomdoctor fix 1")
    number = shell.execution_count
    run(shell, later)
    before = state_digests(shell.user_ns)
    told = said(shell, "%oomdoctor undo")
    if moves_on:
        assert f"can no longer be undone: In[{number}] has bound `metrics`, which the failed cell uses" in told
        assert differing(before, state_digests(shell.user_ns)) == []
        assert known().outcome.kind is OutcomeKind.HEALED
    else:
        assert "Undone: " in told


# The same failure once more -----------------------------------------------------------------------------------------


def trains(shell: InteractiveShell, budget: str = BUDGET) -> None:
    for cell in (*SMALL, f"%oomdoctor simulate {besides(budget)}", "%oomdoctor auto exact"):
        run(shell, cell)


def test_a_cell_whose_retries_fail_shows_its_own_traceback(shell: InteractiveShell) -> None:
    trains(shell)
    cell = f"{TRAIN}extra()"
    run(shell, "extra = lambda: None")
    assert run(shell, cell)[0].success
    run(shell, "extra = lambda: torch.ones(1 << 22)")
    result, shown = run(shell, cell)
    assert known().outcome.kind is OutcomeKind.ROLLED_BACK
    lines = [step.line for step in traceback.extract_tb(result.error_in_exec.__traceback__)]
    assert "extra()" not in lines
    assert re.findall(r"Tried to allocate \S+", shown.stdout) == re.findall(
        r"Tried to allocate \S+", str(result.error_in_exec)
    )


def test_what_ran_out_of_memory_is_not_tried_again_unless_it_is_named(shell: InteractiveShell) -> None:
    for cell in (*SMALL, f"%oomdoctor simulate {besides(BUDGET)}"):
        run(shell, cell)
    run(shell, f"{TRAIN}huge = torch.ones(1 << 22)")
    run(shell, "%config OomDoctor.attempts = 1")
    tried = []
    for line in ("retry", "retry", "fix micro_batch"):
        said(shell, f"%oomdoctor {line}")
        outcome = known().outcome
        assert (outcome.kind, outcome.attempts) == (OutcomeKind.ROLLED_BACK, 1)
        tried += outcome.fixes
    assert tried[0] != tried[1]
    assert tried[2] in tried[:2]


def test_the_mildest_dose_that_fits_with_its_margin_is_taken(dosing: Kernel) -> None:
    for cell in (*SMALL, "%oomdoctor simulate 11MiB", TRAIN):
        dosing.run(cell, ok=True)
    assert dosing.value(ENDED) == ["healed", ["micro_batch(parts=4)"], 1, "dry run"]
    assert dosing.value(f"{CASE}.plan.candidates[0].forecast.fits") is True
    milder = dosing.value(f"{CASE}.plan.candidates[0].patch.edits[-1].after").replace("4", "2")
    dosing.run("%oomdoctor undo", ok=True)
    dosing.run("%oomdoctor auto off", ok=True)
    dosing.run(milder, ok=False)  # the next milder dose does not fit


def test_two_changes_together_are_named_by_their_id_and_undone(shell: InteractiveShell) -> None:
    two = ("checkpoint_blocks", "micro_batch")
    few = {one: fixes.get(one) for one in two}
    with mock.patch.object(fixes, "catalogue", return_value=few):
        for cell in (*SMALL, f"%oomdoctor simulate {besides(BUDGET)}"):
            run(shell, cell)
        before = state_digests(shell.user_ns)
        assert not run(shell, TRAIN)[0].success
        case, opened = known(), _extension(shell).open
        by_id = {one.fix: one for one in case.plan.candidates}
        parts = tuple((one, by_id[one].dose) for one in two)
        patch, _ = attempt_with_all([(few[one], dose) for one, dose in parts], opened.session, case.evidence)
        dose = Dose(tuple(value for _, own in parts for value in own.values))
        both = replace(by_id[two[1]], fix=" + ".join(two), dose=dose, patch=patch, parts=parts)
        pipeline.record(replace(case, plan=replace(case.plan, candidates=(*case.plan.candidates, both))))
        for named in (both.fix, both.label, str(len(case.plan.candidates) + 1)):
            assert said(shell, f"%oomdoctor diff {named}").count("--- In[") == 2
        assert "one fix at a time" in said(shell, f"%oomdoctor diff {' '.join(two)}")
        said(shell, f"%oomdoctor fix {both.fix}")
        assert known().outcome.kind is OutcomeKind.HEALED
        assert known().outcome.fixes == (both.label,)
        assert run(shell, "%oomdoctor undo")[0].success
        assert differing(state_digests(shell.user_ns), before) == []


# What no retry cures ------------------------------------------------------------------------------------------------

_GPU: Final = (
    "GPU 0; 32.00 GiB total capacity; 900.00 MiB already allocated; 10.00 MiB free; 920.00 MiB reserved in total by "
    "PyTorch"
)
INCURABLE: Final = {
    "a dead worker": ("DataLoader worker (pid 3) is killed by signal: Killed. ", "a worker process died"),
    "oneDNN": ("could not create a primitive", "oneDNN creates no primitives in this thread"),
    "another rank": ("process 1 terminated with signal SIGKILL", "another process was killed"),
    "other processes": (
        f"CUDA out of memory. Tried to allocate 16.00 MiB ({_GPU})",
        "other processes use the device",
    ),
}


@pytest.mark.parametrize("kind", INCURABLE)
def test_what_no_retry_cures_is_not_tried_and_told(shell: InteractiveShell, kind: str) -> None:
    message, told = INCURABLE[kind]
    run(shell, "%oomdoctor auto any")
    for cell in CELLS[:-1]:
        run(shell, cell)
    shell.user_ns["fail"] = _raising(message)
    with (
        mock.patch.object(primitives, "is_memory_refused", return_value=True),  # as beside a limit that was reached
        mock.patch.object(primitives, "_offset", return_value=None),  # as where the library tells no symbols
    ):
        result, shown = run(shell, f"{CELLS[-1]}fail()")
    assert str(result.error_in_exec) == message
    case = known()
    assert (case.outcome.kind, case.outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert told in case.outcome.why
    assert any(
        told in " ".join(str(one.data["text/plain"]).split()) for one in shown.outputs if "text/plain" in one.data
    )
    assert shell.user_ns["progress"].steps > 2, "nothing was touched"
    assert told in said(shell, "%oomdoctor retry")


def test_a_fault_of_the_device_in_a_retry_ends_it(shell: InteractiveShell) -> None:
    failed(shell)
    shell.user_ns["progress"].note = _raising("CUDA error: an illegal memory access was encountered")
    opened = _extension(shell).open
    assert opened is not None
    opened.transaction.restore = lambda: None  # what it would put back is what fails here
    said(shell, "%oomdoctor retry")
    outcome = known().outcome
    assert (outcome.kind, outcome.attempts, outcome.state) == (OutcomeKind.FAILED, 1, State.UNVERIFIED)
    assert "until the kernel is restarted" in outcome.why


def _raising(message: str) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise RuntimeError(message)

    return fail


def _extension(shell: InteractiveShell) -> Any:
    return vars(shell)["_oomdoctor_extension"]


def test_a_cell_is_planned_again_for_less_memory_than_there_is(dosing: Kernel) -> None:
    dosing.run("%oomdoctor auto off", ok=True)
    for cell in (*SMALL, "%oomdoctor simulate 13MiB"):
        dosing.run(cell, ok=True)
    dosing.run(TRAIN, ok=False)
    first = f"(lambda one: [str(one.dose), one.forecast.fits, one.forecast.budget])({CASE}.plan.candidates[0])"
    assert dosing.value(first)[:2] == ["parts=2", True]
    dosing.run("%oomdoctor fit 9MiB", ok=True)
    dose, fits, budget = dosing.value(first)
    assert (fits, budget) == (True, 9 << 20)
    assert dose != "parts=2"
    for line, told in (("", "such as 11GiB"), ("much", "much"), ("0", "above zero"), ("20MiB", "tensors may take")):
        reply = dosing.run(f"%oomdoctor fit {line}")
        assert told in reply.stderr, line
    dosing.run("%oomdoctor retry", ok=True)
    assert dosing.value(ENDED)[:2] == ["healed", [f"micro_batch({dose})"]]
    assert dosing.value(f"{CASE}.outcome.peak") <= 9 << 20


def test_a_report_for_an_issue_has_nothing_of_the_program_unless_it_is_asked_for(shell: InteractiveShell) -> None:
    failed(shell)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["secret"])
        told = json.loads(said(shell, "%oomdoctor report"))
    assert told["environment"]["torch"]
    assert told["case"]["findings"][0]["rule"]
    assert {one["fix"] for one in told["case"]["fixes"]} == {"micro_batch", "chunked_forward"}
    text = said(shell, "%oomdoctor report")
    for word in ("model", "loss", "optimizer.step", "In["):
        assert word not in json.dumps(told["case"]["incident"])
        assert f'"{word}"' not in text
    assert "backward" in said(shell, "%oomdoctor report --code")


def test_a_rule_is_explained_by_its_id(shell: InteractiveShell) -> None:
    told = said(shell, "%oomdoctor rules activations_dominate")
    assert told.startswith("Activations fill the memory")
    assert "What helps: " in told
    assert "unknown rule" in said(shell, "%oomdoctor rules no_such_rule")
