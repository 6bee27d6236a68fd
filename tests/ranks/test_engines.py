"""Cells that ``%%px`` sends to the engines of ipyparallel, which are kernels: healed on all of them, or on none."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    for name, value in {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as running:

        def start(world: int) -> Any:
            client = running.enter_context(ipyparallel.Cluster(n=world, log_level=40))
            port = free_port()
            for rank, engine in enumerate(client):
                told = {"RANK": str(rank), "WORLD_SIZE": str(world)}
                told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                engine.execute(f"import os; os.environ.update({told})", block=True)
            return client[:]

        yield start


def sent(engines: Any, source: str) -> Any:
    """Run a cell on all engines; return what they displayed."""
    answer = engines.execute(source, silent=False, block=False)
    answer.get(timeout=300)
    answer.wait_for_output(20)
    return answer


def value(engines: Any, expression: str) -> list[Any]:
    """Return what an expression is in the namespace of each engine."""
    engines.execute(f"_told = {expression}", block=True)
    return list(engines.pull("_told", block=True))


def healed(engines: Any) -> list[Any]:
    """Run a cell that is healed on all engines; return what each has left."""
    for source in (BEGIN, 'dist.init_process_group("gloo")', MODEL):
        sent(engines, source)
    before = value(engines, "id(model)")
    answer = sent(engines, TRAIN)
    shown = [str(one["data"].get("text/plain", "")) for outputs in answer.outputs for one in outputs]
    assert sum("Healed: In[" in one for one in shown) == len(engines), shown
    assert value(engines, "id(model)") == before
    return value(engines, LEFT)


def assert_as_fresh(engines: Any, left: list[Any]) -> None:
    """Hold what was left against a run of the changed cell on a model that was made anew."""
    sent(engines, "%oomdoctor simulate off")
    sent(engines, MODEL)
    sent(engines, CHANGED)
    assert [one.rpartition(",")[0] for one in left] == [one.rpartition(",")[0] for one in value(engines, LEFT)]


@pytest.mark.filterwarnings("ignore")  # of ipyparallel itself, at its end
def test_a_cell_is_healed_on_all_engines_and_one_that_fails_on_one_leaves_them_in_use(
    cluster: Callable[[int], Any], tmp_path: Path
) -> None:
    engines = cluster(2)
    left = healed(engines)

    sent(engines, f"%memreport --ranks --json {tmp_path}/ranks-of-{{rank}}.json")
    told = value(engines, f"json.load(open(f'{tmp_path}/ranks-of-{{rank}}.json'))")
    assert [[one["report"] is not None for one in each["ranks"]] for each in told] == [[True, True]] * 2
    assert told[0]["imbalance"] > 1
    assert sent(engines, "%oomdoctor ranks").stdout[1] == "rank 0: answers\nrank 1: this process\n"

    with pytest.raises(ipyparallel.error.CompositeError, match="ValueError"):
        sent(engines, 'if rank == 0:\n    raise ValueError("a mistake")\ndist.barrier()')
    sent(engines, "total = torch.ones(1)\ndist.all_reduce(total)")  # the group was made anew
    assert value(engines, "total.item()") == [2.0, 2.0]

    assert_as_fresh(engines, left)


@pytest.mark.filterwarnings("ignore")  # of ipyparallel itself, at its end
def test_four_engines_are_healed_and_what_three_hold_is_told_when_one_is_killed(
    cluster: Callable[[int], Any], tmp_path: Path
) -> None:
    engines = cluster(4)
    assert_as_fresh(engines, healed(engines))

    os.kill(value(engines, "os.getpid()")[2], signal.SIGKILL)
    alive = engines.client[[0, 1, 3]]
    sent(alive, f"%memreport --ranks --json {tmp_path}/ranks-of-{{rank}}.json")
    told = value(alive, f"json.load(open(f'{tmp_path}/ranks-of-{{rank}}.json'))")[1]
    assert [one["report"] is not None for one in told["ranks"]] == [True, True, False, True]
    assert told["ranks"][2]["why"] == "silent for 8 s: killed, or stopped"
    assert told["imbalance"] > 1
    shown = sent(alive, "%oomdoctor ranks").stdout
    assert shown[1] == "rank 0: answers\nrank 1: this process\nrank 2: does not answer\nrank 3: answers\n"


KEPT = """
import ctypes, gc, os, stat
def kept():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/maps") as maps, open("/proc/self/status") as status:
        kept = {"mappings": len(list(maps)), "threads": len(os.listdir("/proc/self/task"))}
        kept["memory"] = sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    modes = []
    for name in os.listdir("/proc/self/fd"):
        try:
            modes.append(os.stat(f"/proc/self/fd/{name}").st_mode)
        except OSError:  # that of the listing itself
            pass
    return {**kept, "sockets": sum(map(stat.S_ISSOCK, modes))}
"""


@pytest.mark.filterwarnings("ignore")  # of ipyparallel itself, at its end
def test_a_third_round_keeps_no_more_than_the_first(cluster: Callable[[int], Any]) -> None:
    engines = cluster(2)
    for source in (BEGIN, KEPT, 'dist.init_process_group("gloo")', MODEL):
        sent(engines, source)
    rounds = []
    for _ in range(3):
        shown = [one["data"].get("text/plain", "") for outputs in sent(engines, TRAIN).outputs for one in outputs]
        assert sum("Healed: In[" in one for one in shown) == 2
        rounds.append(value(engines, "kept()"))
    for first, second, third in zip(*rounds, strict=True):
        assert (third["threads"], third["sockets"]) == (first["threads"], first["sockets"])
        # glibc keeps the stacks of threads that have ended for the next ones, here those of the group's first renewal.
        assert third["mappings"] <= second["mappings"], rounds
        assert third["memory"] <= first["memory"] + 2048, rounds  # KiB
