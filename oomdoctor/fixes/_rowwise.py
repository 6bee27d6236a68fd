"""Whether a model treats the samples of a batch one by one, found out by trying it on a few rows.

What takes a batch in parts is right only then, and neither the source nor the type of a module proves it. So at a
model's first call a few rows are run together and apart, without gradients, and have to agree. The modules run in the
mode that they are in, since what couples samples or draws random numbers may do so in training alone; only layers
whose dropout a proposal announces are put in evaluation mode.

The trial runs in a forked child, which leaves no trace of it: not in globals, hooks or random numbers. Where one cannot
fork, on a real accelerator for one, it runs in place: the random numbers are put back; what a forward writes outside of
its module stays. In either case so does what it writes to files. Models with forward hooks inside are refused: nobody
knows what they do with parts of a batch.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward, _split
from oomdoctor.objects.kinds import submodules
from oomdoctor.sandbox.fork import answered, is_copy
from oomdoctor.sandbox.primitives import is_memory_refused, is_short_of_memory

if TYPE_CHECKING:
    from oomdoctor.fixes._split import Divided
    from oomdoctor.model.session import Session

__all__ = ["devices", "refuse_batch_norm", "refuse_coupled", "tried_out"]

Same: TypeAlias = Callable[[str, Any, list[Any], int], bool]
"""Compares the output for some rows with those for their halves, of so many rows each."""

_LIMIT_S: Final = 60.0
"""How long a trial may take: a few rows run in far less, so that one that does not end is stuck."""

_LONGEST: Final = 2000
"""Characters of a verdict that are kept."""

_FINE: Final = "the rows agree"
_CHANGES: Final = "{} is not split: its forward changes {}, which would happen for each part"
_DRAWS: Final = "{} is not split: its forward draws random numbers, others for each part"
_RAISED: Final = "\x1f"
"""Stands between a verdict and what the forward raised: the name of its class, its words."""


@contextmanager
def tried_out(session: Session) -> Iterator[None]:
    """Try every model of the session out at its first call while the body runs; models run as they are otherwise.

    Nothing is put together here from parts: a loss beside the outputs and a cache of keys are passed over.

    Raises:
        OomDoctorError: from a model's call, where its samples depend on one another.
    """
    paths = {id(model): path for path, model in session.modules if any(True for _ in model.parameters())}
    tried: WeakSet[Any] = WeakSet()
    trying = False

    def run(module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal trying
        # A model that another one calls in its trial is not tried in there: the fork would not remember it.
        if module in tried or trying:
            return forward(*args, **kwargs)
        path = paths.get(id(module), type(module).__name__)
        call = _split.divide(path, args, kwargs)
        if call.rows < 2:
            return forward(*args, **kwargs)
        _forward.refuse_hooks(path, module, own=True)
        if _forward.is_shadow_run():
            return _watched(path, module, forward, args, kwargs)
        trying = True
        try:
            refuse_coupled(path, module, forward, call, _rows_agree)
        finally:
            trying = False
        tried.add(module)
        return forward(*args, **kwargs)

    with _forward.replaced([model for _, model in session.modules if id(model) in paths], run):
        yield


def _watched(path: str, module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward, and refuse the module where it draws or changes what it would for each part.

    Without values, no rows can be compared.

    Raises:
        OomDoctorError: it did.
    """
    refuse_batch_norm(path, module)
    watch, marks = _forward.StateWatch(path, module), _forward.rng_marks(devices(module))
    output = forward(*args, **kwargs)
    if (changed := watch.changed()) is not None:
        raise OomDoctorError(_CHANGES.format(path, changed))
    if not _forward.active_dropout(module) and marks != _forward.rng_marks(devices(module)):
        raise OomDoctorError(_DRAWS.format(path))
    return output


def devices(module: Any) -> tuple[torch.device, ...]:
    return tuple({one.device for one in module.parameters() if one.device.type not in ("cpu", "meta")})


