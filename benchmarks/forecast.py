"""How far the forecast is from the truth: ``python benchmarks/forecast.py``.

Each case is forecast, then run for real under torch.profiler. Shown are the rise of the peak over what was alive before
the cell by the events of the CPU allocator, the forecast's error against it beside the margin that it states, the
slowdown against the plain variant as forecast and as measured, and how long the forecast took. Cases run in processes
of their own, since the profiler leaves much behind.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from oomdoctor.forecast import price
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.sizes import format_size

PLAIN = """
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(run(x), y)
    loss.backward()
    optimizer.step()
"""
MICRO_BATCHED = """
for x, y in loader:
    optimizer.zero_grad()
    for part, target in zip(x.chunk(4), y.chunk(4)):
        (F.cross_entropy(run(part), target) / 4).backward()
    optimizer.step()
"""
AUTOCAST = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(run(x), y)
    loss.backward()
    optimizer.step()
"""
VARIANTS = {"plain": PLAIN, "checkpointed": PLAIN, "micro_batched": MICRO_BATCHED, "autocast": AUTOCAST}


class LastStep(nn.Module):
    """A recurrent layer of which the last step is taken."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output at the last step."""
        return self.layer(x)[0][:, -1]


class Mean(nn.Module):
    """The mean over the sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over the second dimension."""
        return x.mean(1)


def mlp() -> tuple[nn.Sequential, torch.Tensor]:
    hidden = [nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(nn.Linear(784, 1024), *hidden, nn.Linear(1024, 10)), torch.randn(2048, 784)


def cnn() -> tuple[nn.Sequential, torch.Tensor]:
    def block(inner: int, outer: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    blocks = [block(3, 32, 1), block(32, 64, 2), block(64, 64, 1), block(64, 128, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(64, 3, 64, 64)


def transformer() -> tuple[nn.Sequential, torch.Tensor]:
    blocks = [nn.TransformerEncoderLayer(192, 6, 768, batch_first=True) for _ in range(6)]
    return nn.Sequential(nn.Embedding(5000, 192), *blocks, Mean(), nn.Linear(192, 10)), torch.randint(
        0, 5000, (64, 128)
    )


def lstm() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(LastStep(nn.LSTM(128, 256, 2, batch_first=True)), nn.Linear(256, 10)), torch.randn(
        256, 64, 128
    )


def gru() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(LastStep(nn.GRU(128, 256, batch_first=True)), nn.Linear(256, 10)), torch.randn(256, 32, 128)


MODELS = {make.__name__: make for make in (mlp, cnn, transformer, lstm, gru)}


def case(model_name: str, variant: str) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs = MODELS[model_name]()
    loader = DataLoader(TensorDataset(inputs, torch.randint(0, 10, (len(inputs),))), batch_size=len(inputs) // 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if variant == "checkpointed" else layer(x)
        return x

    def plainly(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    namespace = {"torch": torch, "F": nn.functional, "run": run, "plainly": plainly, "loader": loader}
    namespace["optimizer"] = torch.optim.AdamW(model.parameters())
    source, plain = VARIANTS[variant], PLAIN.replace("run(", "plainly(")
    accelerator: Any = SimpleNamespace(read=lambda: SimpleNamespace(simulated=False))
    cells = Cells(history=(Cell(number=1, source=source),))
    session = Session(namespace=namespace, cells=cells, accelerator=accelerator)
    attempts = [Attempt(source=text) for text in (plain, "pass", source)]
    begin = time.perf_counter()
    _, idle, found = price(session, attempts, budget=None, prepare=lambda: None, timeout_s=120)
    took = time.perf_counter() - begin
    with torch.profiler.profile(profile_memory=True) as profile:
        exec(source, namespace)
    return {
        "forecast": (found.peak or 0) - (idle.peak or 0),
        "margin": found.error_ratio,
        "refused": found.refused,
        "slowdown": found.slowdown,
        "real": _highest(profile),
        "real_slowdown": _seconds(source, namespace) / _seconds(plain, namespace),
        "took": took,
    }


def _seconds(source: str, namespace: dict[str, Any]) -> float:
    code, best = compile(source, "<timed>", "exec"), float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        exec(code, namespace)
        best = min(best, time.perf_counter() - begin)
    return best


def _highest(profile: Any) -> int:
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def main() -> None:
    print(f"torch {torch.__version__}, one thread, AdamW")
    print(
        f"{'model':12} {'variant':14} {'real':>10} {'error':>8} {'margin':>7} {'slower':>7} {'really':>7} {'took':>7}"
    )
    for model_name in sys.argv[1:] or MODELS:
        for variant in VARIANTS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(case, (model_name, variant))
            if row["refused"]:
                print(f"{model_name:12} {variant:14} refused: {row['refused']}")
                continue
            print(
                f"{model_name:12} {variant:14} {format_size(row['real']):>10} {row['forecast'] / row['real'] - 1:+8.2%}"
                f" {row['margin']:7.0%} {row['slowdown']:6.2f}x {row['real_slowdown']:6.2f}x {row['took']:6.2f}s"
            )


if __name__ == "__main__":
    main()
