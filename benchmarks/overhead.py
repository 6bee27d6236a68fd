"""What loading oomdoctor costs a cell and a training step that do not fail, as ratios in one run.

    python benchmarks/overhead.py [FILE]

Prints the tables, and writes them to FILE. Each row is measured in a process of its own, in one IPython shell: in each
round the extension is unloaded, loaded and unloaded again, and the same cells run each time. Cost and ratio are of the
loaded cells to those before and after, medians of all rounds; noise is the same ratio of the two unloaded ones, which
would be 1 on a machine where nothing else happens. Times are CPU time on one thread, so that other work on the machine
shows less.

A cell is ``pass``, in namespaces of different content: its cost is that of the snapshot alone. The steps run in a cell
as well, whose first step copies weights, gradients and optimizer state to host memory, once in each cell: the tables
tell that first step and all others apart. The whole cell, snapshot, copies and all, is given for one of its steps: in a
cell of more steps it comes nearer to a step's own cost.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

sys.path.insert(0, str(Path(__file__).parents[1]))

ROUNDS: Final = 13
CELLS: Final = 20
STEPS: Final = 20
TARGET_CELL_MS: Final = 1.0
"""At up to 10,000 objects, whatever they are."""
TARGET_MANY_MS: Final = 5.0
"""At up to 100,000."""
TARGET_STEP: Final = 0.01

_DEFINED: Final = """\
from dataclasses import dataclass, field
class Plain:
    def __init__(self, at):
        self.at, self.text = at, str(at)
class Slotted:
    __slots__ = ("at", "items")
    def __init__(self, at):
        self.at, self.items = at, [at]
@dataclass
class Data:
    at: int
    more: dict = field(default_factory=dict)
"""
_OBJECTS: Final = {
    "instances": "Plain(i)",
    "objects with slots": "Slotted(i)",
    "dataclasses": "Data(i)",
    "lists": "[i, [i]]",
    "dicts": "{'at': i, 'items': [i]}",
    "texts": "str(i)",
}
_MOST: Final = 10_000
"""Objects up to which ``TARGET_CELL_MS`` holds; beyond it is ``TARGET_MANY_MS``."""

CONTENTS: Final = {
    "nothing": "pass",
    "100 names": "globals().update({f'v{i}': [i, str(i), float(i), True][i % 4] for i in range(100)})",
    "10,000 names": "globals().update({f'v{i}': [i, str(i), float(i), True][i % 4] for i in range(10_000)})",
    "10,000 names, 2,500 of lists": (
        "globals().update({f'v{i}': [i] if i % 4 == 0 else [i, str(i), float(i)][i % 3] for i in range(10_000)})"
    ),
    "10,000 names, 2,500 of functions": (
        "globals().update({f'v{i}': (lambda: 0) if i % 4 == 0 else i for i in range(10_000)})"
    ),
    **{
        f"{count:,} {kind}": f"{_DEFINED}made = [{text} for i in range({count})]"
        for count in (1_000, 10_000, 15_000, 60_000, 100_000)
        for kind, text in _OBJECTS.items()
    },
    "100,000 names of instances": f"{_DEFINED}globals().update({{f'v{{i}}': Plain(i) for i in range(100_000)}})",
    "a model of 1,000 modules": (
        "import torch\nmodel = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(999)))"
    ),
}
"""What the namespace holds, by the text of the cell that fills it."""

MODELS: Final = {
    "MLP, 8 of 256, batch 64": ("*(nn.Linear(256, 256) for _ in range(8))", "64, 256"),
    "MLP, 8 of 512, batch 64": ("*(nn.Linear(512, 512) for _ in range(8))", "64, 512"),
    "CNN, 4 of 32, batch 16": ("*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(4))", "16, 32, 32, 32"),
    "MLP, 100 of 16, batch 8": ("*(nn.Linear(16, 16) for _ in range(100))", "8, 16"),
}
"""Models and the shape of their input. The smaller the step, the more a fixed price of each shows."""

TRAIN: Final = """\
import time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential({layers})
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn({shape})


def train(steps):
    took = []
    for _ in range(steps):
        began = time.process_time()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        took.append(time.process_time() - began)
    return took


