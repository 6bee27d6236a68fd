"""DistributedDataParallel in a dry run: its reducer runs on fake tensors, with its buckets as they are.

So the buckets, the copies of gradients in them and views of them are seen as they come. What reads values of tensors is
replaced: the check that all ranks have the same parameters, the first broadcast of them, and the new order of buckets
after the first step, which leaves the sum of their sizes. See ``sandbox.process_groups`` for what they exchange.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_BROADCAST: Final = 250 << 20
"""Bytes that are put together for the first broadcast of a model. Source: ``broadcast_bucket_size`` of
``DistributedDataParallel.__init__`` in torch 2.4 to 2.13."""


def replace() -> None:
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
