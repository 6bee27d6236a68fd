"""Whether the parts that are recomputed are the cheapest that fit: ``benchmarks/recompute.py [--write] [FAMILY ...]``.

Small models of the tests run out of memory on the virtual accelerator at several shares of their peak. The parts that
the plan chose are held against all sets of parts: of modules of the first level, and of layers and stretches of a
``Sequential``. Every set that takes less time is run, the cheapest first, on a device smaller by the margin of a
forecast, until one does not run out of memory; the chosen one is run as well. Segments expand, and that nobody knows
where one begins, which is much of so small a device, is left out. Time is that of the unchanged run and of the forwards
that come again, by what the dry run of the plan told of each module; so a set is compared with another by the same
clock, which is an estimate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "forecast"))

from models import FAMILIES, Family
from plan_lab import Ready, failed, grown, peak_of, unfixed

from oomdoctor import fixes
from oomdoctor.forecast import outcome
from oomdoctor.forecast.attempts import attempt_with
from oomdoctor.forecast.cost import MARGIN
from oomdoctor.forecast.planner import Planner
from oomdoctor.model.fix import Dose
from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.plan import Plan
from oomdoctor.model.unavailable import Refused

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
RESULTS: Final = Path(__file__).parent / "results" / "recompute.txt"
FIX: Final = "checkpoint_blocks"
ROWS: Final = "modules"
"""Under which name a plan says what it knows of each module, in the place of a refusal."""
SHARES: Final = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
LEAST_BYTES: Final = 256 << 20

TOWER: Final = Family(
    name="tower",
    size=2048,
    templates=(
        """\
import torch
from torch import nn

torch.manual_seed(0)
widths = [64, 512, 128, 1024, 256, 64]
layers = []
for narrow, wide in zip(widths, widths[1:]):
    layers.append(nn.Sequential(nn.Linear(narrow, wide), nn.GELU()))
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = [torch.randn($size, 64) for _ in range(2)]
losses = []
""",
        """\
for x in batches:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    ),
)
MODELS: Final = {"tower": TOWER, "cnn": FAMILIES["cnn"]}


def parts_of(rows: Sequence[ModuleMemory]) -> dict[str, frozenset[str]]:
    """Return the parts that may be recomputed by name, each with the modules that it runs."""
    by_path = {row.path: row for row in rows}
    within = {path: frozenset(one for one in by_path if f"{one}.".startswith(f"{path}.")) for path in by_path if path}
    found = {path: inner for path, inner in within.items() if path.count(".") < 1 and _kept(by_path, inner)}
    for path, row in by_path.items():
        children = [one for one in by_path if one.rpartition(".")[0] == path and one] if row.runs_in_turn else []
        found |= {child: within[child] for child in children if _kept(by_path, within[child])}
        for first in range(len(children)):
            for last in range(first + 2, len(children) + 1):
                start, stop = (int(children[at].rpartition(".")[2]) for at in (first, last - 1))
                inner = frozenset[str]().union(*(within[one] for one in children[first:last]))
                found[f"{path}[{start}:{stop + 1}]"] = inner
    return found


def _kept(rows: Mapping[str, ModuleMemory], inner: frozenset[str]) -> bool:
    return len(inner) > 1 or any(rows[path].own > rows[path].output for path in inner)


def sets_of(parts: Mapping[str, frozenset[str]]) -> Iterator[tuple[str, ...]]:
    """Yield every set of parts that have no module in common."""
    names = list(parts)

    def grow(at: int, chosen: tuple[str, ...], taken: frozenset[str]) -> Iterator[tuple[str, ...]]:
        if at == len(names):
            yield chosen
            return
        yield from grow(at + 1, chosen, taken)
        if not taken & parts[names[at]]:
            yield from grow(at + 1, (*chosen, names[at]), taken | parts[names[at]])

    yield from grow(0, (), frozenset())


def cost_of(rows: Sequence[ModuleMemory], names: Sequence[str]) -> float:
    """Return the time of some parts as a share of that of the run."""
    costs = {row.path: row.cost for row in rows}
    total = 0.0
    for name in names:
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        prefix = f"{found[1]}." if found and found[1] else ""
        paths = [f"{prefix}{at}" for at in range(int(found[2]), int(found[3]))] if found else [name]
        total += sum(costs[path] for path in paths)
    return total


def chosen(ready: Ready) -> tuple[str, ...] | None:
    """Return the parts that the plan would have recomputed; None where none was seen to fit."""
    for one in ready.case.plan.candidates:
        if one.fix == FIX and one.forecast.fits:
            return tuple(text.partition(":")[2] for text in str(dict(one.dose.values)["modules"]).split(", "))
    return None


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Have plans know no other fix, and say what they know of each module; nothing but a plan leaves their copies."""
    plan = Planner.plan

    def plan_and_rows(planner: Planner) -> Plan:
        rows = pickle.dumps(planner._evidence.modules).hex()
        made = plan(planner)
        return replace(made, refusals=(*made.refusals, (ROWS, rows)))

    with (
        mock.patch.object(Planner, "plan", plan_and_rows),
        mock.patch.object(outcome, "_HIDDEN_PAGES", 0),
        mock.patch.object(fixes, "catalogue", return_value={FIX: fixes.get(FIX)}),
    ):
        yield


def rows_of(plan: Plan) -> tuple[ModuleMemory, ...]:
    """Return what a plan that was made while ``telling`` knows of each module."""
    return tuple(pickle.loads(bytes.fromhex(dict(plan.refusals)[ROWS])))


def runs(ready: Ready, names: Sequence[str], capacity: int) -> bool:
    """Return whether the program runs on a device of ``capacity`` bytes with some parts recomputed."""
    dose = Dose.of(modules=", ".join(f"model:{name}" for name in names))
    _, attempt = attempt_with(fixes.get(FIX), dose, ready.session, ready.case.evidence)
    return not isinstance(attempt, Refused) and peak_of(ready, attempt, capacity=capacity) is not None


def compared(family: Family) -> Iterator[str]:
    """Yield a line for each budget: what was chosen, and the best."""
    _, whole = unfixed(family)
    for share in SHARES:
        budget = int(whole * share)
        with telling(), failed(family, budget, time_budget_s=120.0) as ready:
            yield f"{family.name:<8} {share:>5.0%}  {ready if isinstance(ready, str) else _compared(ready, budget)}"


def _compared(ready: Ready, budget: int) -> str:
    rows, took = rows_of(ready.case.plan), chosen(ready)
    least = int(budget / (1 + MARGIN))
    sets = {names: cost_of(rows, names) for names in sets_of(parts_of(rows)) if names}
    limit = None if took is None else cost_of(rows, took)
    cheaper = sorted((names for names, cost in sets.items() if limit is None or cost < limit), key=sets.__getitem__)
    best = next((names for names in cheaper if runs(ready, names, least)), None)
    if took is None or limit is None:
        return f"none chosen, {', '.join(best)} fits" if best else f"none of {len(sets)} sets fits"
    if not runs(ready, took, budget):
        return f"chosen, and does not fit: {', '.join(took)}"
    told = f"chosen x{1 + limit:.3f}: {', '.join(took)}; of {len(sets)} sets, {len(cheaper)} take less time"
    if best is None:
        return f"  0.0%  {told}, none of them fits"
    return f"{(1 + limit) / (1 + sets[best]) - 1:+6.1%}  {told}, best x{1 + sets[best]:.3f}: {', '.join(best)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", choices=[*MODELS, []], help="only these")
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"]
    for name in args.family or MODELS:
        for line in compared(grown(MODELS[name], LEAST_BYTES)):
            print(line, flush=True)
            lines.append(line)
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
