"""What a failed cell has set going beside itself: cancelled before its retry, or named, and the retry refused."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from programs import DATA, MODEL, TRAIN
from state_shell import besides, known, run, seed, started

from oomdoctor.model.case import OutcomeKind

SMALL = (
    MODEL.replace("width=128, depth=6", "width=64, depth=3"),
    DATA.replace("512", "128").replace("32, 128", "32, 64").replace("batch_size=128", "batch_size=64"),
    "import multiprocessing, threading, time\nseen = []\n",
)
BEGUN = "process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\nprocess.start()\n"


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("chunked_forward") as made:
        yield made


@pytest.fixture(autouse=True)
def program(shell: InteractiveShell) -> Iterator[None]:
    shell.run_cell("%oomdoctor simulate off")
    shell.reset(new_session=True)
    seed()
    for cell in (*SMALL, f"%oomdoctor simulate {besides('12MiB')}"):
        assert run(shell, cell)[0].success
    yield
    shell.run_cell("%oomdoctor simulate off")
    for child in multiprocessing.active_children():
        child.terminate()


def test_a_timer_of_the_failed_cell_does_not_fire_and_that_of_its_retry_does(shell: InteractiveShell) -> None:
    run(shell, "early = threading.Timer(600, print)\nearly.start()")
    early = shell.user_ns["early"]
    assert run(shell, f"threading.Timer(600, seen.append, [1]).start()\n{TRAIN}")[0].success
    assert known().outcome.kind is OutcomeKind.HEALED
    waiting = [one for one in threading.enumerate() if isinstance(one, threading.Timer) and not one.finished.is_set()]
    assert early in waiting, "it was there before the cell"
    assert len(waiting) == 2, "one of the cell, and not one of each run"
    for timer in waiting:
        timer.cancel()


def test_a_process_that_the_cell_started_is_named_and_the_retry_refused(shell: InteractiveShell) -> None:
    assert not run(shell, BEGUN + TRAIN)[0].success
    outcome = known().outcome
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert f"the cell started the process `{shell.user_ns['process'].name}`" in outcome.why
    run(shell, "%oomdoctor retry --anyway")
    assert known().outcome.kind is OutcomeKind.HEALED


def test_a_process_from_before_the_cell_and_workers_of_a_loader_are_no_reason(shell: InteractiveShell) -> None:
    run(shell, BEGUN)
    workers = "batches = iter(torch.utils.data.DataLoader(data, batch_size=4, num_workers=1))\nnext(batches)\n"
    assert run(shell, workers + TRAIN)[0].success
    assert known().outcome.kind is OutcomeKind.HEALED
    del shell.user_ns["batches"]
