"""What the tests of fixes of loaders share: cells run with real workers, what they delivered, and what workers take."""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import live
import numpy as np
import psutil
import torch
from observed import facts
from torch.utils.data import DataLoader

from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, HostProcess, Role
from oomdoctor.model.session import Cells, Session

HOST = Incident(is_oom=True, family=Family.HOST, device="cpu", requested=1 << 20)
KILLED = Incident(is_oom=True, family=Family.WORKER_KILLED, device="cpu")
MIB = 1 << 20

LOADERS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8), torch.arange(48))
train_loader = DataLoader(
    data,
    batch_size=8,
    shuffle=True,
    num_workers=4,  # one for each core
    prefetch_factor=4,
)
"""
LOOP = """\
seen = []
for epoch in range(2):
    for x, y in train_loader:
        seen += [x, y]
    seen.append(torch.rand(3))
"""


def run(*sources: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    space = {"__name__": "__main__"} if namespace is None else namespace
    for source in sources:
        exec(source, space)
    return space


def start(*sources: str) -> dict[str, Any]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return run(*sources)


def left(space: dict[str, Any]) -> list[Any]:
    """What the loop was given, and where the random numbers of this process stand."""
    marks = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[union-attr]
    return [[one.tolist() if isinstance(one, torch.Tensor) else one for one in space["seen"]], *marks]


def delivered(*sources: str, context: Any = None) -> list[Any]:
    """Run the cells afresh, the last within what ``context`` makes of their session; return what was left."""
    space = start(*sources[:-1])
    with context(session(space, *sources)) if context else nullcontext():
        run(sources[-1], namespace=space)
    return left(space)


def retried(patch: Patch, *sources: str) -> list[Any]:
    """Run the cells as they were, and then what a retry runs in place of the last."""
    space = start(*sources[:-1])
    last = sources[-1]
    for edit in patch.edits:
        if edit.cell == len(sources):
            last = edit.after
        else:
            run(edit.replay, namespace=space)
    run(last, namespace=space)
    return left(space)


def patched(patch: Patch, *sources: str) -> tuple[str, ...]:
    after = {edit.cell: edit.after for edit in patch.edits}
    return tuple(after.get(number, text) for number, text in enumerate(sources, 1))


def replayed(patch: Patch, *sources: str) -> tuple[list[Any], list[Any]]:
    """Settings of the loaders as a fresh run of the patched cells makes them, and as a retry leaves them."""
    fresh, again = start(*patched(patch, *sources)[:-1]), start(*sources[:-1])
    run(*(edit.replay for edit in patch.edits if edit.cell != len(sources)), namespace=again)
    return _plain_settings(fresh), _plain_settings(again)


def _plain_settings(space: dict[str, Any]) -> list[Any]:
    plain = (bool, int, float, str, type(None))
    return [
        {key: value for key, value in vars(loader).items() if isinstance(value, plain)}
        for _, loader in loaders_of(space)
    ]


def loaders_of(space: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    found = [(name, value) for name, value in space.items() if isinstance(value, DataLoader)]
    for name, value in space.items():
        if isinstance(value, dict) and name != "__builtins__":
            found += [(f"{name}[{key!r}]", one) for key, one in value.items() if isinstance(one, DataLoader)]
    return tuple(found)


def session(space: dict[str, Any], *sources: str) -> Session:
    return live.having(live.session(sources, namespace=space), loaders=loaders_of(space))


def settings(space: dict[str, Any]) -> list[Any]:
    """Everything of the loaders that a live form could leave changed."""
    return [[(key, id(value)) for key, value in vars(loader).items()] for _, loader in loaders_of(space)]


def worker(index: int, uss: Any, loader: str | None = "train_loader") -> HostProcess:
    label = f"DataLoader worker {index}" + (f" of {loader}" if loader else "")
    return HostProcess(pid=100 + index, label=label, rss=uss, uss=uss, pss=uss)


def evidence(
    space: dict[str, Any],
    *sources: str,
    children: tuple[HostProcess, ...] = tuple(worker(index, 100 * MIB) for index in range(4)),
    roles: tuple[tuple[Role, int], ...] = ((Role.BATCH, 2 * MIB),),
) -> Evidence:
    """Evidence of the real loaders and cells, with the workers and the batch that a test says."""
    plain = live.evidence()
    cells = live.cells_of(*sources)
    return replace(
        plain,
        host=replace(plain.host, children=children),
        censuses=(Census(device="cpu", found=0, allocated=live.NONE, roles=roles),),
        code=facts(cells, space, (), (), loaders_of(space)),
    )


def cells(*sources: str) -> Cells:
    return live.cells_of(*sources)


def uss(iterator: Any) -> list[int]:
    """What each worker of an iterator would free if it ended, by psutil."""
    return [psutil.Process(process.pid).memory_full_info().uss for process in iterator._workers]


def shared(iterator: Any) -> int:
    """Bytes of shared memory that the workers of an iterator hold for batches that were not taken yet."""
    total: dict[int, int] = {}
    for process in iterator._workers:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if "/torch_" in str(entry.readlink()):
                    stat = entry.stat()
                    total[stat.st_ino] = stat.st_size
    return sum(total.values())


def settled(measure: Any, *, at_least: int = 1) -> Any:
    """Wait until a measure of busy workers is the same three times in a row, and return it."""
    found: list[Any] = []
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found.append(measure())
        if len(found) > 2 and found[-1] == found[-2] == found[-3] and found[-1] >= at_least:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(f"it does not come to rest: {found[-3:]}")


def alive() -> int:
    """Workers of loaders that are there now."""
    gc.collect()
    return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())
