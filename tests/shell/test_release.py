"""After a failure, no byte of the cell's locals stays alive, and the traceback still prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel

SETUP = """\
import gc, sys, weakref, traceback
import torch
from oomdoctor.allocator.virtual import active
refs = []

def note(tensor):
    refs.append(weakref.ref(tensor.untyped_storage()))
    return tensor
"""

PLACES = {
    "locals": """\
def step():
    a = note(torch.ones(1 << 20))
    b = [note(torch.ones(1 << 20))]
    return torch.ones(1 << 28)
step()
""",
    "forward": """\
class Net(torch.nn.Module):
    def forward(self, x):
        hidden = note(x * 2)
        return torch.ones(1 << 28) * hidden
net = Net()
net.register_forward_hook(lambda module, args, output: None)
net(note(torch.ones(1 << 20)))
""",
    "backward": """\
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(note(x * 1))
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        kept = note(grad + x)
        return torch.ones(1 << 28)[: grad.numel()]
def step():
    x = torch.ones(1 << 20, requires_grad=True)
    loss = Double.apply(note(x * 3)).sum()
    loss.backward()
step()
""",
    "comprehension and closure": """\
def step():
    base = note(torch.ones(1 << 20))
    return [note(base + torch.ones(1 << 28)[:1]) for _ in range(2)]
step()
""",
    "generator": """\
def batches():
    kept = note(torch.ones(1 << 20))
    yield kept
    yield torch.ones(1 << 28)
def step():
    for batch in batches():
        last = note(batch * 2)
step()
""",
    "chained": """\
def inner():
    a = note(torch.ones(1 << 20))
    torch.ones(1 << 28)
def step():
    b = note(torch.ones(1 << 20))
    try:
        inner()
    except RuntimeError as exc:
        raise ValueError("while stepping") from exc
step()
""",
    "self-referencing": """\
def step():
    loop = []
    loop.append(loop)
    loop.append(note(torch.ones(1 << 20)))
    torch.ones(1 << 28)
step()
""",
    "thread pool": """\
from concurrent.futures import ThreadPoolExecutor
def work():
    a = note(torch.ones(1 << 20))
    raise MemoryError("Unable to allocate 1.00 GiB for an array with shape (134217728,) and data type float64")
def step():
    b = note(torch.ones(1 << 20))
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
step()
""",
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    """A kernel with the extension and a simulated device."""
    kernel = Kernel()
    kernel.run(SETUP, ok=True)
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 0", ok=True)
    kernel.run("%oomdoctor simulate 256MiB", ok=True)
    yield kernel
    kernel.stop()


@pytest.mark.parametrize("place", PLACES)
def test_no_local_of_the_cell_stays_alive(loaded: Kernel, place: str) -> None:
    loaded.run("refs.clear()", ok=True)
    reply = loaded.run(PLACES[place], ok=False)
    assert "oomdoctor could not finish" not in reply.stderr
    noted, alive = loaded.value("(len(refs), sum(ref() is not None for ref in refs))")
    assert noted > 0
    assert alive == 0
    printed = loaded.run("%tb", ok=True).text
    assert "step" in printed or "net(" in printed
    assert reply.content["ename"] in printed
    assert loaded.value("len(traceback.format_exception(sys.last_value)) > 2") is True


def test_without_the_extension_they_do_stay_alive(kernel: Kernel) -> None:
    kernel.run(SETUP, ok=True)
    kernel.run("from oomdoctor.allocator.virtual import switch_on; _device = switch_on('256MiB')", ok=True)
    kernel.run(PLACES["locals"], ok=False)
    assert kernel.value("sum(ref() is not None for ref in refs)") > 0


def test_frames_are_kept_for_debug_when_asked(kernel: Kernel) -> None:
    kernel.run(SETUP, ok=True)
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.keep_frames = True", ok=True)
    kernel.run("%config OomDoctor.forecast_time_s = 0\n%oomdoctor simulate 256MiB", ok=True)
    kernel.run(PLACES["locals"], ok=False)
    assert kernel.value("sum(ref() is not None for ref in refs)") > 0
