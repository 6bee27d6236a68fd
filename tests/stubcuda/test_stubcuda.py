"""The stub of NVIDIA's libraries: what PyTorch's CUDA build says and does on it. `make test-cuda` runs these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
GIB = 1 << 30


def has_stub() -> bool:
    try:
        return bool(version("stubcuda"))
    except PackageNotFoundError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_stub(), reason="torch has no stub to run on")]


def start(code: str, **env: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("STUBCUDA_")}
    command = [sys.executable, "-c", "import json, torch\n" + textwrap.dedent(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**plain, **env}, text=True, **pipes)


def run(code: str, **env: str) -> Any:
    """What the code printed last, as JSON."""
    out, errors = start(code, **env).communicate()
    assert out, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("cc", "sms", "size", "bfloat16"),
    [("7.5", "40", "15GiB", False), ("8.0", "108", "80GiB", True), ("9.0", "132", "80GiB", True)],
)
def test_a_card_is_what_it_is_told_to_be(cc: str, sms: str, size: str, bfloat16: bool) -> None:
    code = """
        card = torch.cuda.get_device_properties(0)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        print(json.dumps([card.major, card.minor, card.multi_processor_count, card.total_memory, native]))
    """
    told = run(code, STUBCUDA_CC=cc, STUBCUDA_SMS=sms, STUBCUDA_MEM=size)
    assert told == [*(int(part) for part in cc.split(".")), int(sms), int(size[:-3]) * GIB, bfloat16]


def test_the_allocator_rounds_keeps_and_gives_back_as_ever() -> None:
    code = """
        def state():
            free, total = torch.cuda.mem_get_info()
            return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]
        states = [state()]
        small = torch.empty(100, dtype=torch.uint8, device="cuda"); states.append(state())
        medium = torch.empty(2 << 20, dtype=torch.uint8, device="cuda"); states.append(state())
        large = torch.empty((30 << 20) + 1, dtype=torch.uint8, device="cuda"); states.append(state())
        del large; states.append(state())
        torch.cuda.empty_cache(); states.append(state())
        pinned = torch.ones(3).pin_memory().is_pinned()
        print(json.dumps([states, torch.cuda.memory_stats()["num_device_alloc"], pinned]))
    """
    states, mallocs, pinned = run(code, STUBCUDA_CONTEXT="400MiB")
    held, before = 512 + 2 * MIB, 400 * MIB
    assert states == [
        [0, 0, before],
        [512, 2 * MIB, before + 2 * MIB],
        [held, 22 * MIB, before + 22 * MIB],
        [held + 30 * MIB + 512, 54 * MIB, before + 54 * MIB],
        [held, 54 * MIB, before + 54 * MIB],
        [held, 22 * MIB, before + 22 * MIB],
    ]
    assert mallocs == 3
    assert pinned


FILL = """
    kept = []
    try:
        while True:
            kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        message = str(error)
    snapshot = [[part["total_size"], part["is_expandable"]] for part in torch.cuda.memory_snapshot()]
    reserved, ooms = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_ooms"]
    del kept[:]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        capped = str(error)
    print(json.dumps([message, capped, snapshot, reserved, ooms, torch.cuda.memory_reserved()]))
