from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import live
import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _rowwise, _split
from oomdoctor.incident import find_oom

TRACE: list[int] = []


class Net(nn.Module):
    """A model with something done to its input."""

    def __init__(self, before: Callable[[Net, torch.Tensor], Any] = lambda self, x: x) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.before(self, x))


def centred(self: Net, x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if self.training else x


def dropped(self: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.3, self.training)


def sampled(self: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x) if self.training else x


def path_dropped(self: Net, x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(len(x), 1) > 0.2) / 0.8 if self.training else x


def attended(self: Net, x: torch.Tensor) -> torch.Tensor:
    heads = x.view(len(x), 1, 2, 4)
    out = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1 if self.training else 0.0)
    return out.reshape(len(x), 8)


def python_drawn(self: Net, x: torch.Tensor) -> torch.Tensor:
    return x * 1.0 if not self.training or random.random() < 2 else x


def numpy_drawn(self: Net, x: torch.Tensor) -> torch.Tensor:
    return x * 1.0 if not self.training or numpy.random.rand() < 2 else x


def layers(drop: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=drop, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.fixture(params=["in a child", "in place"])
def anywhere(request, monkeypatch) -> bool:
    if request.param == "in place":
        monkeypatch.setattr(_rowwise, "_can_fork", lambda module, call: False)
    return bool(request.param == "in a child")


def try_out(model: nn.Module, x: torch.Tensor | None = None) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) if x is None else x
    _rowwise.refuse_coupled("model", model, model.forward, _split.divide("model", (x,), {}))


def states() -> tuple[Any, ...]:
    _, keys, position, *_ = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), position  # type: ignore[union-attr]


def open_files() -> set[str]:
    return {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}


def children() -> list[str]:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (centred, "depends on the others"),
        (dropped, "draws random numbers"),
        (sampled, "draws random numbers"),
        (path_dropped, "draws random numbers"),
        (attended, "draws random numbers"),
        (python_drawn, "draws random numbers"),
        (numpy_drawn, "draws random numbers"),
    ],
)
def test_what_is_done_in_training_alone_is_found(before, why, anywhere) -> None:
    model, seen = Net(before), states()
    with pytest.raises(OomDoctorError, match=why):
        try_out(model)
    assert states() == seen
    assert all(part.training for part in model.modules())
    model.eval()
    try_out(model)
    assert not any(part.training for part in model.modules())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Net(), (16, 8)),
        (Net(), (2, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.AlphaDropout(0.2)), (16, 8)),
        (layers(0.0), (16, 5, 8)),
        (layers(0.3), (16, 5, 8)),
        (Recurrent(8, 8, 2, batch_first=True, dropout=0.4), (16, 5, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), (16, 8)),
    ],
)
def test_what_treats_samples_one_by_one_passes(model, shape, anywhere) -> None:
    before, seen = live.digest(model), states()
    try_out(model, torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert live.digest(model) == before
    assert states() == seen


def test_a_trial_that_finds_nothing_lets_all_pass(monkeypatch) -> None:
    monkeypatch.setattr(_rowwise, "_verdict", lambda *args: _rowwise._FINE)
    try_out(Net(centred))


def test_no_verdict_is_a_refusal(monkeypatch) -> None:
    monkeypatch.setattr(_rowwise, "_verdict", lambda *args: os._exit(0))
    began = time.monotonic()
    with pytest.raises(OomDoctorError, match="without a verdict"):
        try_out(Net())
    assert time.monotonic() - began < 30


def test_batch_norm_in_training_is_named(anywhere) -> None:
    with pytest.raises(OomDoctorError, match="over the whole batch"):
        try_out(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))


def test_a_forward_that_fails_on_a_few_rows_is_a_refusal() -> None:
    def fails(self: Net, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a full batch is wanted")

    with pytest.raises(OomDoctorError, match="raised ValueError: a full batch is wanted") as caught:
        try_out(Net(fails))
    assert find_oom(caught.value) is None


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), torch.OutOfMemoryError),
        (MemoryError(), MemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), RuntimeError),
    ],
)
def test_a_forward_that_runs_out_of_memory_on_a_few_rows_tells_what_it_raised(raised, kind) -> None:
    def fails(self: Net, x: torch.Tensor) -> torch.Tensor:
        raise raised

    with pytest.raises(OomDoctorError, match="on a few rows its forward raised") as caught:
        try_out(Net(fails))
    cause = caught.value.__cause__
    assert (type(cause), str(cause)) == (kind, str(raised))
    assert find_oom(caught.value) is cause


