"""Runs cells in several real processes that train together, over gloo.

Ranks are forked from a process of its own that has torch loaded and no autograd in use: this one starts once for all
tests, and a run of two ranks takes a fraction of a second.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any, Final

__all__ = ["run"]

_LIMIT_S: Final = 60

STATE: Final = """
def _state(model):
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}

def _storages(tensors):
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one is not None}
    return sum(held.values())
"""


def run(sources: list[str], look: str, *, world: int = 2, device: str = "cpu") -> list[Any]:
    """Run the cells in each of ``world`` processes; return what ``look``, an expression, is there in the end.

    The expression sees the namespace of the cells, ``code`` (the facts that evidence has of it), ``_state`` and
    ``_storages``.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        job = {"sources": sources, "look": look, "world": world, "folder": folder, "device": device}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        import torch

        found = [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("rank*"))]
    errors = [one["error"] for one in found if "error" in one]
    assert answer == "done\n", answer
    assert not errors, errors[0]
    assert len(found) == world, f"{len(found)} of {world} ranks ended"
    return [one["result"] for one in found]


@cache
def _server() -> subprocess.Popen[str]:
    # One thread, as torchrun gives each rank.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )

    atexit.register(close)
    return server


def close() -> None:
    """End the server, if there is one; the next run begins another."""
    if _server.cache_info().currsize:
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.wait(10)
        server.stdout.close()
        _server.cache_clear()


# In the server ----------------------------------------------------------------------------------------------------


def _serve() -> None:
    # Loaded once: each rank would load it for itself.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.optim

    import oomdoctor.evidence.code
    import oomdoctor.objects.named  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        port = _free_port()
        pids = [_fork(job, rank, port) for rank in range(job["world"])]
        _wait(pids)
        print("done", flush=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(pids: list[int]) -> None:
    """Wait for the ranks; those that hang, as the others do when one has failed, are ended."""
    end = time.monotonic() + _LIMIT_S
    left = set(pids)
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                end = min(end, time.monotonic() + 2) if status else end
        if left and time.monotonic() > end:
            for pid in left:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            return
        time.sleep(0.005)


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(2, 1)
        found: dict[str, Any] = {}
        try:
            found["result"] = _rank(job, rank, port)
            status = 0
        except BaseException:  # noqa: BLE001  the test is to see it
            found["error"] = traceback.format_exc()
        import torch

        torch.save(found, Path(job["folder"], f"rank{rank}"))
    finally:
        os._exit(status)


def _rank(job: dict[str, Any], rank: int, port: int) -> Any:
    import torch
    from observed import facts

    from oomdoctor.model.session import Cell, Cells
    from oomdoctor.objects.kinds import Kind
    from oomdoctor.objects.named import find

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if job["device"] == "cpu":
        torch.cuda.set_device = lambda device: None  # type: ignore[assignment]  # there is none to choose
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(job["sources"], 1):
        exec(compile(source, f"<cell {number}>", "exec"), namespace)
    cells = Cells(history=tuple(Cell(number=number, source=text) for number, text in enumerate(job["sources"], 1)))
    found = find(namespace)
    code = facts(cells, namespace, found[Kind.MODULE], found[Kind.OPTIMIZER], found[Kind.LOADER], loaded=())
    exec(STATE, namespace)
    result = eval(job["look"], {**namespace, "code": code})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    _serve()
