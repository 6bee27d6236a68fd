"""What loading oomdoctor costs a cell: two kernels, one with and one without it, 10,000 names in each, in one run.

    python benchmarks/overhead.py [NAMES]

Prints the median time of an empty cell in each and their difference, for namespaces of different make-up, the ratio of
a training step with and without, and the part of the snapshot in it.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from kernels import Kernel

NAMES = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
ROUNDS, CELLS = 5, 60

MAKE_UPS = {
    "numbers and text": "[i, str(i), float(i), True][i % 4]",
    "one list in ten": "[i] if i % 10 == 0 else [i, str(i), float(i)][i % 3]",
    "functions": "(lambda: 0) if i % 4 == 0 else i",
    "one list in four": "[i] if i % 4 == 0 else [i, str(i), float(i)][i % 3]",
}

TIME_CELLS = f"""\
import statistics, time
_shell = get_ipython()
def _median_s():
    took = []
    for _ in range({CELLS}):
        begin = time.perf_counter()
        _shell.run_cell("pass")
        took.append(time.perf_counter() - begin)
    return statistics.median(took)
"""

TIME_STEPS = """\
import torch, time
torch.manual_seed(0)
_model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
_optimizer = torch.optim.AdamW(_model.parameters())
_x = torch.randn(64, 256)
def _steps_s(steps=200):
    begin = time.perf_counter()
    for _ in range(steps):
        _optimizer.zero_grad()
        _model(_x).sum().backward()
        _optimizer.step()
    return (time.perf_counter() - begin) / steps
_steps_s(20)
"""


def main() -> None:
    """Print the tables."""
    plain, loaded = Kernel(), Kernel()
    try:
        plain.run("pass", ok=True)
        loaded.run("%load_ext oomdoctor", ok=True)
        print(f"{NAMES} names; medians of {ROUNDS} x {CELLS} cells\n")
        print(f"{'namespace':<20} {'without':>10} {'with':>10} {'cost':>10} {'ratio':>7}")
        for make_up, value in MAKE_UPS.items():
            for kernel in (plain, loaded):
                kernel.run(TIME_CELLS, ok=True)
                kernel.run(f"globals().update({{f'v{{i}}': {value} for i in range({NAMES})}})", ok=True)
            pairs = [(plain.value("_median_s()"), loaded.value("_median_s()")) for _ in range(ROUNDS)]
            without_s, with_s = (statistics.median(side) for side in zip(*pairs, strict=True))
            cost = f"{1e3 * (with_s - without_s):.2f} ms"
            both = f"{1e3 * without_s:>7.2f} ms {1e3 * with_s:>7.2f} ms"
            print(f"{make_up:<20} {both} {cost:>10} {with_s / without_s:>7.2f}")
        for kernel in (plain, loaded):
            kernel.run(TIME_STEPS, ok=True)
        # As a cell, so that the extension's hooks are in force.
        times = [[float(kernel.run("print(_steps_s())").stdout) for kernel in (plain, loaded)] for _ in range(ROUNDS)]
        ratio = statistics.median(with_s / without_s for without_s, with_s in times)
        print(f"\ntraining step with over without: {ratio:.3f} (median of {ROUNDS} pairs)")
    finally:
        plain.stop()
        loaded.stop()


if __name__ == "__main__":
    main()
