"""How far the forecast is from the truth, and how far the forecast of what a change saves.

    python benchmarks/forecast.py [--family NAME ...] [--fixes] [--write]

Cases: twelve model families (``forecast_models``) x {SGD with momentum, AdamW} x {fp32, bf16 autocast, checkpointed
blocks, gradients accumulated over four parts}. Each is forecast, then run for real under torch.profiler, whose events
come from the CPU allocator itself and know nothing of our tracker; compared is how far the peak rises over what is
alive before the cell. The saving of a variant is what its peak lies below that of fp32.

``--fixes`` takes the fixes themselves instead: each, in its mildest dose, as the patch or on the live objects, on up to
three of the tests' programs that it applies to. Savings below one percent of the peak are left out: there, the ratio
of two small numbers says nothing.

torch-kitsune's ``predict_memory``, where it is installed (it is no dependency), is asked for the same cases in its own
terms: the model, one sample's shape, the batch, the optimizer, the dtype. It knows nothing of checkpointing, and of
accumulation only what a smaller batch says. Its figure is held against the model's own bytes and the measured rise.

``--write`` keeps the rows in ``results/forecast.json`` beside what other calls have put there, and writes the summary
of all into ``results/forecast.txt``. The margins in ``oomdoctor/forecast/cost.py`` are those at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixes"))

from forecast_models import FAMILIES, Family, load_libraries
from forecast_report import CONVOLUTION, NONE, RECURRENT, RESULTS, error, fix_savings, report

from oomdoctor.forecast import price
from oomdoctor.model.fix import Effect
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.unavailable import Refused

VARIANTS = ("fp32", "bf16", "checkpointed", "accumulated")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}
PARTS = 4
FIXES = (
    *("micro_batch", "checkpoint_blocks", "autocast", "chunked_loss", "lighter_optimizer", "set_to_none"),
    *("no_grad_eval", "optimizer_foreach_off", "detach_history", "optimizer_in_backward", "save_on_cpu"),
)
PROGRAMS_EACH = 3
TIME_S = 120.0

Row = dict[str, Any]


def cell_of(family: Family, variant: str) -> str:
    """Return the training loop as a cell."""
    lines = ["for batch, targets in loader:"]
    for phase in family.phases:
        lines.append(f"    {phase.optimizer}.zero_grad()")
        if variant == "accumulated":
            lines.append(f"    for x, y in zip(batch.chunk({PARTS}), targets.chunk({PARTS})):")
            lines.append(f"        loss = ({phase.loss}) / {PARTS}")
            lines.append("        loss.backward()")
        else:
            lines.append("    x, y = batch, targets")
            autocast = "torch.autocast('cpu', torch.bfloat16)"
            lines.append(f"    with {autocast}:" if variant == "bf16" else "    if True:")
            lines.append(f"        loss = {phase.loss}")
            lines.append("    loss.backward()")
        lines.append(f"    {phase.optimizer}.step()")
    return "\n".join(lines)


def namespace_of(family: Family, optimizer: str, variant: str) -> dict[str, Any]:
    """Return what the cell finds."""
    torch.manual_seed(0)
    modules = family.make(variant == "checkpointed")
    data = family.data(family.steps * family.batch)
    namespace: dict[str, Any] = {"torch": torch, "F": nn.functional, **modules}
    for name, module in modules.items():
        prefix = "" if name == "model" else f"{name}_"
        namespace[f"{prefix}optimizer"] = OPTIMIZERS[optimizer](module.train().parameters())
    namespace["loader"] = DataLoader(TensorDataset(*data), batch_size=family.batch, shuffle=True)
    return namespace


def forecast(session: Session, attempts: Sequence[Attempt]) -> tuple[list[int], list[Any], float]:
    """Return how far the peaks of the attempts rise over what is alive before, their forecasts, and the seconds.

    Raises:
        RuntimeError: there is none.
    """
    began = time.perf_counter()
    idle, *found = price(
        session, [Attempt(source="pass"), *attempts], budget=None, prepare=lambda: None, timeout_s=TIME_S
    )
    took = time.perf_counter() - began
    for one in (idle, *found):
        if one.peak is None:
            raise RuntimeError(one.refused)
    return [one.peak - idle.peak for one in found], found, took


def measure(run: Callable[[], None]) -> int:
    """Return how far the bytes of the CPU allocator rise while it runs, by the events of torch.profiler."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def session_of(namespace: dict[str, Any], source: str) -> Session:
    cells = Cells(history=(Cell(number=1, source=source),))
    return Session(namespace=namespace, cells=cells, accelerator=plain_memory())


def plain_memory() -> Any:
    """Stand for host memory, where no caching allocator lies in between."""
    return SimpleNamespace(read=lambda: SimpleNamespace(simulated=False))


def model_row(name: str, optimizer: str, variant: str) -> Row:
    """Forecast and measure one case."""
    family = FAMILIES[name]
    namespace, source = namespace_of(family, optimizer, variant), cell_of(family, variant)
    model_bytes = sum(_bytes(value) for value in namespace.values() if isinstance(value, nn.Module))
    row: Row = {"family": name, "optimizer": optimizer, "variant": variant, "kernels": _kernels(family)}
    row["kitsune"], row["kitsune_why"] = kitsune(family, namespace, optimizer, variant)
    try:
        (row["forecast"],), (found,), row["took_s"] = forecast(session_of(namespace, source), [Attempt(source=source)])
    except RuntimeError as error:
        return row | {"why": str(error)}
    row["margin"] = found.error_ratio
    row["measured"] = measure(lambda: exec(compile(source, "<cell>", "exec"), namespace))
    row["model"] = model_bytes
    return row


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _kernels(family: Family) -> str:
    modules = [module for root in family.make(False).values() for module in root.modules()]
    if any(isinstance(module, nn.LSTM) for module in modules):
        return RECURRENT
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
    return CONVOLUTION if convolves else NONE


