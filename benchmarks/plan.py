"""Whether the plan is right, and how long it takes: ``benchmarks/plan.py [--doses | --time] [--write] [FAMILY ...]``.

The healing loop. Each model family of the tests, grown until its peak is some 48 MiB, runs out of memory on the virtual
accelerator with 90, 70, 50 and 30 % of what it takes at its peak without a change. The plan is made with forecasts on;
then the cell is retried as ``auto`` would, with ``exact`` and with ``any``. Shown is how each case ended, and in how
many of those that were retried the first retry healed. Retries run in forked copies, so each begins alike.

``--doses``: for each fix of several doses that the plan offers, every dose is tried for real, mildest first: how many
steps does the chosen one lie from the mildest that runs?

``--time``: one forecast of the steps of a GPT-2 of the smallest size, five candidates beside it, and how long the user
is kept waiting who does not wait for the plan, as medians of some rounds. Other programs on the machine count, so the
load average is printed, and the processors' time, which on a machine at rest is the time of one dry run.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "forecast"))

from models import FAMILIES, Family
from plan_lab import Ready, failed, grown, healed, steps_off, unfixed

from oomdoctor.forecast import price
from oomdoctor.forecast.dry_runs import DryRuns
from oomdoctor.model.session import Attempt, Cell, Cells, Session

RESULTS = Path(__file__).parent / "results" / "plan.txt"
SHARES = (0.9, 0.7, 0.5, 0.3)
LEAST_BYTES = 48 << 20
ROUNDS = 3


def ending(result: dict[str, Any]) -> str:
    """Return in a word how a retry ended."""
    if result["kind"] == "healed":
        return "first retry" if result["attempts"] == 1 else f"escalated ({result['attempts']})"
    return str(result["kind"]).replace("_", " ")


def cases(families: list[Family], shares: tuple[float, ...], time_s: float) -> Iterator[tuple[str, float, Any]]:
    """Yield each case with the family's name and the share, ready to be retried, or in words why there is none."""
    for small in families:
        family = grown(small, LEAST_BYTES)
        _, peak = unfixed(family)
        for share in shares:
            with failed(family, int(peak * share), time_budget_s=time_s) as ready:
                yield family.name, share, ready


def matrix(say: Callable[[str], None], families: list[Family], shares: tuple[float, ...], time_s: float) -> None:
    """Retry every case, and say how it ended."""
    ends: dict[str, Counter[str]] = {"exact": Counter(), "any": Counter()}
    say(f"{'family':<16} {'of peak':>7}  {'exact':<16} {'any':<16} plan")
    for name, share, ready in cases(families, shares, time_s):
        if not isinstance(ready, Ready):
            say(f"{name:<16} {share:>7.0%}  {ready}")
            continue
        results = {auto: healed(ready, auto) for auto in ends}
        found = {auto: ending(result) for auto, result in results.items()}
        for auto, end in found.items():
            ends[auto][end] += 1
        say(f"{name:<16} {share:>7.0%}  {found['exact']:<16} {found['any']:<16} {ready.planned_s:.1f} s")
        for auto, end in found.items():
            if end not in ("first retry", "none admitted"):
                say(f"{'':<26}{auto}: {', '.join(results[auto]['fixes'])}: {results[auto]['why']}")
    for auto, counted in ends.items():
        tried = counted.total() - counted["none admitted"]
        first = counted["first retry"] / tried if tried else 0.0
        told = ", ".join(_counted(counted))
        say(f"auto {auto}: the first retry healed {first:.1%} of {tried} that were retried; {told}")


def doses(say: Callable[[str], None], families: list[Family], shares: tuple[float, ...], time_s: float) -> None:
    """Try every dose of every fix that is offered, and say how far the chosen one lies from the mildest that runs."""
    off: Counter[int] = Counter()
    for name, share, ready in cases(families, shares, time_s):
        if not isinstance(ready, Ready):
            say(f"{name:<16} {share:>7.0%}  {ready}")
            continue
        steps = {one.fix: step for one in ready.case.plan.candidates if (step := steps_off(ready, one)) is not None}
        off.update(steps.values())
        told = ", ".join(f"{fix} {step:+d}" for fix, step in steps.items()) or "no fix of several doses runs in any"
        say(f"{name:<16} {share:>7.0%}  {told}")
    within = sum(count for step, count in off.items() if abs(step) <= 1)
    if off:
        say(f"{within / off.total():.1%} of {off.total()} within one step of the mildest that runs; {dict(off)}")


