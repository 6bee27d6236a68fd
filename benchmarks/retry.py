"""What a retry does to the training: the retries of four peers and oomdoctor's, on the same five scripts.

    python benchmarks/retry.py [FILE] [--script WORD] [--retry WORD]

Prints the table, and writes it to FILE. The scripts are in ``retry_programs.py``. Each runs in a process of its own, on
the virtual accelerator: first with memory to spare, with the same tool where the tool brings its own loop, then with
so little that it fails. Deviations are from the first of these two runs. The tools see ``torch.OutOfMemoryError`` with
CUDA's text and decide by themselves.

How each is used:
    * accelerate: ``find_executable_batch_size`` around the loop, as in its docstring, and around the whole script, seed
      included, as in its guide.
    * toma: ``toma.execute.batch`` around the loop.
    * Lightning: ``Tuner.scale_batch_size`` from the wanted batch size on, then ``fit``.
    * Trainer: ``auto_find_batch_size=True``.
    * oomdoctor: ``%oomdoctor auto exact`` with the setup and the loop as two cells of a notebook, and
      ``oomdoctor run`` with both as one script. Neither changes a line of the script. ``with oomdoctor.heal():`` around
      the loop, in a script that plain Python runs.

What is measured:
    * done: it ran to its end, with no error shown.
    * failed in: the optimizer step, counted from one, and its phase in which memory first ran out. Lightning's trials
      count as well: one that seems to fail earlier or later than the others is at another batch size.
    * OOMs: how often memory ran out in all.
    * steps: optimizer steps that the script wants; that were taken in all, those of failed attempts included; and those
      that the final weights have gone through, found by following the contents of the last parameter back.
    * batch: samples for an optimizer step, wanted and in the end, from the forwards since memory last ran out.
    * deviation: the largest difference of a weight or a floating-point buffer, and the same as a share of the largest
      change that training makes to one. Adam moves a weight whose gradient is near zero by a full step either way:
      there any other batch shows as large.
    * RNG: whether torch's generator is where it would have been.
    * time: CPU time in all, setup and child processes included, and over that of the run with memory to spare. It is
      that of one thread, so that other work on the machine shows less. The scripts are small: what oomdoctor does once
      for each failure, evidence and forecasts, weighs far more here than in hours of training.

Limits: a peer's ``torch.cuda.empty_cache()`` does not reach the virtual accelerator, which returns cached segments
by itself before it fails, as CUDA's allocator does.
"""

from __future__ import annotations

import argparse
import io
import logging
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from retry_programs import PROGRAMS, Program
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).parents[1]))

from oomdoctor.allocator import virtual
from oomdoctor.allocator.device import VirtualAccelerator

AMPLE: Final = "64GiB"


class Watch:
    """Notes from outside what the training does; it changes nothing that a tool could see.

    Attributes:
        failures: the step and the phase of each time that memory ran out.
        batches: samples that went through the model before each optimizer step since memory last ran out.
        steps: the last parameter's contents before and after each optimizer step.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.batches: list[int] = []
        self.steps: list[tuple[bytes, bytes]] = []
        self._samples, self._before, self._process = 0, b"", os.getpid()
        fails = VirtualAccelerator.failure

        def failure(device: VirtualAccelerator, full: Any) -> torch.OutOfMemoryError:
            if os.getpid() == self._process:
                self.failures.append(f"{len(self.steps) + 1} {_phase()}")
                self.batches, self._samples = [], 0
            return fails(device, full)

        VirtualAccelerator.failure = failure  # type: ignore[method-assign]
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if type(module).__name__ == "Net" and module.training and os.getpid() == self._process:
            self._samples += len(args[0])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._process:
            self._before = contents(_last(optimizer))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._process:
            self.steps.append((self._before, contents(_last(optimizer))))
            self.batches.append(self._samples)
            self._samples = 0

    def steps_in(self, model: nn.Module) -> int:
        """Return how many optimizer steps lead to the weights that the model has now."""
        at, led_here = contents(list(model.parameters())[-1]), 0
        for before, after in reversed(self.steps):
            if after == at:
                at, led_here = before, led_here + 1
        return led_here


def _phase() -> str:
    """Return what the program is doing; the innermost counts, as Lightning's loss is a closure of the optimizer."""
    for frame in reversed(traceback.extract_stack()):
        if frame.name == "backward":
            return "backward"
        if frame.name == "_call_impl":
            return "forward"
        if "/torch/optim/" in frame.filename:
            return "optimizer"
    return "elsewhere"


def _last(optimizer: Any) -> torch.Tensor:
    return optimizer.param_groups[-1]["params"][-1]  # type: ignore[no-any-return]


def contents(tensor: torch.Tensor) -> bytes:
    with virtual.uncounted(), torch.no_grad():
        return tensor.detach().numpy().tobytes()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with virtual.uncounted():
        return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


# The tools: each runs a program with so much memory; returns its namespace and what else there is to tell -------------