warm = train(3)
"""


def begin(cell: str) -> InteractiveShell:
    """Return a shell in which ``cell`` was run."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.run_cell(cell).raise_error()
    return shell


def in_turns(shell: InteractiveShell, once: Callable[[], Any]) -> list[tuple[Any, Any, Any]]:
    """Return what ``once`` returns without, with and again without the extension, for each round."""
    rounds = []
    for _ in range(ROUNDS):
        gc.collect()
        before = once()
        shell.run_line_magic("load_ext", "oomdoctor")
        loaded = once()
        shell.run_line_magic("unload_ext", "oomdoctor")
        rounds.append((before, loaded, once()))
    return rounds[1:]  # the first one imports


def measure_cell(cell: str) -> list[tuple[float, float, float]]:
    """Return seconds of an empty cell in a namespace that ``cell`` fills."""
    shell = begin(cell)

    def once() -> float:
        shell.run_cell("pass")
        took = []
        for _ in range(CELLS):
            began = time.process_time()
            shell.run_cell("pass")
            took.append(time.process_time() - began)
        return statistics.median(took)

    return in_turns(shell, once)


def measure_steps(layers: str, shape: str) -> list[tuple[Any, Any, Any]]:
    """Return seconds of the first step of a cell, the median of all others, and the whole cell's for each step."""
    shell = begin(TRAIN.format(layers=layers, shape=shape))

    def once() -> tuple[float, float, float]:
        began = time.process_time()
        shell.run_cell(f"took = train({STEPS})").raise_error()
        whole = time.process_time() - began
        first, *others = shell.user_ns["took"]
        return first, statistics.median(others), whole / STEPS

    return in_turns(shell, once)


def compared(rounds: list[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """Return seconds without, what it costs, the ratio with to without, and that of without to itself."""
    without = statistics.median((before + after) / 2 for before, _, after in rounds)
    cost = statistics.median(loaded - (before + after) / 2 for before, loaded, after in rounds)
    ratio = statistics.median(2 * loaded / (before + after) for before, loaded, after in rounds)
    return without, cost, ratio, statistics.median(after / before for before, _, after in rounds)


def alone(do: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(do, args)


def table() -> Iterator[str]:
    yield f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    yield f"medians of {ROUNDS - 1} rounds of {CELLS} cells, or of a cell of {STEPS} steps"
    yield ""
    yield f"{'a cell, where there is':<36}{'without':>11}{'cost':>11}{'ratio':>8}{'noise':>8}{'target':>14}"
    for name, cell in CONTENTS.items():
        without, cost, ratio, noise = compared(alone(measure_cell, cell))
        count = int(name.partition(" ")[0].replace(",", "")) if name[0].isdigit() else 0
        target = TARGET_CELL_MS if count <= _MOST else TARGET_MANY_MS
        met = f"< {target:g} ms {'met' if 1e3 * cost < target else 'missed'}"
        yield f"{name:<36}{1e3 * without:>8.3f} ms{1e3 * cost:>8.3f} ms{ratio:>8.2f}{noise:>8.2f}{met:>14}"
    yield ""
    yield f"{'a training step':<36}{'without':>11}{'cost':>11}{'ratio':>8}{'noise':>8}{'target':>14}"
    for name, (layers, shape) in MODELS.items():
        rounds = alone(measure_steps, layers, shape)
        for place, label in enumerate(("the first of a cell", "each other one", f"a cell of {STEPS} / {STEPS}")):
            without, cost, ratio, noise = compared([tuple(one[place] for one in turn) for turn in rounds])
            met = f"< {TARGET_STEP:.0%} {'met' if ratio < 1 + TARGET_STEP else 'missed'}" if place == 1 else ""
            start = f"{name if not place else '':<26}"
            yield (
                f"{start:<26}{label:<20}{1e3 * without:>8.3f} ms{1e3 * cost:>8.3f} ms"
                f"{ratio:>8.3f}{noise:>8.3f}{met:>14}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="where to write the tables to as well")
    args = parser.parse_args()
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    if args.file is not None:
        args.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
