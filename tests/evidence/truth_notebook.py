"""Runs the programs as a notebook runs its cells, and takes a census at the moments that matter.

Each runs two steps and more. Looked at is the second: then gradients and optimizer states are there. The moments are
within the forward, by a hook of a module in the middle; before and after the optimizer steps, by its hooks; and after a
failure within the forward, or within the backward, where the gradient of that module's output is known.
"""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves
from truth import Roles, Tracker, Truth
from truth_programs import Program
from truth_reach import Frame, failed, running
from truth_verdict import Verdict, verdict

import oomdoctor
from oomdoctor import pipeline
from oomdoctor.model.memory import Census
from oomdoctor.model.session import Cell, Cells

STEP: Final = 1
"""Number of the step that is looked at."""

MESSAGE: Final = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 2.00 GiB of which 3.00 MiB is free."
    " Of the allocated memory 1.80 GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)


class Moment(Enum):
    """When a census is taken."""

    MID_FORWARD = auto()
    BEFORE_STEP = auto()
    AFTER_STEP = auto()
    FAILED_FORWARD = auto()
    FAILED_BACKWARD = auto()


_open: list[Notebook] = []
"""The notebook that runs. The hooks find it here, so that no path leads from the user's objects to it."""


class Notebook:
    """A program in its namespace.

    Attributes:
        moment: when the census is taken, None for never.
        judge: what makes of the census, at that moment, what is kept as ``seen``.
    """

    def __init__(
        self, program: Program, moment: Moment | None, judge: Callable[[Notebook, Census, list[Frame]], Any]
    ) -> None:
        self.program = program
        self.moment = moment
        self.judge = judge
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.filenames = {f"<ipython-input-{number}-{program.name}>": number for number in range(1, self.last + 1)}
        self.seen: Any = None
        self.tracker = Tracker()
        self.calls = 0

    @property
    def last(self) -> int:
        """Number of the last cell."""
        return len(self.program.cells)

    def run(self) -> None:
        """Run the cells."""
        _open.append(self)
        try:
            for (filename, number), source in zip(self.filenames.items(), self.program.cells, strict=True):
                if number == self.last:
                    self._attach()
                linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
                exec(compile(source, filename, "exec"), self.namespace)
        finally:
            _open.remove(self)

    def close(self) -> None:
        """Let go of all that the program made, so that no other program's census meets it.

        Where ``save_on_cpu`` has nothing to copy, a graph that no backward freed holds itself for good: each node packs
        its own output, which leads back to it. And what a failed backward had not come to waits in the queue of the
        autograd engine until the next one.
        """
        self.namespace.clear()
        torch.ones((), requires_grad=True).backward()
        for value in gc.get_objects():
            if type(value) is torch.Tensor and value.grad_fn is not None and not value._is_view():
                value.detach_()

    def cells(self) -> Cells:
        history = enumerate(self.program.cells, 1)
        return Cells(history=tuple(Cell(number=number, source=source) for number, source in history))

    def truth(self, frames: list[Frame]) -> Truth:
        """Return what lives, as the tracker and the program tell it."""
        program, names = self.program, self.namespace
        own = (frame for frame in frames if frame.filename in self.filenames and frame.function != "forward")
        scopes = [names, *(frame.locals for frame in own)]
        drawn = [scope[name] for scope in scopes for name in program.batch if name in scope]
        roles = Roles(
            models=[names[name] for name in program.models],
            optimizers=[names[name] for name in program.optimizers],
            batch=[tensor for one in drawn for tensor in (one.values() if isinstance(one, dict) else [one])],
            cache=_cached() if program.has_cache else (),
            kept=names[program.kept] if program.kept else (),
            values=names[program.values] if program.values else (),
            old=program.old,
        )
        return roles.of(self.tracker)

    def report(self) -> Census:
        return oomdoctor.report(self.namespace, self.cells()).evidence.censuses[0]

    def observe(self, exc: BaseException) -> Census:
        def open_on(accelerator: Any) -> Any:
            return pipeline.open_session(self.namespace, self.cells(), accelerator)

        case, _ = pipeline.observe(exc, open_on, self.filenames)
        return case.evidence.censuses[0]

    def is_at(self, moment: Moment) -> bool:
        return self.moment is moment and self.tracker.step == STEP

    def look(self) -> None:
        """Take a census now and judge it."""
        gc.collect()
        census = self.report()
        self.seen = self.judge(self, census, running())

    def look_back(self, exc: BaseException) -> None:
        """Take a census of a failure and judge it."""
        gc.collect()
        census = self.observe(exc)
        self.seen = self.judge(self, census, failed(exc.__traceback__))

    def _attach(self) -> None:
        eval(self.program.middle, self.namespace).register_forward_hook(_in_the_middle)
        optimizer = self.namespace[self.program.optimizers[-1]]
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)


def _in_the_middle(module: Any, args: Any, output: Any) -> None:
    notebook = _open[-1]
    notebook.calls += 1
    if notebook.calls == notebook.program.call + 1:
        if notebook.is_at(Moment.MID_FORWARD):
            notebook.look()
        if notebook.is_at(Moment.FAILED_FORWARD):
            raise torch.OutOfMemoryError(MESSAGE)
    if notebook.is_at(Moment.FAILED_BACKWARD):
        first = tree_leaves(output)[0]
        if first.requires_grad:
            first.register_hook(_fail)


def _fail(gradient: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def _before_step(*_: Any) -> None:
    notebook = _open[-1]
    if notebook.is_at(Moment.BEFORE_STEP):
        notebook.look()


def _after_step(*_: Any) -> None:
    notebook = _open[-1]
    if notebook.is_at(Moment.AFTER_STEP):
        notebook.look()
    notebook.calls = 0
    notebook.tracker.step += 1


def _cached() -> list[torch.Tensor]:
    from transformers.cache_utils import CacheLayerMixin

    layers = [value for value in gc.get_objects() if issubclass(type(value), CacheLayerMixin)]
    return [tensor for layer in layers for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor)]


def judged(program: Program, moment: Moment, distort: Callable[[Census], Census] = lambda census: census) -> Verdict:
    """Run ``program`` under the tracker as far as ``moment``; return the verdict on its census, once distorted."""

    def judge(notebook: Notebook, census: Census, frames: list[Frame]) -> Verdict:
        return verdict(distort(census), notebook.truth(frames), notebook.namespace, frames)

    notebook = Notebook(program, moment, judge)
    with notebook.tracker:
        _run(notebook)
    assert isinstance(notebook.seen, Verdict)
    return notebook.seen


def unwatched(program: Program, moment: Moment) -> int:
    """Run ``program`` with no mode on as far as ``moment``; return the bytes that its census found."""

    def judge(notebook: Notebook, census: Census, frames: list[Frame]) -> int:
        return census.found - sum(nbytes for _, nbytes, _ in notebook.tracker.alive())  # of tests before this one

    notebook = Notebook(program, moment, judge)
    _run(notebook)
    assert isinstance(notebook.seen, int)
    return notebook.seen


def _run(notebook: Notebook) -> None:
    try:
        notebook.run()
    except torch.OutOfMemoryError as exc:
        notebook.look_back(exc)
    notebook.close()
