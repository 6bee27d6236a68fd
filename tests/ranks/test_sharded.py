"""Jobs that shard instead of repeating: FSDP2 and ZeRO's first stage, with gloo. Healed as a fresh job, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAM, Case, Ended, changed, job, same

FSDP = (
    ("from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"),
    (
        "model = DistributedDataParallel(net)",
        "model = fully_shard(net, mesh=dist.device_mesh.init_device_mesh('cpu', (world,)))",
    ),
    ('"model": model.state_dict()', '"model": {name: one.to_local() for name, one in model.state_dict().items()}'),
    (
        '"optimizer": optimizer.state_dict()',
        '"optimizer": [one["exp_avg"].to_local() for one in optimizer.state.values()]',
    ),
)


def written(*changes: tuple[str, str]) -> str:
    source = PROGRAM
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    return source


def told_by(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"case.rank{rank}.json").read_text(encoding="utf-8"))


def assert_as_a_fresh_job(folder: Path, case: Case, source: str, healed: Ended, world: int = 2) -> None:
    fresh = job(folder / "fresh", case, world, changed(source, healed.diff), with_oomdoctor=False)
    assert None not in fresh.left
    assert same(healed.left, fresh.left)


def test_fsdp2_is_refused_on_all_ranks_because_no_trial_can_be_made_of_it(tmp_path: Path) -> None:
    case, source = Case(where="backward"), written(*FSDP)
    done = job(tmp_path / "job", case, 2, source)
    assert done.status != 0
    assert [one and one["kind"] for one in done.outcomes] == ["refused"] * 2
    assert len({one["why"] for one in done.outcomes if one is not None}) == 1
    assert "results could not be checked" in done.outcomes[0]["why"]  # type: ignore[index]
    assert done.left == [None, None]


def test_zero_shards_the_state_of_the_optimizer_on_all_ranks(tmp_path: Path) -> None:
    """Where gradients lie in the buckets already."""
    views = ("DistributedDataParallel(net)", "DistributedDataParallel(net, gradient_as_bucket_view=True)")
    case = Case(where="step", simulate="96MiB", settings={"HELD": "50"})
    source = written(views, ('"optimizer": optimizer.state_dict(), ', ""), (", foreach=True", ""))
    healed = job(tmp_path / "healed", case, 2, source)
    assert [one and one["kind"] for one in healed.outcomes] == ["healed"] * 2
    assert "ZeroRedundancyOptimizer(" in healed.diff
    assert_as_a_fresh_job(tmp_path, case, source, healed)
    plain = job(tmp_path / "plain", case, 2, source, with_oomdoctor=False)
    assert same(healed.left, plain.left)
    for rank, outcome in enumerate(healed.outcomes):
        (made,) = [one for one in told_by(tmp_path / "healed", rank)["fixes"] if one["id"] == "zero_optimizer"]
        assert made["forecast"]["basis"] == "dry run"
        assert outcome is not None
        assert outcome["peak"] == pytest.approx(made["forecast"]["peak"], rel=1e-3)  # each rank has its own share