def kitsune(family: Family, namespace: dict[str, Any], optimizer: str, variant: str) -> tuple[int | None, str | None]:
    """Return the bytes that torch-kitsune expects, or why it says nothing."""
    try:
        from kitsune.predict import predict_memory
    except ImportError:
        return None, "not installed"
    inputs = [(namespace["model"], namespace["loader"].dataset.tensors[0])]
    if "critic" in namespace:
        images, noise = namespace["loader"].dataset.tensors
        inputs = [(namespace["model"], noise), (namespace["critic"], images)]
    batch = family.batch // (PARTS if variant == "accumulated" else 1)
    dtype = "bfloat16" if variant == "bf16" else "float32"
    state, total = torch.get_rng_state(), 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for model, tensor in inputs:
                found = predict_memory(model, tuple(tensor.shape[1:]), batch, dtype, optimizer.lower())
                total += found.total_bytes
    except Exception as error:  # noqa: BLE001  another program's failure is a result here
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:100]
    finally:
        torch.set_rng_state(state)
        for model, _ in inputs:
            model.train().zero_grad()
    return total, None


def fix_rows(fix_id: str) -> list[Row]:
    """Forecast and measure what a fix saves on some programs."""
    from models import FAMILIES as PROGRAMS

    # Each fix begins at another program, so that together they see many.
    programs, rows = list(PROGRAMS.values()), []
    first = FIXES.index(fix_id) * 5 % len(programs)
    for program in (*programs[first:], *programs[:first]):
        row = fix_row(fix_id, program) if len(rows) < PROGRAMS_EACH else None
        rows += [row] if row is not None else []
    return rows


def fix_row(fix_id: str, program: Any) -> Row | None:
    """Forecast and measure what a fix saves on a program, None where it refuses."""
    from running import begun, fail, run

    from oomdoctor import fixes, pipeline
    from oomdoctor.errors import OomDoctorError
    from oomdoctor.forecast.attempts import attempt_with

    fix, failure, sources = fixes.get(fix_id), fail(program), program.cells()
    proposals = fix.propose(failure.incident, failure.evidence)
    if isinstance(proposals, Refused) or proposals[0].effect is Effect.ADVICE:
        return None
    dose, number = proposals[0].dose, len(sources)
    row: Row = {"fix": fix_id, "program": program.name, "dose": str(dose)}
    with begun(sources) as namespace:
        session = pipeline.open_session(namespace, failure.cells, plain_memory())
        attempt = attempt_with(fix, dose, session, failure.evidence)[1]
        if isinstance(attempt, Refused):
            return None
        try:
            row["forecast"] = forecast(session, [Attempt(source=sources[-1]), attempt])[0]
        except RuntimeError as error:
            return row | {"why": str(error)}
        unchanged = measure(lambda: run(sources[-1], namespace, number))
    with begun(sources) as namespace:
        session = pipeline.open_session(namespace, failure.cells, plain_memory())
        changed = attempt_with(fix, dose, session, failure.evidence)[1]
        try:
            return row | {"measured": [unchanged, measure(lambda: _run_attempt(changed, namespace, number, run))]}
        except OomDoctorError:
            return None  # it finds itself unfit when the program runs


def _run_attempt(attempt: Attempt, namespace: dict[str, Any], number: int, run: Any) -> None:
    with contextlib.ExitStack() as changes:
        for make in attempt.live:
            changes.enter_context(make())
        for text in attempt.replays:
            run(text, namespace, number)
        run(attempt.source, namespace, number)


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what it returns: the profiler leaves much behind."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    processor = f"{', '.join(sorted(names))}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


class Kept:
    """What is known so far: the rows of this call in the place of older ones of the same cases."""

    def __init__(self, path: Path | None) -> None:
        """Begin with what ``path`` holds, and write there after every row; nothing is read or written with None."""
        known = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self._path, self._known = path, {"models": [], "fixes": []} | known | {"machine": machine()}

    def put(self, key: str, rows: Sequence[Row], fields: Sequence[str]) -> None:
        """Put rows in the place of those that are alike in ``fields``."""
        fresh = [[row[field] for field in fields] for row in rows]
        kept = [row for row in self._known[key] if [row[field] for field in fields] not in fresh]
        self._known[key] = [*kept, *rows]
        if self._path is not None:
            self._path.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
            self._path.with_suffix(".txt").write_text(report(self._known), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", choices=FAMILIES, metavar="NAME", help="only this one")
    parser.add_argument("--fixes", action="store_true", help="the savings of fixes instead")
    parser.add_argument("--fix", action="append", choices=FIXES, metavar="ID", help="only this one")
    parser.add_argument("--write", action="store_true", help="write results/forecast.json and forecast.txt")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    load_libraries()
    kept = Kept(RESULTS / "forecast.json" if args.write else None)
    if args.fixes:
        for fix_id in args.fix or FIXES:
            rows = in_a_process_of_its_own(fix_rows, fix_id)
            kept.put("fixes", rows, ["fix"])
            for label, share, wrong in fix_savings(rows):
                print(f"{label:60} saves {share:6.1%}, forecast {wrong:+.2%}", flush=True)
        return
    for name, optimizer, variant in itertools.product(args.family or FAMILIES, OPTIMIZERS, VARIANTS):
        row = in_a_process_of_its_own(model_row, name, optimizer, variant)
        kept.put("models", [row], ["family", "optimizer", "variant"])
        outcome = row.get("why") or f"{row['measured']:>12,} {error(row):+8.2%}"
        print(f"{name:12} {optimizer:6} {variant:13} {outcome}", flush=True)


if __name__ == "__main__":
    main()
