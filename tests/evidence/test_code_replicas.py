"""What evidence tells of models that several processes train; the ranks of several are in tests/fixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oomdoctor.evidence.code import replicas, world_size
from oomdoctor.model.code import ReplicaFacts


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.sometimes(self.always(x)) if both else self.always(x)


def test_without_a_group_there_is_no_world() -> None:
    assert world_size() is None


@pytest.mark.usefixtures("group")
def test_the_settings_of_the_wrapper() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4).double(), gradient_as_bucket_view=True)
    (facts,) = replicas([("model", model), ("plain", nn.Linear(1, 1))])
    assert world_size() == 1
    assert facts == ReplicaFacts(
        path="model", type_name="DistributedDataParallel", ranks=1, dtypes=("float64",), bucket_views=True
    )


def test_the_devices_of_data_parallel() -> None:
    model = nn.DataParallel(nn.Linear(4, 4))
    model.device_ids = [0, 1, 2]
    (facts,) = replicas([("model", model)])
    assert (facts.type_name, facts.ranks, facts.bucket_views) == ("DataParallel", 3, False)