def refuse_batch_norm(path: str, module: Any) -> None:
    """Refuse a module with a layer that takes its statistics over the whole batch as it stands.

    Raises:
        OomDoctorError: there is such a layer.
    """
    for name, part in submodules(module, path):
        couples = isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        if couples or (isinstance(part, _NormBase) and part.training and part.track_running_stats):
            raise OomDoctorError(f"{name} takes its statistics over the whole batch: it is not split")


def _agree(path: str, together: Any, apart: list[Any], half: int) -> bool:
    """Tell whether the outputs of the halves, joined, are the output for all rows.

    Raises:
        OomDoctorError: the outputs cannot be joined.
    """
    return _close(_split.join(path, [together], [2 * half]), _split.join(path, apart, [half, half]))


def _rows_agree(path: str, together: Any, apart: list[Any], half: int) -> bool:
    """Tell whether those tensors of the outputs agree that have a row for each sample.

    Raises:
        OomDoctorError: there are none.
    """
    whole, first, second = (pytree.tree_leaves(_plain(output)) for output in (together, *apart))
    if not len(whole) == len(first) == len(second):
        return _agree(path, together, apart, half)
    rows = [
        (one, torch.cat(halves))
        for one, *halves in zip(whole, first, second, strict=True)
        if _has_rows(one, 2 * half) and all(_has_rows(part, half) for part in halves)
    ]
    if not rows:
        return _agree(path, together, apart, half)
    return _close([one for one, _ in rows], [joined for _, joined in rows])


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == count


def refuse_coupled(path: str, module: Any, forward: Any, call: Divided, same: Same = _agree) -> None:
    """Run a few rows together and in two halves, and refuse the module where that makes a difference.

    Args:
        path: the expression for ``module``.
        module: in the mode that it is to be run in.
        forward: how it is run.
        call: with two rows or more.
        same: what the outputs are compared by.

    Raises:
        OomDoctorError: the samples depend on one another, random numbers are drawn, or the trial did not end well.
    """
    if _forward.is_shadow_run():
        return
    refuse_batch_norm(path, module)
    verdict = _in_child(path, module, forward, call, same) if _can_fork(module, call) else None
    if verdict is None:
        _forward.refuse_hooks(path, module, own=False)
        with _random_numbers_kept(devices(module)):
            verdict = _verdict(path, module, forward, call, same)
    if verdict != _FINE:
        told, *raised = verdict.split(_RAISED, 2)
        raise OomDoctorError(told) from _made_again(*raised)


def _made_again(kind: str = "", words: str = "") -> Exception | None:
    """Return what a forward raised in the child, as far as it says whether memory ran out."""
    if not kind:
        return None
    known = {"OutOfMemoryError": torch.OutOfMemoryError, "MemoryError": MemoryError}
    return known.get(kind, RuntimeError)(words)


def _verdict(path: str, module: Any, forward: Any, call: Divided, same: Same) -> str:
    """Return what the trial found.

    Raises:
        OomDoctorError: the output cannot be put together from parts.
    """
    half = 2 if call.rows >= 4 else 1
    watch = _forward.StateWatch(path, module)
    with torch.no_grad(), _announced_dropout_off(module):
        marks = _forward.rng_marks(devices(module))
        together = _run(forward, call, 0, 2 * half)
        if marks != _forward.rng_marks(devices(module)):
            return _DRAWS.format(path)
        left = _forward.tensors_left(path, module)
        apart = [_run(forward, call, 0, half), _run(forward, call, half, 2 * half)]
    if (changed := watch.changed()) is not None:
        return _CHANGES.format(path, changed)
    # What is made at the first call and kept does not depend on the batch.
    if again := [name for name, one in _forward.tensors_left(path, module).items() if left.get(name) is not one]:
        return _CHANGES.format(path, min(again))
    if not same(path, together, apart, half):
        return f"{path} is not split: the output for a sample depends on the others, or on chance"
    return _FINE


