"""Whole jobs under torchrun: healed on all ranks alike, or on none, and then each rank has its own error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import Case, Ended, changed, job, same, source_of

_SECOND = "    if rank == 0 and len(losses) == 2:\n        "


def healed_and_fresh(folder: Path, case: Case, world: int = 2) -> tuple[Ended, Ended]:
    """Return a job that was healed, and a fresh one of what it was changed into."""
    source = source_of(case)
    healed = job(folder / "healed", case, world, source)
    assert healed.status == 0, healed.printed
    assert [one and one["kind"] for one in healed.outcomes] == ["healed"] * world
    return healed, job(folder / "fresh", case, world, changed(source, healed.diff), with_oomdoctor=False)


@pytest.mark.parametrize("ranks", ["1", "0,1"])
def test_every_rank_is_left_as_by_a_fresh_job_of_the_changed_script(tmp_path: Path, ranks: str) -> None:
    healed, fresh = healed_and_fresh(tmp_path, Case(where="backward", ranks=ranks))
    assert None not in fresh.left
    assert same(healed.left, fresh.left)
    assert "Traceback" not in healed.printed


def test_a_step_that_is_half_written_on_one_rank_is_taken_back_on_all(tmp_path: Path) -> None:
    healed, fresh = healed_and_fresh(tmp_path, Case(where="step", simulate="96MiB", settings={"HELD": "35"}))
    assert "gradient_as_bucket_view" in healed.diff
    assert same(healed.left, fresh.left)


def test_a_rank_that_had_come_to_its_end_is_taken_back_too(tmp_path: Path) -> None:
    healed, fresh = healed_and_fresh(tmp_path, Case(where="late", simulate="96MiB", settings={"HELD": "30"}))
    assert same(healed.left, fresh.left)


def test_what_one_rank_cannot_take_back_all_refuse_with_its_reason(tmp_path: Path) -> None:
    began = "if rank == 0:\n    print('began', file=open(os.environ['OUT'] + '.log', 'a'))"
    case = Case(where="backward", lines={"# before": began})
    done = job(tmp_path / "job", case, 2, source_of(case))
    assert done.status != 0
    assert [one and one["kind"] for one in done.outcomes] == ["refused"] * 2
    whys = {one["why"] for one in done.outcomes if one is not None}
    assert len(whys) == 1
    assert whys.pop().startswith("rank 0: line ")
    assert (tmp_path / "job" / "left.log").read_text() == "began\n"  # nobody has run again


def test_an_error_of_the_users_is_told_by_every_rank_and_nothing_is_run_again(tmp_path: Path) -> None:
    case = Case(where="nowhere", lines={"    # in a step": f"{_SECOND}raise ValueError('a mistake')"})
    done = job(tmp_path / "job", case, 2, source_of(case))
    assert done.status != 0
    assert done.outcomes == [None, None]
    assert done.printed.count("\nValueError: a mistake\n") == 1
    assert "oomdoctor: rank 0 has failed: ValueError: a mistake" in done.printed
    assert done.left == [None, None]


def test_a_killed_rank_ends_the_job_within_seconds(tmp_path: Path) -> None:
    case = Case(where="nowhere", lines={"    # in a step": f"{_SECOND}os.kill(os.getpid(), 9)"})
    done = job(tmp_path / "job", case, 2, source_of(case))
    assert done.status != 0
    assert done.took_s < 60


def test_where_a_rank_never_answers_the_restarted_job_begins_with_the_change(tmp_path: Path) -> None:
    stops = "if rank == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    os.kill(os.getpid(), 19)"
    case = Case(where="backward", lines={"# before": stops})
    done = job(tmp_path / "job", case, 2, source_of(case), options="--max-restarts 1")
    assert done.status == 0, done.printed
    assert "rank 0 has not answered for 20 s" in done.printed
    assert done.printed.count("train.py begins with micro_batch(parts=2), which rank 1 has written down") == 2
    assert None not in done.left


def test_where_a_rank_cannot_be_released_the_restarted_job_begins_with_the_change(tmp_path: Path) -> None:
    """As where NCCL's abort hangs."""
    hangs = (
        "if rank == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    import threading\n    import oomdoctor.ranks.groups\n"
        "    oomdoctor.ranks.groups._aborting = threading.Event().wait"
    )
    case = Case(where="backward", lines={"# before": hangs})
    done = job(tmp_path / "job", case, 2, source_of(case), options="--max-restarts 1")
    assert done.status == 0, done.printed
    assert "rank 0 has not answered for 20 s" in done.printed
    assert done.printed.count("train.py begins with micro_batch(parts=2), which rank 1 has written down") == 2
    assert None not in done.left


def test_a_job_in_which_nothing_happens_is_as_without_oomdoctor(tmp_path: Path) -> None:
    case = Case(where="nowhere")
    ours = job(tmp_path / "ours", case, 2, source_of(case))
    plain = job(tmp_path / "plain", case, 2, source_of(case), with_oomdoctor=False)
    assert (ours.status, ours.outcomes) == (0, [None, None])
    assert same(ours.left, plain.left)
    assert os.linesep.join(line for line in ours.printed.splitlines() if "oomdoctor" in line) == ""
