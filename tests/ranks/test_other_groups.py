"""Programs whose groups are not those of one plain job: what they make beside it goes on, and healing loses nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT

HEAD = """
import multiprocessing, os, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
import oomdoctor

TELL = os.environ["TELL"]


def tell(what):
    with open(TELL, "a") as file:
        file.write(f"{what}\\n")


def meet(rank, world):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=rank, world_size=world)
"""
MAIN = """
if __name__ == "__main__":
    ranks = [multiprocessing.get_context("spawn").Process(target=work, args=(rank,)) for rank in range(RANKS)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    raise SystemExit(max(abs(rank.exitcode) for rank in ranks))
"""
HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook


@oomdoctor.heal
def train(model, x, y, rank):
    held = torch.zeros((16 << 18) * rank)
    for _ in range(2):
        model.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad


def work(rank):
    torch.set_num_threads(1)
    meet(rank, 2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 10)))
    model.register_comm_hook(None, fp16_compress_hook)
    model.register_forward_hook(lambda module, args, kwargs, out: out, with_kwargs=True)
    model.note = "mine"
    x, y = torch.randn(4096, 32), torch.randint(0, 10, (4096,))
    with oomdoctor.simulate("48MiB"):
        train(model, x, y, rank)
    model.zero_grad()
    model(x[:4]).sum().backward()
    gradient = model.module[0].weight.grad
    kind = oomdoctor.last_case().outcome.kind
    tell(f"{kind} {model.note} {len(model._forward_hooks)} {torch.equal(gradient, gradient.half().float())}")
"""
COPY = """
@oomdoctor.heal
def train():
    total = torch.ones(1)
    for _ in range(60):
        dist.all_reduce(total)
        total /= 2
        time.sleep(0.05)
    return total.item()


@oomdoctor.heal
def prepare(_):
    return torch.zeros(60 << 18)


def child(_):
    with oomdoctor.simulate("48MiB"):
        try:
            prepare(0)
        except Exception as exc:
            return type(exc).__name__


def work(rank):
    torch.set_num_threads(1)
    meet(rank, 2)
    pool = multiprocessing.get_context("fork").Pool(1) if rank == 0 else None
    copy = pool and pool.apply_async(child, (0,))
    tell(f"{train()} {copy.get(timeout=60) if copy else ''}".strip())
    if pool:
        pool.terminate()
"""
TWO_JOBS = """
@oomdoctor.heal
def train(job, steps):
    total = torch.ones(1)
    for _ in range(steps):
        dist.all_reduce(total)
        time.sleep(0.1)
    if job == "a" and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 MiB.")


def work(place):
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 4, place == 0, timeout=timedelta(seconds=60))
    job = "ab"[place // 2]
    dist.init_process_group("gloo", store=dist.PrefixStore(job, store), rank=place % 2, world_size=2)
    try:
        train(job, 5 if job == "a" else 40)
        tell(f"{job} ended")
    except Exception as exc:
        tell(f"{job} {type(exc).__name__}")
    if place == 0:
        time.sleep(8)
"""
ALONE = """
@oomdoctor.heal
def count(value):
    return value + 1


def work(rank):
    meet(rank, 2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tell(f"alone among {dist.get_world_size()}")
        dist.destroy_process_group()
    tell(count(1))
"""
PROGRAMS = {
    "hooks of a model that DDP wraps stay": (HOOKS, 2, ["healed mine 1 True"] * 2),
    "a copy of the process is no rank": (COPY, 2, ["1.0", "1.0 OutOfMemoryError"]),
    "two jobs over one store": (TWO_JOBS, 4, ["a OutOfMemoryError", "a PeerOutOfMemory", "b ended", "b ended"]),
    "a rank that goes on alone": (ALONE, 2, ["2", "2", "alone among 1"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_program_makes_beside_its_group_goes_on(tmp_path: Path, program: str) -> None:
    text, ranks, wanted = PROGRAMS[program]
    (tmp_path / "train.py").write_text(HEAD + text + MAIN.replace("RANKS", str(ranks)), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"PORT": port, "TELL": str(tmp_path / "told"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    told |= {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "told").read_text().split("\n")[:-1]) == wanted
