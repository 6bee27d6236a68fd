"""One run of a trial: a program executed on real values in a copy of the process, and the end that it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oomdoctor.errors import ForecastError
from oomdoctor.model.session import Attempt, Session
from oomdoctor.objects.leaves import Leaf, Leaves, generators, plain_leaf, text_leaf
from oomdoctor.objects.named import is_users, own_modules
from oomdoctor.program.compiled import HOOK_PREFIX, Site
from oomdoctor.sandbox.attempt import compile_cell, execute, in_place
from oomdoctor.sandbox.copies import one_sentence
from oomdoctor.sandbox.primitives import is_short_of_memory
from oomdoctor.sandbox.restrictions import forbid
from oomdoctor.trial.cut import Enough, Progress, cut_loaders, cut_loops
from oomdoctor.trial.later_steps import Values
from oomdoctor.trial.setup import Stage, read_back

_LAST: Final = f"{HOOK_PREFIX}last"
_HOOKS: Final = "how often hooks ran"
_PRINTED: Final = "what is printed"
_LINES: Final = 200
_VALUE: Final = "the value that the cell ends with"
_FILES: Final = "what is written to files"
_ENVIRONMENT: Final = "the environment"
_CELL: Final = "<oomdoctor: cell of a trial>"
_NUDGES: Final = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative size of the last digit of each type."""
_COARSE: Final = 2.0**-9
"""What parameters in float32 are off by in a control where the program computes in 16 bits."""
_OUT_OF_MEMORY: Final = "alloc_cpu.cpp"
"""Stands in what PyTorch's allocator of host memory raises where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a run has left.

    Attributes:
        steps: how many optimizer steps it took; ``rows``: in the largest batch of its loaders, before it was cut.
        was_cut: whether a loop ended before its time.
        computes: whether it has called a module, or backward, or stepped; ``trains``: one of the last two.
        computes_in_16_bits: autocast was on, or a gradient has such a type.
        error: what the user's code raised, None where it ran to its end; ``is_ours``: it could not be run, or did
            what a copy of the process may not do.
        begun: the leaves at the first forward, where they were asked for.
        is_large: it ended at the first forward of a model that is as large as was asked.
        still: the expressions that may come to another value in later steps, where they were asked for.
    """

    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    steps: int = 0
    was_cut: bool = False
    computes: bool = False
    trains: bool = False
    rows: int = 0
    computes_in_16_bits: bool = False
    error: str | None = None
    is_ours: bool = False
    begun: Mapping[str, Leaf] = field(default_factory=dict)
    is_large: bool = False
    still: Mapping[Site, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a program is run.

    Attributes:
        rows: how many rows of a batch are taken; ``steps``: how many optimizer steps of a loop.
        known: the lines of the unchanged program, and of the user's files.
        without: names of the user's that are not looked at in the end.
        nudged: begin with parameters that are off in the last digit, each number otherwise; 0 for those that there are.
        is_coarse: let them be off by the last digit of arithmetic in 16 bits.
        is_precise: leave autocast off, whose rounding hides what differs by less.
        begins: look at the leaves at the first forward as well.
        large: end at the first forward of a module whose parameters have more numbers than that.
        ticks: how far each reading of the clock moves it on.
        turns: that each loop makes at least.
        turned: expressions that come to another value, with the one that they had; ``since``: from so many steps on.
    """

    rows: int
    steps: int
    known: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    nudged: int = 0
    is_coarse: bool = False
    is_precise: bool = False
    begins: bool = False
    large: int | None = None
    ticks: int = 1
    turns: int = 0
    turned: frozenset[tuple[Site, Any]] = frozenset()
    since: int = 0


def run(session: Session, stage: Stage, attempt: Attempt, terms: Terms) -> End:
    """Run a program in this process, which is of no use for anything else afterwards.

    Args:
        session: holds the namespace; its start has been brought back.
        stage: was set up in the process that this one was forked from.
    """
    texts = (*attempt.replays, attempt.source)
    try:
        codes = [
            compile_cell(text, f"{_CELL} {at}", session.shell, last=_LAST if at == len(attempt.replays) else None)
            for at, text in enumerate(texts)
        ]
    except ForecastError as refusal:
        return End(error=str(refusal), is_ours=True)
    namespace, begun = session.namespace, dict[str, Leaf]()
    progress = Progress(terms.known, terms.steps, terms.turns)
    if terms.begins:
        progress.begins = lambda: begun.update(end_of(namespace, names_of(namespace), ""))
    if terms.is_precise:
        _leave_autocast_off()
    progress.count()
    progress.drawn = cut_loaders(terms.rows)
    values = Values(
        terms.rows,
        progress.drawn,
        dict(terms.turned),
        is_first=lambda: progress.steps < terms.steps,
        is_later=lambda: progress.steps >= terms.since,
    )
    cut_loops(progress, values.pass_on if terms.turns else lambda _site, value: value)
    if terms.nudged:
        nudge = _Nudge(_COARSE if terms.is_coarse else 0.0, terms.nudged)
        nudge(stage.parameters)
        progress.calls = lambda module: nudge(module.parameters())
    if terms.large is not None:
        progress.calls = partial(_end_if_large, terms.large, set())
    stage.clock.take_place(terms.ticks)
    try:
        error, is_ours = _ran(session, stage, attempt, codes)
    except _Large:
        return End(is_large=True)
    end = End(error=error, is_ours=is_ours, rows=max(progress.drawn, default=0), begun=begun, still=values.still())
    return _with_leaves(end, session, stage, progress, terms.without)


def _with_leaves(end: End, session: Session, stage: Stage, progress: Progress, without: Collection[str]) -> End:
    """Return the end of a run with what it has left."""
    namespace = session.namespace
    files = set(map(id, stage.written.values()))  # of which is told what stands in them
    names = [name for name in names_of(namespace) if not name.startswith(HOOK_PREFIX) and name not in without]
    names = [name for name in names if id(namespace.get(name)) not in files]
    files_written = {name: read_back(file) for name, file in stage.written.items()}
    extra = {_HOOKS: stage.hooks, _VALUE: namespace.get(_LAST), _FILES: files_written, _ENVIRONMENT: {**os.environ}}
    try:
        leaves = {**end_of(namespace, names, stage.said.getvalue(), extra), **progress.gradients}
    except TooMuch as much:
        return End(error=str(much), is_ours=True)
    halves = (leaf.is_gradient and leaf.frame.startswith(_HALVES) for leaf in leaves.values())
    return replace(
        end,
        leaves=leaves,
        steps=progress.steps,
        was_cut=progress.was_cut,
        computes=bool(progress.steps or progress.backwards or progress.forwards),
        trains=bool(progress.steps or progress.backwards),
        computes_in_16_bits=bool(stage.autocast) or any(halves),
    )


def _ran(session: Session, stage: Stage, attempt: Attempt, codes: Iterable[CodeType]) -> tuple[str | None, bool]:
    """Run the cells with what the attempt changes; return what they raised, and whether that is no result of theirs.

    It is none where a copy of the process may not do what they do, or has no memory for it.
    """
    forbid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with _disable_current_modes(), contextlib.redirect_stdout(stage.said), contextlib.ExitStack() as changes:
        if stage.copies is not None:
            changes.enter_context(stage.copies.on_host())
        try:
            changes.enter_context(in_place(session, attempt))
            changes.enter_context(_Draws())  # type: ignore[no-untyped-call]
            for code in codes:
                execute(code, session.namespace, in_loop=stage.in_loop)
        except (SystemExit, Enough):
            pass  # the cell ends itself, or has shown enough
        except _Large:
            raise
        except BaseException as raised:  # noqa: BLE001  border to the user's code, in a process that ends here
            told = one_sentence(raised)
            is_refused = isinstance(raised, OSError | EOFError | MemoryError | torch.OutOfMemoryError)
            return told, is_refused or is_short_of_memory(raised) or _OUT_OF_MEMORY in told
    return None, False


class _Large(BaseException):
    """A model is larger than was asked."""


def _end_if_large(most: int, met: set[int], module: torch.nn.Module) -> None:
    if id(module) not in met:
        met.update(map(id, module.modules()))
        if sum(found.numel() for found in module.parameters() if not is_lazy(found)) > most:
            raise _Large


_HALVES: Final = ("torch.bfloat16", "torch.float16")


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves a generator on by one number more after each draw.

    Some kernels draw numbers one after the other: for sizes that suit them, parts of a batch would draw what the whole
    does, by chance, and on other sizes or devices would not.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before, made = generator.get_state(), func(*args, **kwargs)
        if generator.device.type == "cpu" and not torch.equal(before, generator.get_state()):
            torch.empty(1).random_(generator=generator)
        return made


def _leave_autocast_off() -> None:
    """Have every ``autocast`` of this process change nothing."""
    cls: Any = torch.autocast
    enter = cls.__enter__

    def entered(context: Any) -> Any:
        context._enabled = False
        return enter(context)

    cls.__enter__ = entered


class _Nudge:
    """Puts parameters off by their last digit, or by ``size`` of them, by numbers of a generator of our own; each once.

    Those that the program makes itself are met at the first forward of their module.
    """

    def __init__(self, size: float, seed: int) -> None:
        self._size, self._generator = size, torch.Generator().manual_seed(seed)
        self._met: dict[int, torch.nn.Parameter] = {}

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        with torch.no_grad(), _disable_current_modes():
            for found in parameters:
                if id(found) in self._met or is_lazy(found):
                    continue
                self._met[id(found)] = found
                if found.is_floating_point() and found.device.type == "cpu":
                    by = torch.rand(found.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
                    found.data.mul_((1 + by * max(self._size, _NUDGES.get(found.dtype, 0.0))).to(found.dtype))


_MOST_LEAVES: Final = 50_000


class TooMuch(Exception):
    """There is more to compare than is looked at."""


def names_of(namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the user's, sorted."""
    return tuple(sorted(name for name in namespace if is_users(name)))


def end_of(
    namespace: Mapping[str, Any], names: Collection[str], said: str, beside: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Leaf]:
    """Return the leaves of what ``names`` lead to, of the generators, and of what was printed.

    Args:
        namespace: the user's; what leads back to it is not followed.
        names: those that are looked at: what the change binds besides is its own.
        said: the text that the run has printed.
        beside: more values, by what they are called.
    """
    found: dict[str, Leaf] = {}
    leaves = Leaves(namespace)
    for name, value in ({name: namespace[name] for name in names if name in namespace} | {**beside}).items():
        for path, leaf in leaves.below(value, name):
            found[path] = leaf
            if len(found) >= _MOST_LEAVES:
                break
    for module in own_modules():
        for name, value in vars(module).items():
            if is_users(name) and type(value) is not ModuleType and len(found) < _MOST_LEAVES:
                found.update(leaves.below(value, f"{module.__name__}.{name}"))
    if len(found) >= _MOST_LEAVES:
        raise TooMuch(f"the names lead to more than {_MOST_LEAVES:,} values")
    lines = said.splitlines()
    found[_PRINTED] = plain_leaf(f"{len(lines)} lines")
    for at, line in enumerate([*lines[:_LINES], "\n".join(lines[_LINES:])]):  # one may tell a clock, another a loss
        found[f"{_PRINTED}, line {at + 1}"] = text_leaf(line)
    found["the modes of torch"] = plain_leaf([*map(str, _modes())])
    found.update(generators())
    return found


def _modes() -> Iterator[object]:
    """Yield the modes and settings of torch that results depend on."""
    yield from (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled())
    yield from (torch.get_default_dtype(), torch.empty(0).device, torch.get_float32_matmul_precision())
    yield from (torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())
