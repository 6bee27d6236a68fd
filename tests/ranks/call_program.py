"""A training in a function that is healed, in processes that the program starts itself; two ranks, or more.

``START``: ``spawn`` (``torch.multiprocessing``), ``accelerate`` (its ``debug_launcher``, which forks), ``ray`` (its
``TorchTrainer``), or a strategy of Lightning's ``Fabric`` (``ddp_spawn``, ``ddp_fork``, ``ddp``); ``MEET``: ``before``
the call or ``within`` it; ``WHERE``: ``backward``, ``error``, ``late`` or ``nowhere``, on rank 1; ``HEAL``: whether
``heal`` decorates it; ``OUT``: where what is left goes. Tests write what else happens in the place of comments.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import oomdoctor

WORLD = int(os.environ.get("WORLD", "2"))
BATCH, STEPS = 4096, 3


def meet(rank, world):
    where = os.environ.get("METHOD") or f"tcp://127.0.0.1:{os.environ['PORT']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)


healed = oomdoctor.heal if os.environ["HEAL"] else lambda function: function


@healed
def train(rank, world):
    if os.environ["MEET"] == "within":
        meet(rank, world)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    inputs, labels = torch.randn(STEPS, BATCH, 32), torch.randint(0, 10, (STEPS, BATCH))
    losses = []
    held = torch.zeros(((16 if rank == 1 else 0) << 18) if os.environ["WHERE"] == "backward" else 0)
    for x, y in zip(inputs, labels, strict=True):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # at its end
    if os.environ["WHERE"] == "error" and rank == 1:
        raise KeyError("a mistake")
    if os.environ["WHERE"] == "late" and rank == 1:
        held = torch.zeros(60 << 18)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses, "held": len(held)}


def work(rank, world):
    # at first
    torch.set_num_threads(1)
    with oomdoctor.simulate("48MiB") if os.environ["HEAL"] else nullcontext():
        run(rank, world)


def run(rank, world):
    if os.environ["MEET"] == "before" and not dist.is_initialized():
        meet(rank, world)
    left = []
    for _ in range(int(os.environ.get("CALLS", "1"))):
        try:
            left.append(train(rank, world))
        except Exception as exc:
            left.append(f"{type(exc).__name__}: {exc}")
            if os.environ["WHERE"] not in ("error", "late"):
                raise
        finally:
            case = oomdoctor.last_case()
            made = [one.patch for one in case.plan.candidates if one.label in case.outcome.fixes] if case else []
            told = {"left": left, "outcome": case and case.to_dict()["outcome"]}
            told |= {"changed": [edit.after for patch in made for edit in patch.edits]}
            torch.save(told, f"{os.environ['OUT']}.{rank}.pt")


def work_in_group(*_):
    work(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    if os.environ["START"] == "accelerate":
        from accelerate import debug_launcher

        debug_launcher(work_in_group, num_processes=WORLD)
    elif os.environ["START"].startswith("ddp"):
        from lightning.fabric import Fabric

        Fabric(accelerator="cpu", devices=WORLD, strategy=os.environ["START"]).launch(work_in_group)
    elif os.environ["START"] == "ray":
        from ray.train import ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        config = ScalingConfig(num_workers=WORLD, resources_per_worker={"CPU": 0.5})
        TorchTrainer(work_in_group, scaling_config=config, torch_config=TorchConfig(backend="gloo")).fit()
    else:
        mp.spawn(work, args=(WORLD,), nprocs=WORLD)
