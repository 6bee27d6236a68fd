"""What the kernels of operators need inside, which no dispatcher sees: measured by running them, small.

The kernels of oneDNN copy what they are given into layouts of their own; how much depends on the processor, the shapes
and the number of threads, and is written down nowhere. So an operation that has such a kernel is run for real over a
few samples (or steps in time), twice, and each of its allocations is taken to grow by the same amount with every
further one. It is run in a thread of its own: no mode is active there, and after a fork such a thread has a working
pool of OpenMP, which the forked one has not. Limits: the CPU; convolutions, the fused LSTM, and their backwards.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from oomdoctor.forecast.copies import COPIES, ESTIMATED
from oomdoctor.sandbox.openmp import limit_levels

_aten = torch.ops.aten


def _flop_registry() -> dict[Any, Any]:
    """Import torch's formulas without its warning that Triton is missing: no dry run meets a kernel of Triton's."""
    log = logging.getLogger("torch.utils.flop_counter")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from torch.utils.flop_counter import flop_registry
    finally:
        log.setLevel(level)
    return flop_registry


flop_registry: Final = _flop_registry()

Changes: TypeAlias = "tuple[int, ...]"
"""Bytes of an operation's allocations, and negative ones for what it freed, in order."""

_BATCH_OF_POINTWISE: Final = 16
"""From so many samples on, a convolution of kernel size 1 goes to oneDNN on one thread too.

Source: ``use_mkldnn`` in ``aten/src/ATen/native/Convolution.cpp``.
"""
_FEWEST_STEPS: Final = 4
"""Steps in time from which on a recurrent layer's memory grows evenly, as measured with oneDNN 3.12."""

_MOST_BYTES: Final = 64 << 20
_MOST_FLOPS: Final = 8e9
_MOST_SECONDS: Final = 1.5
"""What is too large to be run: the bytes of the arguments, the work of one operation, the time of all together."""
_PATIENCE_S: Final = 5.0
"""Time by the clock after which a measurement is given up: something is amiss in this process, or on this machine."""

# The shadow replaces it, since the forked thread must stay alone.
_set_num_threads: Final = torch.set_num_threads


@dataclass(frozen=True, slots=True)
class _Way:
    """How an operation is run over less than it is given.

    Attributes:
        along: arguments that are cut in their first dimension.
        weight: the argument whose last dimensions are the window of a convolution, None for a recurrent layer.
    """

    along: tuple[int, ...]
    weight: int | None = None

    def counts(self, args: Any, threads: int) -> tuple[int, ...]:
        """Return how many samples or steps to run over; of samples every thread has one, as in the whole batch."""
        fewest = _FEWEST_STEPS
        if self.weight is not None:
            pointwise = math.prod(args[self.weight].shape[2:]) == 1
            fewest = max(threads, _BATCH_OF_POINTWISE if pointwise else 2)
        whole = args[self.along[0]].shape[0]
        return (whole,) if whole <= 3 * fewest else (fewest, 2 * fewest)

    def copies(self, args: Any, out: Any) -> int:
        """Estimate what a convolution needs from the copies that oneDNN makes where it chooses the layouts.

        Source: runs of convolutions in float32 with oneDNN 3.12; other layouts and types needed less.
        """
        if self.weight is None:
            return 0
        given = sum(int(args[index].nbytes) for index in self.along)
        return given if isinstance(out, tuple) else max(given + int(args[self.weight].nbytes), _bytes(out))

    def arguments(self, args: Any, count: int) -> list[Any]:
        """Return real arguments of so many samples or steps."""
        return [
            _zeros(value, count if index in self.along else None) if isinstance(value, torch.Tensor) else value
            for index, value in enumerate(args)
        ]


_RECURRENT_BACKWARD: Final = _aten.mkldnn_rnn_layer_backward.default
_WAYS: Final = {
    _aten.convolution.default: _Way((0,), 1),
    _aten.convolution_backward.default: _Way((0, 1), 2),
    _aten.mkldnn_rnn_layer.default: _Way((0,)),
    _RECURRENT_BACKWARD: _Way((0, 7, 10, 22)),
}


