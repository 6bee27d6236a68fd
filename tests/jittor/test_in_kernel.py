"""A real kernel: a cell that is interrupted before Jittor's memory ends the process, told, mended and put back."""

from __future__ import annotations

from kernels import Kernel

LONG_S = 500
SETUP = """\
import jittor as jt
from jittor import nn

jt.set_global_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = nn.SGD(model.parameters(), 0.1, momentum=0.9)
x, y = jt.rand((65536, 64)), (jt.rand((65536,)) * 10).int32()
jt.sync_all()
"""
CELL = """\
optimizer.zero_grad()
losses = []
for at in range(0, 65536, 8192):
    loss = nn.cross_entropy_loss(model(x[at : at + 8192]), y[at : at + 8192]) / 8
    optimizer.backward(loss)
    losses.append(loss.item())
optimizer.step()
jt.sync_all()
"""
TOLD = "print('state', [float(one.sum().item()) for one in model.parameters()], jt.rand((2,)).tolist(), len(losses))"


def state(kernel: Kernel) -> str:
    (line,) = [
        line for line in kernel.run(TOLD, timeout=LONG_S, ok=True).stdout.splitlines() if line.startswith("state")
    ]
    return line


def test_an_accumulation_that_fills_memory_is_named_mended_and_leaves_what_a_fresh_kernel_leaves(
    lazy_kernel: Kernel,
) -> None:
    kernel = lazy_kernel
    kernel.run(SETUP, timeout=LONG_S, ok=True)
    failed = kernel.run(f"%%memlimit 24MiB\n{CELL}", timeout=LONG_S)
    assert failed.errors[0]["ename"] == "HostMemoryPressure"
    assert "1.  Jittor accumulates gradients that it has not computed" in failed.text
    assert "In[3] line 6: optimizer.backward(loss) is followed by no jt.sync_all()" in failed.text
    assert "Compute Jittor's gradients after each part" in failed.text
    healed = kernel.run("%oomdoctor fix jittor_sync", timeout=LONG_S, ok=True)
    assert "Healed" in healed.text
    assert "clean, as if the changed cell had run first" in healed.text
    kept = state(kernel)
    changed = CELL.replace("    losses.append", "    jt.sync_all()\n    losses.append")
    kernel.run(SETUP + changed, timeout=LONG_S, ok=True)
    assert state(kernel) == kept
    report = kernel.run("%memreport", timeout=LONG_S, ok=True).text
    assert "Jittor" in report
    assert "variables are alive, of which the program holds" in report


def test_a_loop_that_grows_is_interrupted_and_the_kernel_lives(lazy_kernel: Kernel) -> None:
    kernel = lazy_kernel
    kernel.run("import jittor as jt\nkept = []", timeout=LONG_S, ok=True)
    grows = "%%memlimit 200MiB\nwhile True:\n    kept.append(jt.rand((1024, 1024)))\n    kept[-1].sync()\n"
    failed = kernel.run(grows, timeout=LONG_S)
    assert failed.errors[0]["ename"] == "HostMemoryPressure"
    assert "`kept` leads to" in kernel.run("%memreport", timeout=LONG_S, ok=True).text
    assert kernel.run("kept.clear(); jt.gc(); print(1 + 1)", timeout=LONG_S, ok=True).stdout.endswith("2\n")