def _run(forward: Any, call: Divided, start: int, stop: int) -> Any:
    # In copies: batches from workers lie in memory that a forked child shares, and a forward may write to its input.
    copied = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
    args, kwargs = dataclasses.replace(call, leaves=tuple(copied)).part(start, stop)
    return forward(*args, **kwargs)


@contextmanager
def _announced_dropout_off(module: Any) -> Iterator[None]:
    off = [part for part in module.modules() if part.training and _forward.drops(part)]
    try:
        for part in off:
            part.training = False
        yield
    finally:
        for part in off:
            part.training = True


@contextmanager
def _random_numbers_kept(accelerators: tuple[torch.device, ...]) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng([one.index for one in accelerators if one.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _can_fork(module: Any, call: Divided) -> bool:
    """Tell whether a forked child can run the module: drivers and Apple's libraries do not outlive a fork."""
    if not hasattr(os, "fork") or sys.platform == "darwin" or is_copy():
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    tensors = (*module.parameters(), *module.buffers(), *call.leaves)
    return all(one.device.type in ("cpu", "meta") for one in tensors if isinstance(one, torch.Tensor))


def _in_child(path: str, module: Any, forward: Any, call: Divided, same: Same) -> str | None:
    """Return the verdict of a trial in a forked child, None where the system gives no further process."""
    answer = answered(lambda: _told(path, module, forward, call, same), limit_s=_LIMIT_S)
    if answer is None or answer.text is not None:
        return None if answer is None else answer.text
    if answer.is_late:
        return f"{path} is not split: trying it out on a few rows did not end within {_LIMIT_S:.0f} s"
    return _crashed(path, answer.status)


def _crashed(path: str, status: int) -> str:
    """Return the verdict on a child that wrote none, as where oneDNN uses what it was given no memory for."""
    how = f"crashed: {signal.strsignal(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else "ended without a verdict"
    told = f"{path} is not split: trying it out on a few rows {how}"
    return f"{told}{_RAISED}MemoryError{_RAISED}{told}" if is_memory_refused() else told


def _told(path: str, module: Any, forward: Any, call: Divided, same: Same) -> str:
    """Run the trial in the child, and return the verdict."""
    try:
        with _disable_current_modes():
            return _verdict(path, module, forward, call, same)
    except OomDoctorError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001  (border to the user's forward, in a process that ends here)
        told = f"{path} is not split: on a few rows its forward raised {type(error).__name__}: {error}"
        kind = "MemoryError" if is_short_of_memory(error) else type(error).__name__
        return f"{told[: _LONGEST // 2]}{_RAISED}{kind}{_RAISED}{error}"[:_LONGEST]


def _close(left: Any, right: Any) -> bool:
    """Tell whether two outputs of one form agree as far as their floating point type can."""
    coarse = torch.is_autocast_enabled() or torch.get_float32_matmul_precision() != "highest"
    pairs = zip(pytree.tree_leaves(_plain(left)), pytree.tree_leaves(_plain(right)), strict=True)
    for one, other in pairs:
        if not isinstance(one, torch.Tensor):
            if one != other:
                return False
        elif not one.is_floating_point():
            if not torch.equal(one, other):
                return False
        elif one.numel():
            allowed = 5e-2 if coarse or one.dtype.itemsize < 4 else 1e-3
            scale = float(one.float().nan_to_num().abs().max())
            if not torch.allclose(one.float(), other.float(), rtol=allowed, atol=allowed * scale, equal_nan=True):
                return False
    return True


def _plain(output: Any) -> Any:
    """Return the output as dicts, lists and tensors."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [_plain(getattr(output, field.name)) for field in dataclasses.fields(output)]
    if isinstance(output, Mapping):
        return [_plain(value) for value in output.values()]
    if isinstance(output, tuple | list):
        return [_plain(value) for value in output]
    return output
