"""DistributedDataParallel in a dry run: its buckets as they are, nothing exchanged.

The reducer itself runs on fake tensors, so that buckets, copies of gradients and views of them are seen as they come.
What reads values of tensors is replaced: the check that all ranks have the same parameters, the first broadcast of
them, the result of an exchange, and the new order of buckets after the first step, which leaves their sizes' sum.

Limits: a hook that the program registers for the exchange, as one that compresses, is not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

_BROADCAST: Final = 250 << 20
"""Bytes that are put together for the first broadcast of a model. Source: ``broadcast_bucket_size`` of
``DistributedDataParallel.__init__`` in torch 2.4 to 2.13."""


def replace() -> None:
    """Have models that DDP wraps run on fake tensors in this process; nothing is ever put back."""
    import torch

    if "torch.distributed.distributed_c10d" not in sys.modules:
        return
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
    module._verify_param_shape_across_processes = lambda *args, **kwargs: True
    module._sync_module_states = _broadcast
    module.dist.Reducer._rebuild_buckets = lambda self: False


def _broadcast(module: Any, *args: Any, **kwargs: Any) -> None:
    """Take for a moment what the broadcast of a model's parameters and buffers takes."""
    import torch

    del args, kwargs
    tensors: Iterable[Any] = (*module.parameters(), *module.buffers())
    by_device: dict[Any, int] = {}
    for tensor in tensors:
        by_device[tensor.device] = by_device.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    for device, size in by_device.items():
        torch.empty(min(size, _BROADCAST), dtype=torch.uint8, device=device)