class Kernels:
    """Measures operations and remembers what was measured.

    Attributes:
        are_asked: whether what kernels need inside counts.
        estimated: whether there was an operation of linear algebra, whose need is known only about.
        unmeasured: whether there was an operation with such a kernel that was not measured.
        unknown: what is not known of the operations that there were, in words.
    """

    def __init__(self, threads: int) -> None:
        """Measure with so many threads, or not at all with 0."""
        self.unmeasured = self.estimated = False
        self.unknown: set[str] = set()
        self._threads = threads
        self.are_asked = threads > 0
        self._left_s = _MOST_SECONDS
        self._known: dict[Any, tuple[tuple[int, Changes], ...] | None] = {}

    def scratch(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Return the bytes that an operation on tensors without data needs beyond its results, at its highest."""
        by_rule = COPIES.get(func)
        if by_rule is not None:
            return by_rule(args, out) if self._threads else 0
        if func in ESTIMATED:
            self.estimated = self.estimated or self._threads > 0
            return ESTIMATED[func](args, out) if self._threads else 0
        way = _WAYS.get(func)
        if way is None or not self._threads:
            return 0
        if args[0].device.type != "cpu":
            self.unmeasured = True
            return 0
        counts, whole = way.counts(args, self._threads), args[way.along[0]].shape[0]
        # Under no_grad a recurrent layer keeps nothing for a backward.
        grad = torch.is_grad_enabled()
        key = (func, grad, counts, tuple(_signature(value, index in way.along) for index, value in enumerate(args)))
        if key not in self._known:
            small = not kwargs and whole > 0 and _is_small(func, args, out, way, max(counts) / whole)
            self._known[key] = self._runs(func, args, way, counts, grad=grad) if small else None
        runs = self._known[key]
        if runs is None:
            self.unmeasured = True
            return way.copies(args, out)
        return max(_highest(_extrapolated(runs, whole)) - _bytes(out), 0)

    def _runs(
        self, func: Any, args: Any, way: _Way, counts: tuple[int, ...], *, grad: bool
    ) -> tuple[tuple[int, Changes], ...] | None:
        found: list[tuple[int, Changes]] = []

        def measure() -> None:
            began = time.thread_time()
            limit_levels(1)
            _set_num_threads(self._threads)
            try:
                with torch.set_grad_enabled(grad):
                    measured = [(count, _changes(_call(func, way.arguments(args, count)))) for count in counts]
                found.extend(measured)
            except (RuntimeError, AttributeError, ImportError):
                pass  # a combination that the kernel does not take, or another version's profiler
            finally:
                _set_num_threads(1)  # for MKL, where it is a setting of the whole process
                limit_levels(0)
                self._left_s -= time.thread_time() - began

        if self._left_s <= 0:
            return None
        thread = threading.Thread(target=measure, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            self._left_s = 0.0
        return tuple(found) or None


def _is_small(func: Any, args: Any, out: Any, way: _Way, share: float) -> bool:
    """Whether the operation may be run over this share of what it is given."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None and formula(*args, out_val=out) * share > _MOST_FLOPS:
        return False
    nbytes = sum(int(args[index].nbytes) for index in way.along if args[index] is not None)
    return nbytes * share <= _MOST_BYTES


def _zeros(like: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return a real tensor of zeros laid out as ``like``, or so but with ``count`` in its first dimension."""
    shape, strides = list(like.shape), list(like.stride())
    if count is not None:
        shape[0] = count
        order = sorted(range(like.dim()), key=lambda dim: (strides[dim], like.shape[dim]))
        if _dense(like.shape, order) == strides:
            strides = _dense(shape, order)
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return torch.zeros(max(size, 0), dtype=like.dtype, device="cpu").as_strided(shape, strides)


def _dense(shape: Sequence[int], order: list[int]) -> list[int]:
    """Return the strides of a tensor without gaps whose dimensions lie in this order, the innermost first."""
    strides, step = [0] * len(order), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return strides


def _call(func: Any, args: list[Any]) -> Callable[[], Any]:
    if func is _RECURRENT_BACKWARD:
        given, output_grads = args[:7], args[10:13]
        reverse, mode, size, layers, biases, train, both, lengths, batch_first = args[13:22]
        options = (reverse, lengths, mode, size, layers, biases, both, batch_first, train)
        with torch.enable_grad():
            *results, workspace = _aten.mkldnn_rnn_layer.default(*given, *options)
        return lambda: func(*given, *results, *output_grads, *args[13:22], workspace)
    return lambda: func(*args)


def _changes(call: Callable[[], Any]) -> Changes:
    # torch.profiler would take a second to start; this one gets the same events from the allocator.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        results = call()
    finally:
        records = _disable_profiler_legacy()
    del results  # which must be alive until here
    # Its stub says that the kind is a number.
    events = (event for thread in records for event in thread if str(event.kind()) == "memory_alloc")
    return tuple(event.cpu_memory_usage() for event in events)


def _extrapolated(runs: tuple[tuple[int, Changes], ...], count: int) -> Changes:
    """Return the changes of a run over ``count`` samples or steps."""
    (few, first), (many, second) = runs[0], runs[-1]
    if few == many:
        return first
    if len(first) != len(second):  # another kernel was chosen: what is left is the highest level
        first, second = (_highest(first),), (_highest(second),)
    return tuple(
        # What more than doubles with twice the samples does not grow with them: more threads were put to one task.
        b if abs(b) * few > abs(a) * many else a + (b - a) * (count - few) // (many - few)
        for a, b in zip(first, second, strict=True)
    )


def _highest(changes: Changes) -> int:
    level = highest = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest


def _signature(value: Any, cut: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape[1:] if cut else value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0
