"""Model families with the optimizers, schedules, scalers and averages that people train them with, and where they fail.

The table of the state tests. A program is a family's cells, its optimizer and its step exchanged by text, with what
notebooks count along: a global step, an object of the notebook's own class, a history, a replay buffer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from models import FAMILIES
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NO_ROOM", "POINTS", "PROGRAMS", "REFUSED", "SETTINGS", "Planted", "Setting", "cells_of"]

NO_ROOM: Final = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
"""What torch's CPU allocator says when it is refused memory."""

_COUNTERS: Final = """\
from collections import defaultdict, deque
import random
import numpy as np

class Progress:
    best = 0.0

    def __init__(self):
        self.steps, self.seen = 0, []

    def note(self, value):
        self.steps += 1
        self.seen.append(value + random.random())

progress, global_step, metrics, replay = Progress(), 0, defaultdict(list), deque(maxlen=3)
numbers = np.random.default_rng(5)
"""

_COUNT: Final = """\
progress.note(0.5)
metrics["step"].append(float(np.random.rand()) + numbers.random())
replay.append(torch.rand(2))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a family is trained.

    Attributes:
        optimizer: makes one from the parameters ``{0}``; as the family has it where it is empty.
        setup: what the last cell before the failing one does as well.
        backward, step: what stands for ``{loss}.backward()`` and ``{optimizer}.step()``.
    """

    optimizer: str = ""
    setup: str = ""
    backward: str = "{loss}.backward()"
    step: str = "{optimizer}.step()"


SETTINGS: Final = {
    "as it is": Setting(),
    "SGD momentum": Setting(optimizer="SGD({0}, lr=0.05, momentum=0.9, weight_decay=1e-4)"),
    "AdamW": Setting(optimizer="AdamW({0}, lr=0.01, amsgrad=True)"),
    "scheduler": Setting(
        setup="schedule = torch.optim.lr_scheduler.SequentialLR({optimizer}, [torch.optim.lr_scheduler.LinearLR("
        "{optimizer}, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR({optimizer}, 4)], [2])\n",
        step="{optimizer}.step()\nschedule.step()",
    ),
    "scaler": Setting(
        setup="scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)\n",
        backward="scaler.scale({loss}).backward()",
        step="scaler.step({optimizer})\nscaler.update()",
    ),
    "average": Setting(
        setup="average = torch.optim.swa_utils.AveragedModel({model})\n"
        "ema = {{k: v.detach().clone() for k, v in {model}.state_dict().items()}}\n",
        step="{optimizer}.step()\naverage.update_parameters({model})\n"
        "with torch.no_grad():\n"
        "    for k, v in {model}.state_dict().items():\n"
        "        ema[k] = ema[k] * 0.9 + v * 0.1",
    ),
}

_EVALUATED: Final = {
    "mlp": "model(x)",
    "cnn": "model(images)",
    "lstm": "model(inputs, detach(states))[0]",
    "gpt": "model(X)[0]",
    "transformers": "model(**batch).logits",
    "attention": "model(src)",
    "vit": "net(next(iter(trainloader))[0])",
    "gan": "D(images)",
    "contrastive": "encoder(first)",
    "vae": "model(next(iter(train_loader))[0])[0]",
    "encoder_decoder": "model(*next(iter(train_iterator)))",
    "zeroed": "model(next(iter(loader))[0])",
}
"""What a family evaluates after its training."""

_MODELS: Final = {"gan": "D", "vit": "net", "contrastive": "encoder"}
_SIZES: Final = {"mlp": 100, "gpt": 4, "lstm": 4, "gan": 8, "cnn": 4}

PROGRAMS: Final = (
    *((family, setting) for family in ("mlp", "cnn", "gpt", "gan") for setting in SETTINGS if setting != "as it is"),
    *(("transformers", setting) for setting in ("AdamW", "average")),
    *((family, "as it is") for family in _EVALUATED if family not in ("mlp", "cnn", "gpt", "gan")),
)
"""Which families are trained in which ways."""

