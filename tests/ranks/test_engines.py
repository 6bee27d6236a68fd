"""Cells that ``%%px`` sends to the engines of ipyparallel, which are kernels: healed on all of them, or on none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ipyparallel = pytest.importorskip("ipyparallel")

BEGIN = """
import json, os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
%load_ext oomdoctor
%oomdoctor auto exact
%oomdoctor simulate 48MiB
"""
MODEL = """
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x_all, y_all = torch.randn(2, 8192, 32), torch.randint(0, 10, (2, 8192))
held = torch.zeros((20 if rank == 1 else 0) << 18)
losses = []
"""
TRAIN = """
for x, y in zip(x_all, y_all):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
CHANGED = """
import oomdoctor
for x, y in zip(x_all, y_all):
    optimizer.zero_grad()
    batch_loss = 0.0
    for micro_x, micro_y in oomdoctor.batch_parts(2, x, y, ddp=model):
        loss = F.cross_entropy(model(micro_x), micro_y)
        loss = loss * (len(micro_x) / len(x))
        loss.backward()
        batch_loss += loss.detach()
    loss = batch_loss
    optimizer.step()
    losses.append(loss.item())
"""
LEFT = "repr((losses, [one.double().sum().item() for one in model.parameters()], id(model)))"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name, value in {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with ipyparallel.Cluster(n=2, log_level=40) as client:
        port = free_port()
        for rank, engine in enumerate(client):
            told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            engine.execute(f"import os; os.environ.update({told})", block=True)
        yield client[:]


def sent(engines: Any, source: str) -> Any:
    """Run a cell on all engines; return what they displayed."""
    answer = engines.execute(source, silent=False, block=False)
    answer.get(timeout=300)
    return answer


def value(engines: Any, expression: str) -> list[Any]:
    """Return what an expression is in the namespace of each engine."""
    engines.execute(f"_told = {expression}", block=True)
    return list(engines.pull("_told", block=True))


@pytest.mark.filterwarnings("ignore")  # of ipyparallel itself, at its end
def test_a_cell_is_healed_on_all_engines_and_one_that_fails_on_one_leaves_them_in_use(
    engines: Any, tmp_path: Path
) -> None:
    for source in (BEGIN, 'dist.init_process_group("gloo")', MODEL):
        sent(engines, source)
    before = value(engines, "id(model)")
    answer = sent(engines, TRAIN)
    shown = [str(one["data"].get("text/plain", "")) for outputs in answer.outputs for one in outputs]
    assert sum("Healed: In[" in one for one in shown) == 2, shown
    healed = value(engines, LEFT)
    assert value(engines, "id(model)") == before

    sent(engines, f"%memreport --ranks --json {tmp_path}/ranks-of-{{rank}}.json")
    told = value(engines, f"json.load(open(f'{tmp_path}/ranks-of-{{rank}}.json'))")
    assert [[one["report"] is not None for one in each["ranks"]] for each in told] == [[True, True]] * 2
    assert told[0]["imbalance"] > 1
    assert sent(engines, "%oomdoctor ranks").stdout[1] == "rank 0: answers\nrank 1: this process\n"

    with pytest.raises(ipyparallel.error.CompositeError, match="ValueError"):
        sent(engines, 'if rank == 0:\n    raise ValueError("a mistake")\ndist.barrier()')
    sent(engines, "total = torch.ones(1)\ndist.all_reduce(total)")  # the group was made anew
    assert value(engines, "total.item()") == [2.0, 2.0]

    sent(engines, "%oomdoctor simulate off")
    sent(engines, MODEL)
    sent(engines, CHANGED)
    fresh = value(engines, LEFT)
    assert [one.rpartition(",")[0] for one in healed] == [one.rpartition(",")[0] for one in fresh]