LIMITED = """
import numpy.random, resource, sys, torch
from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _rowwise, _split
from oomdoctor.incident import find_oom
torch.set_num_threads(1)
model, x = torch.nn.Conv2d(8, 16, 3), torch.randn(4, 8, 16, 16)
call = _split.divide("model", (x,), {})
flat = torch.nn.Linear(16, 2)
_rowwise.refuse_coupled("flat", flat, flat.forward, call)  # has all imported
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (int(sys.argv[1]) << 10), resource.RLIM_INFINITY))
try:
    _rowwise.refuse_coupled("model", model, model.forward, call)
except OomDoctorError as error:
    print(error, type(find_oom(error)).__name__, sep="; ")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts what a process maps on Linux alone")
def test_a_kernel_that_there_is_no_memory_for_on_a_few_rows_is_memory_that_ran_out() -> None:
    """Whether oneDNN says so or crashes depends on which of its requests is refused."""
    done = subprocess.run([sys.executable, "-c", LIMITED, "64"], check=True, capture_output=True, text=True)
    told, kind = done.stdout.strip().split("; ")
    assert told.startswith("model is not split: ")
    assert kind in ("MemoryError", "RuntimeError")


@pytest.mark.parametrize("short", [False, True])
def test_a_crash_on_a_few_rows_is_told_and_is_memory_where_that_is_refused(short: bool, monkeypatch) -> None:
    monkeypatch.setattr(_rowwise, "_verdict", lambda *args: os.kill(os.getpid(), signal.SIGSEGV))
    monkeypatch.setattr(_rowwise, "is_memory_refused", lambda: short)
    with pytest.raises(OomDoctorError, match="crashed: Segmentation fault") as caught:
        try_out(Net())
    assert type(find_oom(caught.value)) is (MemoryError if short else type(None))


def test_the_trial_leaves_no_trace(capfd) -> None:
    def noted(self: Net, x: torch.Tensor) -> torch.Tensor:
        TRACE.append(len(x))
        print("forward", file=sys.stderr)
        os.write(1, b"forward")
        return x.mul_(2)  # in memory that is shared with the child

    model = Net(noted)
    hook = model.layers[0].register_forward_hook(lambda module, args, out: TRACE.append(-1))
    x = torch.randn(16, 8).share_memory_()
    kept, files, seen = x.clone(), open_files(), states()
    for _ in range(5):
        try_out(model, x)
    assert TRACE == []
    assert torch.equal(x, kept)
    assert states() == seen
    assert open_files() == files
    assert children() == []
    assert capfd.readouterr() == ("", "")
    hook.remove()


def test_in_place_the_hooks_of_a_model_are_not_called(monkeypatch) -> None:
    monkeypatch.setattr(_rowwise, "_can_fork", lambda module, call: False)
    model = Net()
    hook = model.layers[0].register_forward_hook(lambda module, args, out: TRACE.append(-1))
    with pytest.raises(OomDoctorError, match="forward hooks would be called more than once"):
        try_out(model)
    assert TRACE == []
    hook.remove()
    try_out(model)


def test_where_no_process_can_be_made_the_trial_is_in_place(monkeypatch) -> None:
    def full() -> int:
        raise OSError("no more processes")

    files = open_files()
    monkeypatch.setattr(os, "fork", full)
    try_out(Net())
    with pytest.raises(OomDoctorError, match="depends on the others"):
        try_out(Net(centred))
    assert open_files() == files


def test_a_trial_that_does_not_end_is_a_refusal(monkeypatch) -> None:
    monkeypatch.setattr(_rowwise, "_LIMIT_S", 0.5)
    with pytest.raises(OomDoctorError, match="did not end within"):
        try_out(Net(lambda self, x: time.sleep(3000)))
    assert children() == []


def test_an_interrupt_ends_the_child_and_goes_on() -> None:
    files = open_files()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        try_out(Net(lambda self, x: time.sleep(3000)))
    timer.join()
    assert children() == []
    assert open_files() == files
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.enable_grad, live.Peak])
def test_it_runs_within_a_forward_of_a_watched_program(around) -> None:
    with around() as mode:
        with _rowwise.tried_out(live.session(model=(model := Net()), inner=model.layers)):
            x = torch.randn(16, 8)
            assert model(x).requires_grad is torch.is_grad_enabled()
        bad = Net(centred)
        peak = getattr(mode, "peak", 0)
        with _rowwise.tried_out(live.session(bad=bad)), pytest.raises(OomDoctorError, match="depends on the others"):
            bad(x)
        with _rowwise.tried_out(live.session(bad=bad)):
            assert bad(x[:1]).shape == (1, 4)
        assert isinstance(mode, live.Peak) or peak == 0


def test_one_sample_is_no_trial() -> None:
    bad = Net(centred)
    with _rowwise.tried_out(live.session(bad=bad)):
        bad(torch.randn(1, 8))
        for _ in range(2):
            with pytest.raises(OomDoctorError, match="depends on the others"):
                bad(torch.randn(16, 8))


def test_operations_of_the_trial_are_not_seen_by_modes() -> None:
    model, x = Net(), torch.randn(16, 8)
    with live.Peak() as seen:
        try_out(model, x)
    assert seen.peak == 0


def test_a_shadow_run_makes_no_process(monkeypatch) -> None:
    monkeypatch.delattr(os, "fork")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Net(centred)
        with _rowwise.tried_out(live.session(model=model)):
            assert model(torch.randn(16, 8)).shape == (16, 4)


def counting(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (python_drawn, "draws random numbers"),
        (numpy_drawn, "draws random numbers"),
        (counting, "changes model.calls"),
    ],
)
def test_a_shadow_run_finds_what_needs_no_values(before, why) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = Net(before), torch.randn(16, 8)
        with _rowwise.tried_out(live.session(model=model)), pytest.raises(OomDoctorError, match=why):
            model(x)


def test_a_shadow_run_passes_over_dropout_that_was_announced() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        with _rowwise.tried_out(live.session(model=model)):
            assert model(torch.randn(16, 8)).shape == (16, 8)


@pytest.mark.parametrize("done", [lambda self, x: x, centred])
def test_what_a_model_returns_beside_its_rows_is_passed_over(done) -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"loss": out.square().mean(), "logits": out, "cache": object()}

    model = WithLoss(done)
    refused = pytest.raises(OomDoctorError, match="depends on the others") if done is centred else nullcontext()
    with _rowwise.tried_out(live.session(model=model)), refused:
        assert model(torch.randn(16, 8))["logits"].shape == (16, 4)


def test_a_model_that_returns_its_loss_alone_is_refused() -> None:
    class Loss(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    model = Loss()
    with _rowwise.tried_out(live.session(model=model)), pytest.raises(OomDoctorError, match="a single number"):
        model(torch.randn(16, 8))


def leaving(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.balance = x.mean(0).square().sum()
    return x


def test_what_a_forward_leaves_on_its_model_would_be_that_of_the_last_part_alone(anywhere) -> None:
    model = Net(leaving)
    for _ in range(3):
        with pytest.raises(
            OomDoctorError, match=r"its forward changes model\.balance, which would happen for each part"
        ):
            try_out(model)
        model(torch.randn(16, 8))


def caching(self: Net, x: torch.Tensor) -> torch.Tensor:
    self.__dict__.setdefault("scale", torch.full((8,), 2.0))
    return x * self.scale


def test_what_a_forward_makes_at_its_first_call_alone_is_no_change(anywhere) -> None:
    try_out(Net(caching))


def test_weights_that_a_hook_of_torch_derives_are_not_left_behind(anywhere) -> None:
    model = Net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.layers[0])
    with _rowwise.tried_out(live.session(model=model)):
        model(torch.randn(16, 8))


@pytest.mark.parametrize("place", ["the model", "a layer"])
def test_hooks_would_be_called_for_each_part(place) -> None:
    model, seen = Net(), []
    watched = model if place == "the model" else model.layers[1]
    watched.register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    with _rowwise.tried_out(live.session(model=model)), pytest.raises(OomDoctorError, match="called more than once"):
        model(torch.randn(16, 8))
    assert seen == []