REFUSED: Final = {
    ("lstm", None): "was called with a list",
    ("vae", None): "its forward draws random numbers",
    ("transformers", "evaluation"): "returns a single number",
    ("gpt", "third iteration"): "`ema['transformer.wte.weight']` was replaced by the cell, and the old one is gone",
    ("gpt", "evaluation"): "`ema['transformer.wte.weight']` was replaced by the cell, and the old one is gone",
}
"""Why a retry may be refused, by family and place, all places where there is none; the others may not."""


def cells_of(name: str, setting: str) -> tuple[str, ...]:
    """Return the cells of a program; the last one trains, then evaluates."""
    family, how = FAMILIES[name], SETTINGS[setting]
    model, optimizer = _MODELS.get(name, "model"), "d_optimizer" if name == "gan" else "optimizer"
    named = {"model": model, "optimizer": optimizer}
    cells = list(family.cells(_SIZES.get(name, 8)))
    if how.optimizer:
        pattern = re.compile(r"^(\w*optimizer = )(?:torch\.)?optim\.\w+\((\w+\.parameters\(\)).*\)$", re.MULTILINE)
        made = [pattern.subn(lambda m: f"{m[1]}torch.optim.{how.optimizer.format(m[2])}", cell) for cell in cells]
        assert sum(count for _, count in made), "the family's optimizer was not found"
        cells = [cell for cell, _ in made]
    cells = [_stepping(cell, how, named) for cell in cells]
    cells[-2] += _COUNTERS + how.setup.format(**named)
    cells[-1] += (
        f"global_step += progress.steps\n{model}.eval()\n"
        f"with torch.no_grad():\n    evaluated = {_EVALUATED[name]}.sum().item()\n"
        f"random.shuffle(metrics['step'])\n{model}.train()\n"
    )
    return tuple(cells)


def _stepping(cell: str, how: Setting, named: dict[str, str]) -> str:
    """Return a cell with its backward and its step as the setting has them, and with what is counted along."""
    cell = re.sub(r"(\w+)\.backward\(\)", lambda m: how.backward.format(loss=m[1]), cell)
    pattern = re.compile(rf"^([ ]*){named['optimizer']}\.step\(\)$", re.MULTILINE)
    lines = [*how.step.format(**named).split("\n"), *_COUNT.splitlines()]
    return pattern.sub(lambda m: "\n".join(m[1] + line for line in lines), cell)


POINTS: Final = ("first forward", "first backward", "first optimizer step", "third iteration", "evaluation")


class Planted(TorchDispatchMode):
    """Runs out of memory once, in the middle of a phase of the training.

    Attributes:
        fired: whether it has.
    """

    _AFTER = 3
    """How many operations of the phase run before: some of what it writes is written."""

    def __init__(self, point: str, steps: int = 1, error: Callable[[], BaseException] | None = None) -> None:
        super().__init__()
        self._point, self._per_iteration = point, steps
        self._error = error or (lambda: RuntimeError(NO_ROOM))
        self._steps = self._operations = 0
        self._phase, self.fired = "", False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        self._stack = ExitStack()
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._enter("step")),
            register_optimizer_step_post_hook(self._stepped),
            torch.nn.modules.module.register_module_forward_pre_hook(self._forward),
        ):
            self._stack.callback(handle.remove)
        backward = torch.Tensor.backward

        def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._enter("backward")
            try:
                backward(tensor, *args, **kwargs)
            finally:
                self._enter("")

        torch.Tensor.backward = watched  # type: ignore[method-assign]
        self._stack.callback(setattr, torch.Tensor, "backward", backward)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def _enter(self, phase: str) -> None:
        self._phase, self._operations = phase, 0

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        self._enter("")

    def _forward(self, module: Any, _: Any) -> None:
        phase = "forward" if module.training else "evaluation"
        if self._phase not in (phase, "backward", "step"):
            self._enter(phase)

    @property
    def _is_there(self) -> bool:
        done = self._steps // self._per_iteration
        return {
            "first forward": self._phase == "forward",
            "first backward": self._phase == "backward",
            "first optimizer step": self._phase == "step",
            "third iteration": self._phase == "backward" and done == 2,
            "evaluation": self._phase == "evaluation" and done > 2,
        }[self._point]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.fired and self._is_there:
            self._operations += 1
            if self._operations > self._AFTER:
                self.fired = True
                raise self._error()
        return func(*args, **(kwargs or {}))
