"""Where a cell failed is told by its own lines, whatever stands above its code; and of which cell it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from programs import DATA, MODEL, TRAIN
from state_shell import besides, cleared, differing, known, run, seed, started

from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.fix import Patch
from oomdoctor.objects.leaves import state_digests

SMALL = (
    MODEL.replace("width=128, depth=6", "width=64, depth=3"),
    DATA.replace("512", "128").replace("32, 128", "32, 64").replace("batch_size=128", "batch_size=64"),
)
HEADS = {
    "blank lines": "\n\n",
    "time": "\n%%time\n\n",
    "prun": "%%prun -q\n",
    "capture": "%%capture kept\n",
    "time of a capture": "%%time\n\n%%capture kept\n",
    "capture of a time": "%%capture kept\n%%time\n",
}


@pytest.fixture(scope="module")
def module_shell() -> Iterator[InteractiveShell]:
    with started("chunked_forward", "checkpoint_blocks") as made:
        yield made


@pytest.fixture
def shell(module_shell: InteractiveShell) -> Iterator[InteractiveShell]:
    with cleared(module_shell):
        for cell in (*SMALL, f"%oomdoctor simulate {besides('12MiB')}"):
            assert run(module_shell, cell)[0].success
        yield module_shell


def place(case: Case) -> tuple[Any, Any, Any]:
    cell = case.incident.cell
    assert cell is not None
    return cell.number, cell.line, cell.source_line


@pytest.mark.parametrize("head", HEADS)
def test_the_failing_line_is_that_of_the_cell_and_its_change_leaves_what_the_retry_left(
    shell: InteractiveShell, head: str
) -> None:
    cell = HEADS[head] + TRAIN
    run(shell, cell)
    case = known()
    assert place(case) == (4, 1 + cell.split("\n").index("    logits = model(x)"), "logits = model(x)")
    assert case.incident.inner is not None
    assert (case.incident.inner.number, case.incident.inner.function) == (1, "forward")
    run(shell, "%oomdoctor retry")
    made = next(one for one in known().plan.candidates if one.label in known().outcome.fixes)
    assert known().outcome.kind is OutcomeKind.HEALED
    assert isinstance(made.patch, Patch)
    healed = state_digests(shell.user_ns)
    run(shell, "%oomdoctor simulate off")
    shell.reset(new_session=True)
    seed()
    changed = {edit.cell: edit.after for edit in made.patch.edits}
    for number, source in enumerate(SMALL, 1):
        assert run(shell, changed.get(number, source))[0].success
    assert run(shell, changed.get(4, cell))[0].success
    left = [name for name in differing(healed, state_digests(shell.user_ns)) if not name.startswith("_")]
    assert [name for name in left if name != "kept"] == []


def test_a_function_that_a_timed_cell_defines_is_told_by_its_line_in_it(shell: InteractiveShell) -> None:
    run(shell, "%%time\n\ndef go():\n    torch.randn(1 << 12, 32, 64)\n\ngo()")
    assert place(known()) == (4, 6, "go()")
    inner = known().incident.inner
    assert inner is not None
    assert (inner.number, inner.line, inner.function) == (4, 4, "go")


def test_a_function_of_an_earlier_timed_cell_is_not_taken_for_a_line_of_this_one(shell: InteractiveShell) -> None:
    run(shell, "%%time\ndef go():\n    torch.empty(1 << 60)\n")
    run(shell, "%%time\n1\n2\n3\ngo()")
    cell = known().incident.cell
    assert cell is not None
    assert "torch.empty" not in cell.source_line
    assert known().incident.inner is None


def test_the_traceback_of_the_user_is_as_it_was(shell: InteractiveShell) -> None:
    run(shell, "%config OomDoctor.keep_frames = True")
    result, shown = run(shell, "\n\n%%time\n" + TRAIN)
    steps, names = result.error_in_exec.__traceback__, []
    while steps is not None:
        names.append((steps.tb_frame.f_code.co_filename, steps.tb_lineno))
        steps = steps.tb_next
    assert ("<timed exec>", 3) in names
    assert "Out of memory at " in shown.stdout + "".join(str(one.data) for one in shown.outputs)
    import linecache

    assert "<timed exec>" not in linecache.cache


# The cell that loads the extension ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "auto"), [("load_ext", "off"), ("reload_ext", "exact")])
def test_a_failure_of_the_cell_that_loads_oomdoctor_is_told_to_be_its(
    shell: InteractiveShell, verb: str, auto: str
) -> None:
    run(shell, "%unload_ext oomdoctor" if verb == "load_ext" else "%oomdoctor simulate off")
    head = f"%{verb} oomdoctor\n%oomdoctor auto {auto}\n%oomdoctor simulate {besides('12MiB')}\n"
    result, shown = run(shell, head + TRAIN)
    assert type(result.error_in_exec).__name__ == "OutOfMemoryError"
    assert shown.stdout.count("OutOfMemoryError") == 1, "the traceback is shown, once"
    assert place(known())[1:] == (6, "logits = model(x)")
    outcome = known().outcome
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert outcome.why.startswith("oomdoctor was loaded by this very cell")
    told = run(shell, "%oomdoctor retry")[1].stderr
    assert "oomdoctor was loaded by this very cell" in told
    assert told.count("run it again") == 1
    run(shell, "%config OomDoctor.forecast_time_s = 0\nlosses = []")
    assert not run(shell, TRAIN)[0].success or auto == "exact"
    run(shell, "%oomdoctor retry")
    assert known().outcome.kind is OutcomeKind.HEALED, "run again it is a cell like others"


def test_what_was_healed_before_a_reload_is_not_blamed_on_a_later_cell(
    shell: InteractiveShell,
) -> None:
    run(shell, TRAIN)
    run(shell, "%oomdoctor retry")
    run(shell, "%reload_ext oomdoctor")
    told = run(shell, "%oomdoctor undo")[1].stderr
    assert told == "oomdoctor: In[4] can no longer be undone: the state before it was not kept\n"
