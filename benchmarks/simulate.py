"""What the virtual accelerator costs: ratios of one run, on small training steps, and the price of an event.

    python benchmarks/simulate.py

The smaller the operations, the more the fixed price of each shows. Times are medians of
CPU time on one thread, so that other work on the machine does not show; the ratio is what to compare.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.allocator.virtual import simulate
from oomdoctor.model.sizes import KIB

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    print(f"{'training step':<28}{'off ms':>9}{'on ms':>9}{'ratio':>8}")
    for name, width, batch in (
        ("MLP 64, batch 8", 64, 8),
        ("MLP 512, batch 64", 512, 64),
        ("MLP 2048, batch 64", 2048, 64),
    ):
        off, on = compare(training_step(width, batch))
        print(f"{name:<28}{off * 1e3:>9.2f}{on * 1e3:>9.2f}{on / off:>8.2f}")
    small = torch.ones(4)
    off, on = compare(lambda: [small + small for _ in range(1000)])
    print(f"one small operation: {off * 1e3:.2f} µs off, {on * 1e3:.2f} µs on")
    print(f"one event of the allocator model: {event_s() * 1e6:.2f} µs")


def training_step(width: int, batch: int) -> Callable[[], object]:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch, width)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(work: Callable[[], object], rounds: int = 30) -> tuple[float, float]:
    """Return median seconds of ``work`` without and with the accelerator, measured in turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    work()
    for _ in range(3):
        times[False] += timed(work, rounds // 3)
        with simulate("8GiB"):
            times[True] += timed(work, rounds // 3)
    return statistics.median(times[False]), statistics.median(times[True])


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return seconds


def event_s() -> float:
    """Return seconds for one malloc or free in an allocator with a thousand free blocks."""
    allocator = CachingAllocator()
    live = [allocator.malloc(KIB * (n % 700 + 1)) for n in range(2000)]
    for block in live[::2]:
        allocator.free(block)
    began = time.process_time()
    for n in range(20_000):
        allocator.free(allocator.malloc(KIB * (n % 600 + 1)))
    return (time.process_time() - began) / 40_000


if __name__ == "__main__":
    main()
