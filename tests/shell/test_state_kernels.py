"""The state after a retry in real kernels: failures of a simulated device, of torch's allocator, and an interrupt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from kernels import Kernel
from programs import BUDGET, DATA, MODEL, TRAIN

COUNTED: Final = """\
from collections import defaultdict, deque
class Progress:
    def __init__(self): self.steps, self.seen = 0, []
    def note(self, value): self.steps += 1; self.seen.append(value + random.random())
progress, metrics, replay, global_step = Progress(), defaultdict(list), deque(maxlen=2), 0
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
average = torch.optim.swa_utils.AveragedModel(model)
numbers = np.random.default_rng(3)
"""
COUNTING: Final = (
    TRAIN
    + """\
    scheduler.step()
    average.update_parameters(model)
    progress.note(loss.item())
    metrics["loss"].append(numbers.random() + np.random.rand())
    replay.append(torch.rand(2))
    global_step += 1
"""
)
LARGE: Final = """\
data = torch.utils.data.TensorDataset(torch.randn(2048, 32, 128), torch.randint(0, 10, (2048,)))
loader = torch.utils.data.DataLoader(data, batch_size=1024, shuffle=True)
losses = []
"""
LIMIT: Final = """\
import resource, pathlib
_status = pathlib.Path("/proc/self/status").read_text()
_used = int(next(line for line in _status.splitlines() if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (_used + (700 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
"""
ADAMW: Final = MODEL.replace("SGD(model.parameters(), lr=0.05, momentum=0.9)", "AdamW(model.parameters(), lr=0.01)")
DIGESTS: Final = "__import__('oomdoctor.objects.leaves', fromlist=['x']).state_digests(globals())"
MADE: Final = (
    "(lambda case: [(c.fix, dict(c.dose.values), [(e.cell, e.after) for e in getattr(c.patch, 'edits', ())])"
    " for c in case.plan.candidates if c.label in case.outcome.fixes])(__import__('oomdoctor').last_case())[0]"
)
"""The fix that healed: its id, its dose, and its edits, none where it was made on the live objects."""
HELD: Final = "__import__('state_held')"
IGNORED: Final = {"device", "resource", "pathlib"}


def digests(kernel: Kernel) -> dict[str, Any]:
    return {name: found for name, found in kernel.value(DIGESTS).items() if name not in IGNORED}


@pytest.mark.parametrize(
    ("model", "data", "fails"),
    [
        (MODEL, DATA, "%oomdoctor simulate " + BUDGET),
        (ADAMW, DATA, "%oomdoctor simulate " + BUDGET),
        (ADAMW, LARGE, LIMIT),
    ],
    ids=["SGD momentum, simulated", "AdamW, simulated", "AdamW, a limit of the process"],
)
def test_it_is_that_of_a_fresh_kernel_with_the_fix(
    start_kernel: Callable[..., Kernel], model: str, data: str, fails: str
) -> None:
    kernel, fresh = start_kernel(), start_kernel(PYTHONPATH=str(Path(__file__).parent))
    cells = {2: model, 3: data, 4: COUNTED, 6: COUNTING}
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.auto = 'exact'", ok=True)
    for number in (2, 3, 4):
        kernel.run(cells[number], ok=True)
    kernel.run(fails, ok=True)
    assert "Healed" in kernel.run(cells[6], ok=True).text
    fix, dose, edits = kernel.value(MADE)
    cells |= dict(map(tuple, edits))
    for number in (2, 3, 4):
        fresh.run(cells[number], ok=True)
    if not edits:
        fresh.value(f"{HELD}.apply({fix!r}, {dose!r})")
    fresh.run(cells[6], ok=True)
    fresh.value(f"{HELD}.leave()")
    left, expected = digests(kernel), digests(fresh)
    assert {name for name in {**left, **expected} if left.get(name) != expected.get(name)} <= {"_status", "_used"}
    assert kernel.value("progress.steps == global_step == len(losses) > 1") is True


def test_an_interrupt_in_the_retry_restores_and_then_interrupts(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor\n%oomdoctor auto exact\n%config OomDoctor.forecast_time_s = 0", ok=True)
    for cell in (MODEL, DATA, COUNTED, f"%oomdoctor simulate {BUDGET}"):
        kernel.run(cell, ok=True)
    kernel.run("import signal\nfrom oomdoctor.sandbox.fork import is_copy", ok=True)
    before = digests(kernel)
    # Neither the run that fails comes so far nor, in a copy, those of a trial.
    reply = kernel.run(COUNTING + "if not is_copy(): signal.raise_signal(signal.SIGINT)\n", ok=False)
    assert reply.content["ename"] == "KeyboardInterrupt"
    assert [error["ename"] for error in reply.errors] == ["OutOfMemoryError"], "the user's own, above the answer"
    assert "Interrupted. Everything is as before the cell ran." in reply.text
    assert digests(kernel) == before
    assert "Healed" in kernel.run(COUNTING, ok=True).text
