"""The allocator model against traces of real GPUs: do its blocks lie where CUDA's lay, and what does an event cost.

    python benchmarks/allocator.py

Each trace is replayed from the state before its first event, which is found by undoing the events from the end. The
driver's part is taken from the trace: where it put new segments, and when it was given segments back. Everything else,
the address of every allocation above all, is the model's. An event is an allocation or a free; its price is the median
of five replays, in CPU time.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from allocator_traces import TRACES, Outcome, read, run

from oomdoctor.model.sizes import MIB

RESULTS = Path(__file__).parent / "results" / "allocator.txt"
RUNS = 5
HEAD = (
    f"{'trace':<6}{'events':>8}{'allocations':>13}{'identical':>11}{'new segments':>14}{'taken':>7}"
    f"{'reserved MiB':>14}{'equal':>7}{'µs/event':>10}"
)


def main() -> int:
    if not TRACES.is_dir():
        print(f"the recorded traces are not at {TRACES}")
        return 1
    lines, outcomes = [HEAD], []
    for path in sorted(TRACES.glob("*.json.gz")):
        trace = read(path)
        runs = [run(trace) for _ in range(RUNS)]
        outcome, price = runs[0], statistics.median(one.seconds / one.events for one in runs)
        outcomes.append(outcome)
        lines.append(row(path.name.partition(".")[0], outcome, price))
        print("\n".join(lines[-2:] if len(outcomes) == 1 else lines[-1:]))
    lines += summary(outcomes)
    print("\n".join(lines[-2:]))
    RESULTS.write_text("\n".join(lines) + "\n")
    return 0


def row(name: str, outcome: Outcome, price: float) -> str:
    share = outcome.identical / outcome.allocations
    equal = "yes" if outcome.reserved == outcome.expected else f"{outcome.expected / MIB:.0f}"
    return (
        f"{name:<6}{outcome.events:>8}{outcome.allocations:>13}{share:>11.2%}{outcome.segments:>14}{outcome.taken:>7}"
        f"{outcome.reserved / MIB:>14.0f}{equal:>7}{price * 1e6:>10.2f}"
    )


def summary(outcomes: list[Outcome]) -> list[str]:
    identical, allocations = sum(one.identical for one in outcomes), sum(one.allocations for one in outcomes)
    equal = sum(one.reserved == one.expected for one in outcomes)
    return [
        f"{identical} of {allocations} allocations at the recorded address ({identical / allocations:.2%})",
        f"reserved at the end is the recorded one in {equal} of {len(outcomes)}; python {sys.version.split()[0]}",
    ]


if __name__ == "__main__":
    sys.exit(main())
