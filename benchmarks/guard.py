"""What the host guard does where the kernel would kill: real kernels in real memory cgroups.

    python benchmarks/guard.py [FILE] [--rounds 12] [--parts table,heal,cache,cost,box,unload]

Prints what was found, and writes it to FILE. It needs root and cgroup v1. Each run of the table is a cell that takes
more than its group has: without the guard, and with it. Told are the kernels lost, what the cell raised, and where.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, Final, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]


from kernels import Kernel, Reply  # noqa: E402 - of the tests
from memory_groups import group, kills, started_in  # noqa: E402 - of the tests

MIB: Final = 1 << 20
SMALL, LARGE = 512 * MIB, 1024 * MIB
LONGEST_S: Final = 600.0
_PIECES: Final = "import numpy as np\nkept = []\nwhile True:\n    kept.append(np.ones({size} << 17))"
_TRAIN: Final = """\
for x, y in loader:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
_MODEL: Final = """\
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(98304, 64), torch.randint(0, 10, (98304,))), batch_size=49152)
"""
_DIGEST: Final = """\
import hashlib
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
_WORKERS: Final = """\
import os, numpy as np
pids = []
for worker in range(4):
    if (pid := os.fork()) == 0:
        kept = []
        while True:
            kept.append(np.ones(4 << 17))
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""
_KILL_WORKERS: Final = """\
import os, signal
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except OSError:
        pass
"""


class Program(NamedTuple):
    """A cell that takes too much: the cells before it, the line at which it should fail, and the group's size."""

    cell: str
    line: str
    before: str = ""
    and_before: str = ""
    size: int = SMALL
    after: str = ""


PROGRAMS: Final = {
    "pieces of 16 MiB": Program(_PIECES.format(size=16), "kept.append"),
    "pieces of 64 MiB": Program(_PIECES.format(size=64), "kept.append"),
    "pieces of 128 MiB": Program(_PIECES.format(size=128), "kept.append"),
    "one call of 2 GiB": Program("import numpy as np\na = np.ones(2048 << 17)", "a = np.ones"),
    "mapped first": Program(
        "for a in mapped:\n    a[:] = 1",
        "a[:] = 1",
        before="import numpy as np\nmapped = [np.empty(4 << 17) for _ in range(75)]",
        and_before="mapped += [np.empty(4 << 17) for _ in range(75)]",
    ),
    "lists and small objects": Program(
        "kept = []\nwhile True: kept.append([len(kept), str(len(kept))])", "kept.append"
    ),
    "pandas": Program(
        "wide = pd.concat([frame.assign(n=n) for n in range(1000)])",
        "wide = ",
        before="import numpy as np, pandas as pd\nframe = pd.DataFrame(np.ones((1 << 17, 16)))",
    ),
    "torch training": Program(_TRAIN, "loss", before=_MODEL, size=LARGE),
    "four forked workers": Program(_WORKERS, "os.waitpid", after=_KILL_WORKERS),
}


class Seen(NamedTuple):
    """What became of one run."""

    lives: bool
    raised: str
    at_line: bool
    kills: int
    seconds: float


@contextmanager
def kernel_in(size: int, **env: str) -> Iterator[tuple[Kernel, Path]]:
    """A kernel in a group of this size."""
    with group(size) as folder:
        kernel = Kernel(env, start=partial(started_in, folder))
        try:
            yield kernel, folder
        finally:
            kernel.stop()


def lives(kernel: Kernel) -> bool:
    return ended_with(kernel) is None


def ended_with(kernel: Kernel) -> int | None:
    process: Any = kernel._process
    status: int | None = process.poll()
    return status


