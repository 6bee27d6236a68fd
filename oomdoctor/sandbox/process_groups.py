"""Process groups in a copy of the process: torch's ``fake`` backend in the place of the real one.

A copy is one rank alone: its connections to the others are severed, and the threads that would use them are gone. So a
group that it makes is one of the same size whose collectives do nothing, and what was made before is kept out of its
sight and alive, because to destroy a group waits for its threads without an end.

DDP's reducers get their own gradients back from each exchange, as if all ranks had the same batch: torch's ``fake``
backend gives them no result at all, and fails there. In a dry run they run on fake tensors with their buckets as they
are; what reads values is replaced: the check that all ranks have the same parameters, the first broadcast of them, and
the new order of buckets after the first step, which leaves the sum of their sizes.

Limits: a collective leaves its outputs as they are. What a program computes from values of other ranks is another
value then; sizes that depend on one are wrong. A hook that the program registers for DDP's exchange, as one that
compresses, is not followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from oomdoctor.objects.alive import alive_exactly

_kept_alive: Final[list[Any]] = []

_OF_BACKEND: Final = ("backend_options", "pg_options", "device_id")
"""Arguments for the backend that was asked for. Source: ``_new_process_group_helper`` of torch 2.4 to 2.13."""


def imitate() -> None:
    """Have groups of this copy be imitated, and begin with none; nothing is ever put back."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:  # not loaded, or this torch is built without it
        return
    had_group = _hide(c10d)
    from torch.testing._internal.distributed import fake_pg

    made = c10d._new_process_group_helper
    made = getattr(made, "__wrapped__", made)  # without what notes the sockets of real ones

    def imitated(size: Any, rank: Any, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_BACKEND}
        return made(size, rank, ranks, "fake", fake_pg.FakeStore(), *args, **kwargs)

    def met(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        own = int(os.environ.get("RANK", "0")) if rank < 0 else rank
        yield fake_pg.FakeStore(), own, int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size

    c10d._new_process_group_helper, c10d.rendezvous = imitated, met
    _exchange_with_none(had_group is not None)
    if had_group is not None:
        rank, size = had_group
        c10d.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)


def _hide(c10d: Any) -> tuple[int, int] | None:
    """Keep the groups that there are alive, and have torch know of none; return this rank and how many there are.

    None where the program makes its groups itself: then it begins without one.
    """
    world = c10d._world
    default = world.default_pg
    if default is None:
        return None
    _kept_alive.extend((default, *world.pg_map, *world.pg_map.values()))
    for known in (*(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config), world.pg_to_tag):
        known.clear()
    world.tags_to_pg.clear()
    world.pg_coalesce_state.clear()
    found = default.rank(), default.size()
    c10d._update_default_pg(None)
    unregister = getattr(c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    world.group_count = 0
    return found if is_from_before else None


def _exchange_with_none(has_models: bool) -> None:
    """Have DDP's reducers get their own gradients back."""
    import torch
    from torch.nn.parallel import distributed

    module: Any = distributed
    ddp, made = module.DistributedDataParallel, module.DistributedDataParallel.__init__

    def exchanged(state: object, bucket: Any) -> Any:
        answer: Any = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        module.dist._register_comm_hook(self.reducer, None, exchanged)

    ddp.__init__ = init
    ddp.register_comm_hook = lambda self, state, hook: None
    if has_models:
        _exchange_nothing(module, ddp)


def _exchange_nothing(module: Any, ddp: Any) -> None:
    """Have models that were wrapped before exchange nothing: their reducers have the group that is hidden.

    One may be in the midst of a backward pass that has failed, and would go on with it.
    """
    reducers = [vars(wrapper).get("reducer") for wrapper in alive_exactly(ddp)]
    for reducer in filter(None, reducers):
        reducer._remove_autograd_hooks()
    module.dist.Reducer._rebuild_buckets = lambda self: False
    ddp.require_backward_grad_sync = property(lambda self: False, lambda self, value: None)


is_from_before = False
"""Whether the group was there when the cell began, so that the copy has to begin with one like it."""


_BROADCAST: Final = 250 << 20
"""Bytes that are put together for the first broadcast of a model. Source: ``broadcast_bucket_size`` of
``DistributedDataParallel.__init__`` in torch 2.4 to 2.13."""


def run_ddp_on_fakes() -> None:
    """Have models that DDP wraps run on fake tensors in this process; nothing is ever put back."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return
    from torch.nn.parallel import distributed

    module: Any = distributed
    module._verify_param_shape_across_processes = lambda *args, **kwargs: True
    module._sync_module_states = _broadcast
    module.dist.Reducer._rebuild_buckets = lambda self: False


def _broadcast(module: Any, *args: Any, **kwargs: Any) -> None:
    """Take for a moment what the broadcast of a model's parameters and buffers takes."""
    import torch

    del args, kwargs
    by_device: dict[Any, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        by_device[tensor.device] = by_device.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    for device, size in by_device.items():
        torch.empty(min(size, _BROADCAST), dtype=torch.uint8, device=device)