"""


def test_memory_that_runs_out_is_told_in_pytorchs_words() -> None:
    message, capped, segments, reserved, ooms, after = run(FILL, STUBCUDA_MEM="1GiB")
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capacity of 1024.00 MiB "
    )
    assert "of which 24.00 MiB is free." in message
    assert "Of the allocated memory 1000.00 MiB is allocated by PyTorch" in message
    assert segments == [[100 * MIB, False]] * 10
    assert (reserved, ooms, after) == (1000 * MIB, 1, 0)
    assert "256.00 MiB allowed; " in capped


def test_expandable_segments_grow() -> None:
    message, capped, segments, reserved, ooms, after = run(
        FILL, STUBCUDA_MEM="1GiB", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    )
    assert "of which 24.00 MiB is free." in message
    assert segments == [[1000 * MIB, True]]
    assert (reserved, ooms, after) == (1000 * MIB, 1, 0)
    assert "256.00 MiB allowed; " in capped


def test_another_process_takes_its_part_until_it_ends(tmp_path: Path) -> None:
    shared = {"STUBCUDA_SHARED": str(tmp_path / "cards"), "STUBCUDA_MEM": "1GiB", "STUBCUDA_CONTEXT": "100MiB"}
    hold = "x = torch.empty(300 << 20, dtype=torch.uint8, device='cuda'); print('[]', flush=True); input()"
    look = """
        import pynvml
        free, total = torch.cuda.mem_get_info()
        try:
            torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
            message = ""
        except torch.OutOfMemoryError as error:
            message = str(error)
        pynvml.nvmlInit()
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        print(json.dumps([total - free, sorted(one.usedGpuMemory for one in processes), message]))
    """
    with start(hold, **shared) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        used, processes, message = run(look, **shared)
        assert used == 500 * MIB
        assert processes == [100 * MIB, 400 * MIB]
        assert f"Process {holder.pid} has 400.00 MiB memory in use" in message
        holder.kill()
    assert run(look, **shared) == [100 * MIB, [800 * MIB], ""]


PROGRAMS = """
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(32, 4, batch_first=True)
        def forward(self, x):
            return self.layer(x, x, x, need_weights=False)

    def train(make, shape, device, dtype=None, recompute=False):
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        model.to(device)
        x, optimizer, losses = x.to(device), torch.optim.AdamW(model.parameters(), lr=1e-2), []
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
                out = out[0] if isinstance(out, tuple) else out
                loss = (out.float() - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    def encoder():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)

    def convolutions():
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 3)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(324, 5))

    PROGRAMS = [
        (lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)), (8, 16)),
        (Attending, (2, 6, 32)),
        (encoder, (2, 6, 32)),
        (encoder, (2, 6, 32), torch.bfloat16),
        (encoder, (2, 6, 32), torch.float16),
        (encoder, (2, 6, 32), None, True),
        (convolutions, (4, 3, 16, 16)),
        (lambda: nn.LSTM(8, 16, 2, batch_first=True), (3, 5, 8)),
        (lambda: nn.GRU(8, 16, 1, bidirectional=True), (5, 3, 8)),
    ]
"""


def test_values_are_the_cpus_and_the_allocator_sees_no_difference() -> None:
    code = f"""{PROGRAMS}
    import sys
    rows = []
    for make, shape, *how in PROGRAMS:
        torch.cuda.reset_peak_memory_stats()
        losses = train(make, shape, "cuda", *how)
        peak, count = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
        rows.append([losses, train(make, shape, "cpu", *how), peak, count])
    import stubcuda
    print(json.dumps([rows, stubcuda.untrue()]))
    """
    rows, untrue = run(code, STUBCUDA_COMPUTE="1")
    for (losses, on_cpu, _, _), (_, _, *how) in zip(
        rows, [(0, 0)] * 3 + [(0, 0, "amp")] * 2 + [(0, 0)] * 4, strict=True
    ):
        assert losses == pytest.approx(on_cpu, rel=1e-2 if how else 1e-4)
    assert untrue == []
    garbage, _ = run(code, STUBCUDA_COMPUTE="0")
    assert [row[2:] for row in garbage] == [row[2:] for row in rows]


def test_values_decide_sizes_and_random_numbers_repeat() -> None:
    code = """
        x = torch.arange(6, device="cuda")
        inverse = torch.linalg.inv(torch.eye(2, device="cuda"))
        told = [x[x > 2].tolist(), (x % 3).unique().tolist(), x.nonzero().numel(), inverse.tolist()]
        state = torch.cuda.get_rng_state()
        first = torch.rand(1000, device="cuda")
        second = torch.rand(1000, device="cuda")
        torch.cuda.set_rng_state(state)
        again = torch.rand(1000, device="cuda")
        told += [torch.equal(first, again), torch.equal(first, second), abs(first.mean().item() - 0.5) < 0.1]
        print(json.dumps(told))
    """
    assert run(code, STUBCUDA_COMPUTE="1") == [[3, 4, 5], [0, 1, 2], 5, [[1, 0], [0, 1]], True, False, True]


def test_a_fork_has_no_cuda() -> None:
    code = """
        import os
        x = torch.ones(3, device="cuda")
        read, write = os.pipe()
        if not os.fork():
            try:
                torch.ones(3, device="cuda")
            except RuntimeError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.wait()
        print(json.dumps(os.read(read, 1000).decode()))
    """
    assert "Cannot re-initialize CUDA in forked subprocess" in run(code)