def answered(kernel: Kernel, cell: str) -> Reply | None:
    """Run a cell; None where the kernel dies of it."""
    end = time.monotonic() + LONGEST_S
    asked = kernel._client.execute(cell, store_history=True, allow_stdin=False, stop_on_error=False)
    reply = Reply("")
    while time.monotonic() < end and lives(kernel):
        with suppress(Empty):
            message = kernel._client.get_iopub_msg(timeout=0.5)
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["header"]["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                reply.content = kernel._client.get_shell_msg(timeout=10)["content"]
                reply.status = reply.content["status"]
                return reply
            reply.messages.append(message)
    return None


def run(program: Program, *, guarded: bool) -> Seen:
    """Run a program to its failure, and a cell after it."""
    with kernel_in(program.size) as (kernel, folder):
        if guarded:
            answered(kernel, "%load_ext oomdoctor")
            answered(kernel, "%config OomDoctor.forecast_time_s = 0")
        for cell in filter(None, (program.before, program.and_before)):
            answered(kernel, cell)
        before, began = kills(folder), time.monotonic()
        reply = answered(kernel, program.cell)
        seconds = time.monotonic() - began
        if reply is not None and program.after:
            answered(kernel, program.after)
        after = answered(kernel, "print(6 * 7)") if reply is not None else None
        told = reply.errors[-1] if reply is not None and reply.errors else None
        shown = "" if reply is None else reply.text
        return Seen(
            lives=after is not None and after.stdout.strip() == "42",
            raised="no answer"
            if reply is None and lives(kernel)
            else f"ended with {ended_with(kernel)}"
            if reply is None
            else told["ename"]
            if told
            else "nothing",
            at_line=any("-> " in line and program.line in line for line in shown.splitlines()),
            kills=kills(folder) - before,
            seconds=seconds,
        )


def table(rounds: int, programs: Collection[str], **_: Any) -> Iterator[str]:
    """The table: each program without the guard, and ``rounds`` times with it."""
    yield f"{'program':28} {'without':22} with the guard: runs, kernels lost, raised at the user's line, seconds"
    total = lost = 0
    for name, program in PROGRAMS.items():
        if programs and name not in programs:
            continue
        bare = run(program, guarded=False)
        runs = [run(program, guarded=True) for _ in range(rounds)]
        raised = ", ".join(f"{kind} x {count}" for kind, count in Counter(one.raised for one in runs).items())
        gone, at_line = sum(not one.lives for one in runs), sum(one.at_line for one in runs)
        total, lost = total + len(runs), lost + gone
        without = f"{'lives' if bare.lives else 'lost'}, counter +{bare.kills}"
        seconds = sorted(one.seconds for one in runs)[len(runs) // 2]
        killed = sum(one.kills for one in runs)
        workers = f"; {killed} workers or copies killed" if killed else ""
        ends = f"{len(runs)} runs, {gone} lost, {at_line} at the line, {seconds:.1f} s; {raised}{workers}"
        yield f"{name:28} {without:22} {ends}"
    yield f"with the guard: {lost} of {total} kernels lost"


def heal(**_: Any) -> Iterator[str]:
    """A training cell that the kernel would kill: healed, and what it leaves beside an uncapped run as changed."""
    bare = run(PROGRAMS["torch training"], guarded=False)
    yield f"training without the guard: {'lives' if bare.lives else 'lost'}, counter +{bare.kills}"
    with kernel_in(LARGE) as (kernel, folder):
        answered(kernel, "%load_ext oomdoctor")
        answered(kernel, "%oomdoctor auto exact")
        answered(kernel, _MODEL)
        before, began = kills(folder), time.monotonic()
        reply = answered(kernel, _TRAIN)
        seconds = time.monotonic() - began
        if reply is None:
            yield f"training with the guard: {'no answer' if lives(kernel) else 'the kernel was lost'}"
            return
        state = answered(kernel, _DIGEST)
        told = answered(
            kernel,
            "import oomdoctor, json\ncase = oomdoctor.last_case()\n"
            "chosen = next(one for one in case.plan.candidates if one.label in case.outcome.fixes)\n"
            "print(json.dumps([case.outcome.kind, case.outcome.fixes, [e.after for e in chosen.patch.edits]]))",
        )
        if state is None or told is None or not told.stdout.startswith("["):
            yield f"training with the guard: {reply.status}; {told and told.text[-400:]}"
            return
        kind, fixes, texts = json.loads(told.stdout)
        yield (
            f"training with the guard: cell {reply.status}, {kind} by {', '.join(fixes)} in {seconds:.0f} s, "
            f"{kills(folder) - before} copies killed"
        )
    with kernel_in(8 * LARGE) as (kernel, _folder):
        for cell in (_MODEL, *texts):
            answered(kernel, cell)
        free = answered(kernel, _DIGEST)
    same = free is not None and free.stdout == state.stdout
    yield f"weights of the healed cell and of an uncapped run of the changed cell: {'equal' if same else 'DIFFERENT'}"


_READS: Final = """\
import numpy as np
usage = lambda: int(open(group + "/memory.usage_in_bytes").read())
watch = get_ipython()._oomdoctor_extension.guard
held = np.ones(500 << 17)
tripped = looked = 0
first = watch.looks
while watch.looks - first < 1000:
    with open(path, "rb", buffering=0) as file:
        while file.read(16 << 20):
            looked += 1
            tripped += usage() > (1 << 30) - (64 << 20)
print(watch.looks - first, watch.interrupt.raised, tripped, looked)
"""


def cache(**_: Any) -> Iterator[str]:
    """Looks at a group that page cache fills."""
    with tempfile.TemporaryDirectory() as scratch, kernel_in(LARGE) as (kernel, folder):
        path = Path(scratch, "large")
        with path.open("wb") as file:
            for _ in range(96):
                file.write(bytes(16 * MIB))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the group is charged when it reads it
        answered(kernel, "%load_ext oomdoctor")
        answered(kernel, f"group, path = {str(folder)!r}, {str(path)!r}")
        reply = answered(kernel, _READS)
        if reply is None or reply.status != "ok":
            yield f"page cache: FAILED: {reply and reply.text}"
            return
        looks, raised, tripped, looked = reply.stdout.split()
        yield (
            f"page cache that fills the group: {looks} looks, {raised} alarms, cell ok; a guard by usage alone "
            f"trips at {tripped} of {looked} looks"
        )


_PER_CELL: Final = """\
import time
watch = get_ipython()._oomdoctor_extension.guard
watch.end_cell()
took = []
for at in range(2000):
    began = time.perf_counter()
    watch.arm(at, "x = 1", None)
    watch.end_cell()
    watch.settle()
    took.append(time.perf_counter() - began)
print(sorted(took)[1000] * 1e6)
"""
_IDLE: Final = """\
import time
time.sleep(1)
began, cpu = time.perf_counter(), time.process_time()
time.sleep(20)
print(100 * (time.process_time() - cpu) / (time.perf_counter() - began))
"""
_STEPS: Final = """\
import time
def step():
    x, y = xs, ys
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
xs, ys = torch.randn(512, 64), torch.randint(0, 10, (512,))
for _ in range(5): step()
took = []
for _ in range(50):
    began = time.perf_counter()
    step()
    took.append(time.perf_counter() - began)
print(sorted(took)[25] * 1e3)
"""


def cost(**_: Any) -> Iterator[str]:
    """What the guard takes: between cells, within a cell that waits, at each cell, and in steps of training."""
    with kernel_in(4 * LARGE) as (kernel, _folder):
        bare_wait = _number(answered(kernel, _IDLE))
        answered(kernel, _MODEL)
        steps = {False: [], True: []}  # type: dict[bool, list[float]]
        answered(kernel, "%load_ext oomdoctor")
        for at in range(6):
            answered(kernel, f"%oomdoctor guard {'on' if at % 2 else 'off'}")
            steps[bool(at % 2)].append(_number(answered(kernel, _STEPS)))
        wait = _number(answered(kernel, _IDLE))
        idle = _idle(kernel)
        answered(kernel, "%oomdoctor guard off")
        bare_idle = _idle(kernel)
        answered(kernel, "%oomdoctor guard on")
        cell = _number(answered(kernel, _PER_CELL))
    with kernel_in(SMALL) as (kernel, _folder):
        answered(kernel, "%load_ext oomdoctor")
        answered(kernel, _PIECES.format(size=16))
        full = _idle(kernel)
    yield f"CPU between cells: {idle:.3f} %, without the guard {bare_idle:.3f} %"
    yield f"CPU between cells, after a cell that has filled the memory: {full:.3f} %"
    yield f"CPU of a cell that waits, far from the limit: {wait:.3f} %, without the guard {bare_wait:.3f} %"
    yield f"each cell: {cell:.0f} us"
    off, on = min(steps[False]), min(steps[True])
    more = f"{100 * (on / off - 1):+.1f} %; best of 3 medians"
    yield f"a step of training: {off:.2f} ms without, {on:.2f} ms with the guard ({more})"


def _number(reply: Reply | None) -> float:
    return float("nan") if reply is None or reply.status != "ok" else float(reply.stdout.split()[-1])


def _idle(kernel: Kernel) -> float:
    """Return the share of a CPU that a kernel takes while nothing runs, in percent."""
    time.sleep(2)
    before = _cpu(kernel)
    time.sleep(20)
    return 100 * (_cpu(kernel) - before) / 20


def _cpu(kernel: Kernel) -> float:
    """Return the seconds of CPU that the threads of a kernel have taken, to the nanosecond."""
    process: Any = kernel._process
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in threads) / 1e9


_ENDS: Final[dict[str, tuple[str, bool]]] = {
    "killed by the kernel": (_PIECES.format(size=16), True),
    "a crash of another kind": ("import ctypes\nctypes.string_at(0)", True),
    "killed, and the container restarted": (_PIECES.format(size=16), False),
}


def box(**_: Any) -> Iterator[str]:
    """What the next kernel tells of one that is gone."""
    for name, (cell, is_same) in _ENDS.items():
        with tempfile.TemporaryDirectory() as scratch, group(SMALL) as folder, group(SMALL) as other:
            home = Path(scratch)
            kernel = Kernel(start=partial(_started_at, home, folder))
            answered(kernel, "%load_ext oomdoctor")
            answered(kernel, "%oomdoctor guard off")
            answered(kernel, cell)
            kernel.stop()
            kernel = Kernel(start=partial(_started_at, home, folder if is_same else other))
            told, again = answered(kernel, "%load_ext oomdoctor"), answered(kernel, "%reload_ext oomdoctor")
            yield f"{name}: {told.stdout.strip() if told else 'NOTHING'}"
            if again is None or again.stdout:
                yield "  IT WAS TOLD TWICE"
            kernel.stop()


def _started_at(home: Path, folder: Path, argv: list[str], env: dict[str, str], _cwd: str) -> Any:
    """Start a kernel in a group with a runtime directory and a working directory that another had before it."""
    return started_in(folder, argv, {**env, "JUPYTER_RUNTIME_DIR": str(home)}, str(home))


_STATE: Final = """\
import resource, signal, threading
print(resource.getrlimit(resource.RLIMIT_DATA), [signal.getsignal(n) for n in sorted(signal.valid_signals()) if n > 33],
      sorted(one.name for one in threading.enumerate() if "oomdoctor" in one.name))
"""


def unload(**_: Any) -> Iterator[str]:
    """What is left of the guard when the extension is unloaded."""
    with kernel_in(SMALL) as (kernel, _folder):
        before = answered(kernel, _STATE)
        answered(kernel, "%load_ext oomdoctor")
        answered(kernel, _PIECES.format(size=64))
        answered(kernel, "%unload_ext oomdoctor")
        after = answered(kernel, _STATE)
    same = before is not None and after is not None and before.stdout == after.stdout
    yield f"limit, handlers of signals and threads after unload: {'as they were' if same else 'CHANGED'}"


PARTS: Final[dict[str, Callable[..., Iterator[str]]]] = {
    one.__name__: one for one in (table, heal, cache, cost, box, unload)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--programs", type=lambda text: text.split(","), default=())
    given = parser.parse_args()
    lines: list[str] = []
    for part in given.parts:
        for line in PARTS[part](rounds=given.rounds, programs=given.programs):
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    if given.file is not None:
        given.file.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
