"""A bench for the forecast: sessions made of plain namespaces, models, and a measurement that is not ours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomdoctor.forecast import price
from oomdoctor.model.plan import Forecast
from oomdoctor.model.session import Attempt, Cell, Cells, Session

STEP = """
{indent}out = model(x)
{indent}loss = functional.mse_loss(out, y)
{indent}optimizer.zero_grad()
{indent}loss.backward()
{indent}optimizer.step()
"""
"""A step of training, to be put into a loop."""


class Bench:
    """An accelerator that only says which kind it is; ``simulated`` puts a caching allocator in between."""

    name, measure = "bench", ""

    def __init__(self, *, simulated: bool) -> None:
        self._simulated = simulated

    def read(self) -> Any:
        return SimpleNamespace(simulated=self._simulated)

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...


def session(namespace: dict[str, Any], source: str, *, simulated: bool = False, shell: Any = None) -> Session:
    cells = Cells(history=(Cell(number=1, source=source),))
    return Session(namespace=namespace, cells=cells, accelerator=Bench(simulated=simulated), shell=shell)


def nothing() -> None:
    """There is nothing to bring back."""


def forecast(namespace: dict[str, Any], source: str, *, simulated: bool = False, **kwargs: Any) -> Forecast:
    kwargs = {"budget": None, "prepare": nothing, "timeout_s": 60.0} | kwargs
    (found,) = price(session(namespace, source, simulated=simulated), [Attempt(source=source)], **kwargs)
    return found


def rise(namespace: dict[str, Any], source: str) -> int:
    """Forecast how far the peak of the cell lies above what is alive when it starts."""
    return forecast_and_rise(namespace, source)[1]


def forecast_and_rise(namespace: dict[str, Any], source: str) -> tuple[Forecast, int]:
    """Forecast a cell, and how far its peak lies above what is alive when it starts."""
    attempts = [Attempt(source="pass"), Attempt(source=source)]
    idle, found = price(session(namespace, source), attempts, budget=None, prepare=nothing, timeout_s=60.0)
    return found, _above(idle, found)


def rises(namespace: dict[str, Any], sources: Mapping[str, str]) -> dict[str, int]:
    """Forecast how far each of the cells rises, which takes much less than one after the other."""
    attempts = [Attempt(source=source) for source in ("pass", *sources.values())]
    idle, *found = price(session(namespace, ""), attempts, budget=None, prepare=nothing, timeout_s=200.0)
    return {name: _above(idle, one) for name, one in zip(sources, found, strict=True)}


def _above(idle: Forecast, found: Forecast) -> int:
    assert found.refused is None, found.refused
    assert found.peak is not None
    assert idle.peak is not None
    return found.peak - idle.peak


def check_margin(make: Callable[[], dict[str, Any]], source: str, *, most: float = 0.10) -> None:
    """Check that the real peak lies within the margin that is told, and that this is not too wide to be of use.

    Args:
        make: returns the namespace, alike each time.
        most: the widest margin that there may be.
    """
    found, rises_by = forecast_and_rise(make(), source)
    assert 0.05 <= found.error_ratio <= most
    assert rises_by == pytest.approx(measured_rise(make(), source), rel=found.error_ratio)


def measured_rise(namespace: dict[str, Any], source: str) -> int:
    """Run the cell for real and return how far the CPU allocator went up, by the events of torch.profiler."""
    gc.collect()  # what is freed meanwhile would count for it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        exec(compile(source, "<measured>", "exec"), namespace)
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        level += change
        peak = max(peak, level)
    return peak


def mlp() -> tuple[nn.Module, DataLoader[Any]]:
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return model, _loader(torch.randn(1024, 256), torch.randint(0, 10, (1024,)), batch=256)


def cnn() -> tuple[nn.Module, DataLoader[Any]]:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]

    model = nn.Sequential(
        *block(3, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, _loader(torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,)), batch=16)


class Transformer(nn.Module):
    """A small encoder with a head; its blocks can be checkpointed."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 10)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x.mean(1))


def transformer(*, checkpointed: bool = False) -> tuple[nn.Module, DataLoader[Any]]:
    loader = _loader(torch.randint(0, 500, (128, 64)), torch.randint(0, 10, (128,)), batch=32)
    return Transformer(checkpointed=checkpointed), loader


def checkpointed_transformer() -> tuple[nn.Module, DataLoader[Any]]:
    return transformer(checkpointed=True)


def _loader(inputs: torch.Tensor, targets: torch.Tensor, *, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch, shuffle=True)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}

TRAIN = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""

MICRO_BATCHED = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4)):
            loss = F.cross_entropy(model(part), target) / 4
            loss.backward()
        optimizer.step()
"""


def namespace(make: Any, optimizer: str = "sgd") -> dict[str, Any]:
    torch.manual_seed(0)
    model, loader = make()
    made = OPTIMIZERS[optimizer](model.parameters())
    return {"torch": torch, "nn": nn, "F": nn.functional, "model": model, "loader": loader, "optimizer": made}


def open_descriptors() -> set[str]:
    """Return the descriptors of this process, without IPython's history: threads of other tests' shells close it."""
    found = {path.name: str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {f"{number} {name}" for number, name in found.items() if not name.endswith("history.sqlite")}
