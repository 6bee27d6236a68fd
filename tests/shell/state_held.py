"""What a kernel holds: asked from within it, by the tests."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from IPython import get_ipython
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from oomdoctor import fixes, pipeline
from oomdoctor.allocator.virtual import active
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.fix import Dose
from oomdoctor.shell.cells import cells_until

_GLOBAL = (
    *(module._global_forward_pre_hooks, module._global_forward_hooks, module._global_backward_hooks),
    *(optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),
)


def held(model: Any) -> dict[str, Any]:
    """Return bytes and counts; equal ones mean that nothing was left behind in between."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    shell, device = get_ipython(), active()
    own = [getattr(one, name) for one in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    return {
        "resident": next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS")),
        "allocated": device.read().allocated,
        "reserved": device.read().reserved,
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
        "threads": threading.active_count(),
        "handlers": len(logging.getLogger().handlers) + sum(map(len, shell.events.callbacks.values())),
        "hooks": sum(map(len, (*_GLOBAL, *own))),
        "modes": len(_get_current_dispatch_mode_stack()),
        "wrapped": shell.showtraceback.__qualname__,
    }


def know_only(name: str) -> None:
    """Let one fix be the only one: others are looked for each time."""
    one = {name: fixes.get(name)}
    fixes.catalogue = lambda: one  # type: ignore[assignment]


_applied = ExitStack()


def apply(fix: str, dose: dict[str, Any]) -> None:
    """Have a fix in place on the live objects, until ``leave``."""
    shell, change = get_ipython(), fixes.get(fix).apply
    assert change is not None
    cells = cells_until(shell, shell.execution_count, "")
    session = pipeline.open_session(shell.user_ns, cells, HostAccelerator(), shell)
    _applied.enter_context(change(session, Dose.of(**dose)))


def leave() -> None:
    """Take it away."""
    _applied.close()
