"""A real failure of the CPU allocator under RLIMIT_DATA, nothing simulated, healed in a real kernel."""

from __future__ import annotations

from collections.abc import Callable

from kernels import Kernel
from programs import MODEL, PARAMETERS

DATA = """\
data = torch.utils.data.TensorDataset(torch.randn(2048, 32, 128), torch.randint(0, 10, (2048,)))
loader = torch.utils.data.DataLoader(data, batch_size=1024, shuffle=True)
losses = []
torch.set_num_threads(1)
"""

LIMIT = """\
import resource, pathlib
_status = pathlib.Path("/proc/self/status").read_text()
_used = int(next(line for line in _status.splitlines() if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (_used + (700 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
"""

TRAIN = """\
for x, y in loader:
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
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