def run_plain(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    return run_text(program.setup, program.loop, budget)


def run_text(first: str, then: str, budget: str) -> tuple[dict[str, Any], str]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with virtual.simulate(budget):
        try:
            # Compiled from a file: toma reads the lines of its callers.
            for text in (first, then):
                exec(compile(text, write(text), "exec"), namespace)
        except Exception as error:  # noqa: BLE001 - that it fails is a result
            return namespace, told(error)
    return namespace, ""


def write(text: str) -> str:
    path = Path(tempfile.mkdtemp()) / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def told(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {str(error).partition('. ')[0]}"


def around(decorator: str, head: str, body: str) -> str:
    return f"{decorator}\ndef {head}:\n" + textwrap.indent(body, "    ")


def run_accelerate_loop(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    text = around("@find_executable_batch_size(starting_batch_size=batch_size)", "train(batch_size)", program.loop)
    return run_text(program.setup, f"from accelerate.utils import find_executable_batch_size\n{text}train()\n", budget)


def run_accelerate_whole(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    wanted = re.search(r"^batch_size\b.* = (\d+)", program.setup, re.MULTILINE)
    assert wanted is not None
    # The wrapper gives the batch size: the data is as long as it was.
    setup = program.setup.replace("batch_size", "wanted_batch_size")
    names = "model, criterion, optimizer, dataset, scheduler, Net, Block"
    body = f"global {names}\n{setup}{program.loop}"
    text = around(f"@find_executable_batch_size(starting_batch_size={wanted[1]})", "train(batch_size)", body)
    return run_text("from accelerate.utils import find_executable_batch_size\n", f"{text}train()\n", budget)


def run_toma(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    text = around("@toma.execute.batch(initial_batchsize=batch_size)", "train(batch_size)", program.loop)
    return run_text(program.setup, f"from toma import toma\n{text}", budget)


def run_lightning(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    own: dict[str, Any] = {"__name__": "__main__"}

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = own["model"], own["batch_size"]

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return own["criterion"](self.model(batch[0]), batch[1])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            if "scheduler" not in own:
                return own["optimizer"]
            return [own["optimizer"]], [{"scheduler": own["scheduler"], "interval": "step"}]

        def train_dataloader(self) -> Any:
            shuffle, collate = own.get("shuffle", False), own.get("collate")
            return own["DataLoader"](own["dataset"], batch_size=self.batch_size, shuffle=shuffle, collate_fn=collate)

    with virtual.simulate(budget), tempfile.TemporaryDirectory() as folder:
        exec(program.setup, own)
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=own.get("clip"),
        )
        module = Module()
        try:
            if budget != AMPLE:
                Tuner(trainer).scale_batch_size(module, init_val=own["batch_size"])
            trainer.fit(module)
        except Exception as error:  # noqa: BLE001 - that it fails is a result
            return own, told(error)
    return own, ""


def run_trainer(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    own: dict[str, Any] = {"__name__": "__main__"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = own["model"]

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(inputs)
            return {"loss": own["criterion"](logits, labels), "logits": logits}

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return dict(zip(("inputs", "labels"), own.get("collate", torch.utils.data.default_collate)(rows), strict=True))

    with virtual.simulate(budget), tempfile.TemporaryDirectory() as folder:
        exec(program.setup, own)
        constant = torch.optim.lr_scheduler.LambdaLR(own["optimizer"], lambda step: 1.0)
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=own["batch_size"],
            auto_find_batch_size=True,
            max_grad_norm=own.get("clip", 0.0),
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
            train_sampling_strategy="random" if own.get("shuffle") else "sequential",
        )
        trainer = Trainer(
            model=Model(),
            args=arguments,
            train_dataset=own["dataset"],
            data_collator=collate,
            optimizers=(own["optimizer"], own.get("scheduler", constant)),
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001 - that it fails is a result
            return own, told(error)
    return own, ""


def run_notebook(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "oomdoctor")
    shell.run_line_magic("oomdoctor", f"simulate {budget}")
    shell.run_line_magic("oomdoctor", "auto exact")
    for cell in (program.setup, program.loop):
        result = shell.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    namespace = dict(shell.user_ns)
    shell.run_line_magic("oomdoctor", "simulate off")
    return namespace, outcome(error)


def run_script(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    from oomdoctor.cli import main as command

    status = command(["run", "--simulate", budget, write(program.setup + program.loop)])
    namespace = dict(vars(sys.modules["__main__"]))
    virtual.switch_off()
    return namespace, outcome(status)


def run_heal(program: Program, budget: str) -> tuple[dict[str, Any], str]:
    block = f"import oomdoctor\n\nwith oomdoctor.heal():\n{textwrap.indent(program.loop, '    ')}"
    namespace, error = run_text("", program.setup + block, budget)
    return namespace, outcome(error)


def outcome(error: Any) -> str:
    """Return what oomdoctor did, with what it offers instead where it did not heal."""
    import oomdoctor

    case = oomdoctor.last_case()
    if case is None:
        return f"failed: {error}" if error else ""
    did = f"{case.outcome.kind} {', '.join(case.outcome.fixes)} {case.outcome.why}".strip()
    if not error:
        return did
    offers = [f"{one.label} ({one.effect}, {one.forecast.verdict})" for one in case.plan.candidates]
    return f"failed: {did}; {', '.join(offers) or 'no change'}"


RETRIES: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "accelerate, loop": (run_accelerate_loop, run_plain),
    "accelerate, whole script": (run_accelerate_whole, run_plain),
    "toma": (run_toma, run_plain),
    "Lightning": (run_lightning, run_lightning),
    "Trainer": (run_trainer, run_trainer),
    "oomdoctor, notebook": (run_notebook, run_plain),
    "oomdoctor, script": (run_script, run_plain),
    "oomdoctor, heal": (run_heal, run_plain),
}
"""By name: how it runs a script that runs out of memory, and how the same runs with memory to spare."""


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(run: Callable[..., Any], program: Program, budget: str) -> dict[str, Any]:
    """Run one script once, in a process of its own."""
    warnings.simplefilter("ignore")
    watch = Watch()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        began = cpu_s()
        namespace, what = run(program, budget)
        took = cpu_s() - began
    model = namespace["model"]
    return {
        "what": what,
        "took": took,
        "failures": watch.failures,
        "taken": len(watch.steps),
        "in_weights": watch.steps_in(model),
        "batch": statistics.mode(watch.batches) if watch.batches else 0,
        "weights": {name: value.numpy() for name, value in weights(model).items()},
        "rng": torch.get_rng_state().numpy().tobytes(),
    }


def cpu_s() -> float:
    """Return the CPU time of this process and of the children that have ended."""
    return sum(os.times()[:4])


def initial(program: Program) -> dict[str, Any]:
    """Return the weights that the setup makes."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(program.setup, namespace)
    return {name: value.numpy() for name, value in weights(namespace["model"]).items()}


def alone(do: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(do, args)


def largest(left: dict[str, Any], right: dict[str, Any]) -> float:
    return max(float(abs(left[name] - right[name]).max()) for name in left)


def row(name: str, capped: dict[str, Any], ample: dict[str, Any], begin: dict[str, Any]) -> str:
    healed = not capped["what"].startswith("failed")
    off, share, rng = "-", "-", "-"
    if healed:
        difference = largest(capped["weights"], ample["weights"])
        off, share = f"{difference:.1e}", f"{difference / largest(ample['weights'], begin):.1%}"
        rng = "same" if capped["rng"] == ample["rng"] else "moved"
    where = capped["failures"][0] if capped["failures"] else "-"
    steps = f"{ample['taken']} / {capped['taken']} / {capped['in_weights']}"
    batch = f"{ample['batch']} > {capped['batch'] or '-'}"
    times = f"{capped['took']:>7.1f} s{capped['took'] / ample['took']:>7.1f}x"
    return (
        f"{name:<26}{'yes' if healed else 'no':<6}{where:<13}{len(capped['failures']):>4}{steps:>14}{batch:>15}"
        f"{off:>11}{share:>8}{rng:>7}{times}"
    )


def table(scripts: list[str], retries: list[str]) -> Iterator[str]:
    yield f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    yield ", ".join(f"{peer} {version(peer)}" for peer in ("accelerate", "toma", "lightning", "transformers"))
    heads = f"{'':<26}{'done':<6}{'failed in':<13}{'OOMs':>4}{'steps wanted':>14}{'batch':>15}{'deviation':>19}{'':>7}"
    units = f"{'':<26}{'':<6}{'step, phase':<13}{'':>4}{'/ taken / in':>14}{'wanted > got':>15}{'largest':>11}"
    units += f"{'share':>8}{'RNG':>7}{'time':>9}{'ratio':>8}"
    for script in scripts:
        program, notes = PROGRAMS[script], []
        yield from ("", f"{script}, {program.budget}", heads, units)
        begin, ample = initial(program), {}
        for name in retries:
            run, plainly = RETRIES[name]
            if plainly not in ample:
                ample[plainly] = alone(measure, plainly, program, AMPLE)
            capped = alone(measure, run, program, program.budget)
            yield row(name, capped, ample[plainly], begin)
            if capped["what"]:
                notes.append(f"  {name}: {capped['what']}")
        yield from notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="where to write the table to as well")
    parser.add_argument("--script", default="", help="only scripts with this word in their name")
    parser.add_argument("--retry", default="", help="only tools with this word in their name")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # the processes leave their scripts there
        for line in table([s for s in PROGRAMS if args.script in s], [r for r in RETRIES if args.retry in r]):
            print(line, flush=True)
            lines.append(line)
    if args.file is not None:
        args.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
