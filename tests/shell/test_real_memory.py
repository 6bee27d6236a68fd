"""A real failure of the CPU allocator under RLIMIT_DATA, nothing simulated, healed in a real kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernels import Kernel
from programs import MODEL, PARAMETERS, TRAIN

DATA = """\
data = torch.utils.data.TensorDataset(torch.randn(2048, 32, 128), torch.randint(0, 10, (2048,)))
loader = torch.utils.data.DataLoader(data, batch_size=1024, shuffle=True)
losses = []
"""

LIMIT = """\
import resource, pathlib
_status = pathlib.Path("/proc/self/status").read_text()
_used = int(next(line for line in _status.splitlines() if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (_used + (700 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
"""


def test_the_cpu_allocators_refusal_is_healed(kernel: Kernel, start_kernel: Callable[..., Kernel]) -> None:
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 60", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(DATA, ok=True)
    kernel.run(LIMIT, ok=True)
    failed = kernel.run(TRAIN, ok=False)
    assert "DefaultCPUAllocator: can't allocate memory" in failed.content["evalue"]
    assert kernel.value("losses") == []
    healed = kernel.run("%oomdoctor retry", ok=True)
    assert "Healed" in healed.text
    assert kernel.value("__import__('oomdoctor').last_case().outcome.kind") == "healed"

    free = start_kernel()
    for cell in (MODEL, DATA, TRAIN):
        free.run(cell, ok=True)
    for one, other in zip(kernel.value(PARAMETERS), free.value(PARAMETERS), strict=True):
        scale = max(map(abs, other))
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 1e-6 * scale


STATE = "__import__('oomdoctor.objects.leaves', fromlist=['x']).state_digests(globals())"
ADAMW = MODEL.replace("SGD(model.parameters(), lr=0.05, momentum=0.9)", "AdamW(model.parameters(), lr=0.01)")
UNLIMITED = "resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)"


@pytest.mark.parametrize("megabytes", [20, 60])
def test_where_no_change_fits_the_failure_is_the_users_and_the_kernel_goes_on(kernel: Kernel, megabytes: int) -> None:
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.auto = 'exact'\n%config OomDoctor.forecast_time_s = 0", ok=True)
    for cell in (ADAMW, DATA):
        kernel.run(cell, ok=True)
    before = kernel.value(STATE)
    kernel.run(LIMIT.replace("700", str(megabytes)), ok=True)
    failed = kernel.run(TRAIN, ok=False)
    kernel.run(UNLIMITED, ok=True)
    assert any(words in failed.text for words in ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc"))
    assert "can't start new thread" not in failed.text
    case = kernel.value("(lambda case: case and case.to_dict()['outcome'])(__import__('oomdoctor').last_case())")
    left = kernel.value(STATE)
    differs = {name for name in {**left, **before} if left.get(name) != before.get(name)} - {"pathlib", "resource"}
    tried = case is not None and case["attempts"] > 0
    # Of the failed cell the batch stays, and what drawing it took; of a retry nothing.
    assert differs - {"_status", "_used"} <= (set() if tried else {"x", "y", "(random number generators)"})
    assert not tried or case["state"] == "restored"
    assert kernel.run("1 + 1", ok=True).data("text/plain") == ["2"]
    assert "Healed" in kernel.run(LIMIT, ok=True).text + kernel.run(TRAIN, ok=True).text