def _counted(counter: Counter[str]) -> list[str]:
    return [f"{end}: {count}" for end, count in sorted(counter.items())]


STEPS = """
for step in range(20):
    optimizer.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
"""


def gpt2() -> dict[str, Any]:
    """Return a namespace with GPT-2 of the smallest size (124 million parameters), two sequences of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    tokens = torch.randint(0, 50257, (2, 256))
    return {"model": model, "tokens": tokens, "optimizer": torch.optim.AdamW(model.parameters())}


def of_children() -> float:
    """Return the processors' time of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def median(rounds: list[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def times(say: Callable[[str], None]) -> None:
    """Time forecasts of GPT-2 and what the user's process is held up by."""
    namespace = gpt2()
    accelerator: Any = SimpleNamespace(read=lambda: SimpleNamespace(simulated=True))
    cells = Cells(history=(Cell(number=1, source=STEPS),))
    session = Session(namespace=namespace, cells=cells, accelerator=accelerator)

    def forecast(count: int) -> tuple[float, float]:
        begin, used = time.perf_counter(), of_children()
        found = price(session, [Attempt(source=STEPS)] * count, budget=None, prepare=lambda: None, timeout_s=300)
        assert all(one.refused is None for one in found), found
        return time.perf_counter() - begin, of_children() - used

    def held_up() -> tuple[float, float]:
        def work(dry_runs: Any) -> Iterator[Any]:
            dry_runs.begin(0, Attempt(source=STEPS))
            yield dry_runs.next()

        before = time.perf_counter()
        copy = DryRuns(session, lambda: None, budget=None, timeout_s=60).in_copy(work, waits=False)
        forked, longest = time.perf_counter() - before, 0.0
        while not copy.over:
            time.sleep(0.01)
            begin = time.perf_counter()
            copy.poll()
            longest = max(longest, time.perf_counter() - begin)
        return forked, longest

    forecast(1)  # loads what dry runs need
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    fork = time.perf_counter() - begin
    single, six = (median([forecast(count) for _ in range(ROUNDS)]) for count in (1, 6))
    begun, polled = zip(*(held_up() for _ in range(ROUNDS)), strict=True)
    say(f"GPT-2 (124 M parameters), two sequences of 256 tokens, load average {os.getloadavg()[0]:.1f}")
    say(f"one forecast            {single[0]:6.2f} s, {single[1]:6.2f} s of processors")
    say(f"five candidates and it  {six[0]:6.2f} s, {six[1]:6.2f} s of processors")
    say(f"held up to begin        {statistics.median(begun):6.3f} s  (a fork alone: {fork:.3f} s)")
    say(f"held up by one look     {max(polled):6.3f} s at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", choices=[*FAMILIES, []], help="only these")
    parser.add_argument("--share", action="append", type=float, help="only this share of the peak, such as 0.5")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the forecasts of one plan")
    parser.add_argument("--time", action="store_true", help="time forecasts instead")
    parser.add_argument("--doses", action="store_true", help="try every dose instead")
    parser.add_argument("--write", action="store_true", help="write results/plan.txt")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    if args.time:
        times(say)
    else:
        families = [FAMILIES[name] for name in args.family or FAMILIES]
        do = doses if args.doses else matrix
        do(say, families, tuple(args.share or SHARES), args.seconds)
    say(f"load average at the end {os.getloadavg()[0]:.1f}")
    if args.write:
        mark = "Time" if args.time else "Doses" if args.doses else "Healing"
        parts = dict(_parts(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}
        parts[mark] = "\n".join(lines)
        text = "\n\n".join(f"{name}\n{'-' * len(name)}\n{body}" for name, body in sorted(parts.items()))
        RESULTS.write_text(text + "\n", encoding="utf-8")


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a result file, each by its title."""
    for part in text.strip().split("\n\n"):
        title, _, body = part.split("\n", 2)
        yield title, body


if __name__ == "__main__":
    main()
