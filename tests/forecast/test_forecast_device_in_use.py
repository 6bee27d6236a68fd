"""A process whose device is in use: its tensors are forecast where they lie, and the device is not touched."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forecast_lab import TRAIN, forecast, mlp, namespace

from oomdoctor.sandbox.card import fork_flag

EMULATED = """
import sys
sys.path.insert(0, {here!r})
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from forecast_lab import TRAIN, forecast, mlp, namespace, nothing
from oomdoctor.forecast import device_in_use, dry_runs

from oomdoctor.sandbox.card import Card, fork_flag

# A backend that has a device makes the engine start its threads, as a GPU does.
_setup_privateuseone_for_python_backend(rename="other")
ns = namespace(mlp, "adamw")
exec(TRAIN.replace("range(2)", "range(1)"), ns)
flag = fork_flag()

# In place of tensors in the memory of a GPU: those of the model, its gradients and its optimizer.
def there():
    parameters = list(ns["model"].parameters())
    states = [t for state in ns["optimizer"].state.values() for t in state.values() if t.dim()]
    return [*parameters, *(p.grad for p in parameters), *states]
marked = {{t.untyped_storage()._cdata for t in there()}}
def lies_there(found, card):
    storage = found.untyped_storage() if isinstance(found, torch.Tensor) else found
    return storage._cdata in marked
device_in_use.lies_there = lies_there
held = sum(t.nbytes for t in there()) + 2 * 8519680
card = Card(held=held, flag=flag)
dry_runs.in_use = lambda: card
cell = TRAIN.replace("model(x), y", "model(x.to('cuda')), y.to('cuda')")
begin = [t.detach().clone() for t in there()]
{body}
assert all(torch.equal(a, b) for a, b in zip(begin, there(), strict=True))
"""


def run(body):
    code = EMULATED.format(here=str(Path(__file__).parent), body=body)
    made = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout.split("\n")


def test_the_start_is_what_lies_there_and_the_rest_is_followed():
    printed = run("""
looks = "assert model[0].weight.is_cuda and model[0].weight.grad.is_cuda and not loader.dataset[0][0].is_cuda"
found = forecast(ns, looks)
assert (found.refused, found.basis) == (None, "dry run"), found.refused
assert held <= found.peak <= held + 512 * (len(begin) + 1), (held, found.peak)
trained = forecast(ns, cell)
assert trained.refused is None, trained.refused
print(trained.peak)
gone = forecast(ns, "del model, optimizer, loss\\nassert torch.cuda.memory_allocated() == 2 * 8519680")
assert gone.refused is None, gone.refused
""")
    # The same program on a device that this machine lacks needs as much in its second step.
    apart = forecast(namespace(mlp, "adamw"), "model.to('cuda')\n" + TRAIN.replace("(x), y", "(x.cuda()), y.cuda()"))
    assert int(printed[0]) == pytest.approx(apart.peak, rel=0.001)


def test_the_start_is_brought_back_on_fakes():
    run("""
from torch.utils._python_dispatch import _disable_current_modes
saved = [p.detach().clone() for p in ns["model"].parameters()]
def prepare():
    with torch.no_grad():
        for p, old in zip(ns["model"].parameters(), saved):
            p.copy_(old)
            with _disable_current_modes():  # as a snapshot puts contents back
                p.copy_(old)
            p.grad = None
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
before = forecast(ns, "pass")
found = forecast(ns, "assert model[0].weight.grad is None and model[0].weight.is_cuda", prepare=prepare)
assert found.refused is None, found.refused
assert before.peak - found.peak >= sum(p.nbytes for p in saved), (before.peak, found.peak)
def fails():
    raise RuntimeError("no")
assert "could not be brought back: RuntimeError: no" in forecast(ns, "pass", prepare=fails).refused
""")


def test_what_cannot_be_right_is_refused():
    run("""
loss = ns["model"](torch.ones(2, 256)).sum()
marked.add(loss.untyped_storage()._cdata)
found = forecast(ns | {"loss": loss}, "loss.backward()")
assert "goes back through a graph that an earlier cell recorded on cuda:0" in found.refused, found.refused
marked.discard(loss.untyped_storage()._cdata)
del loss
card = Card(held=held)  # the engine's threads are gone, and nothing mends that
assert "cannot be emulated with this torch: RuntimeError: Unable to handle autograd" in forecast(ns, cell).refused
""")


def test_the_flag_of_the_engine_is_found():
    address = fork_flag()
    assert address is None or address > 0


@pytest.mark.gpu
def test_the_forecast_beside_a_live_context_is_what_the_device_then_needs():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    ns = namespace(mlp, "adamw")
    ns["model"].cuda()
    cell = TRAIN.replace("model(x), y", "model(x.to('cuda')), y.to('cuda')")
    exec(cell, ns)
    found = forecast(ns, cell)
    torch.cuda.reset_peak_memory_stats()
    exec(cell, ns)
    assert found.refused is None
    assert found.peak == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.03)
    assert found.reserved == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.05)
