"""The random draws of a whole batch while it runs in parts: the same masks and noise, the same generators at the end.

While the body of the loop runs on a part, each random operator draws for all rows, as the whole batch would have, and
gives out those of the part; the generators are set back before each further part. Only operators that torch tags as
random are led past the mode that draws. Python and NumPy draw for no row: how deep a network is, or whether a teacher
is followed, is drawn alike for each part.

Which dimension of a draw is the batch is told by its size, and checked by another: the first part is larger than the
last, and what a part draws has to be as much smaller. What stays the same in both is drawn once for the whole batch.

Limit: operators that draw more or fewer numbers by the values that they are given (``RReLU``, Poisson, Gamma) draw
others in parts; the trial of a change shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from threading import Lock
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oomdoctor.errors import StateError
from oomdoctor.fixes._forward import host_marks
from oomdoctor.objects.rng import RandomState

_Batched: TypeAlias = tuple[int, int] | None
"""The dimension of the batch, and how many entries of it there are for each row; None where there is none."""

_Shapes: TypeAlias = dict[str, tuple[int, ...]]


class _Known(NamedTuple):
    """What the first part has shown of one draw.

    Attributes:
        rows: of that part; ``shapes`` of sizes and tensors, and other ``numbers``, that the operator was given.
        batched: where the batch is in each shape; ``orders``: dimensions of each tensor as they lie in memory.
    """

    rows: int
    shapes: _Shapes
    numbers: dict[str, int]
    batched: dict[str, _Batched]
    orders: dict[str, Sequence[int]]


_CHECKPOINTS: Final = checkpoint.__file__
_KERNELS: Final = ("dropout_state", "philox_seed", "rng_state")
"""Arguments and results of kernels that draw by themselves: their draws cannot be cut into rows."""


def _sizes(rows: int, parts: int, *, may_draw: bool) -> list[int]:
    """Return the sizes of the parts: as even as may be; of what draws, the first larger and of two rows at least.

    So sizes can be compared, and how draws lie in memory is told by a part that has more than one row.
    """
    parts = max(min(parts, rows if not may_draw and parts >= rows else rows - 1), 1)
    counts = [rows // parts + (at < rows % parts) for at in range(parts)]
    if 1 < parts < rows and counts[0] == counts[-1]:
        counts[0], counts[-1] = counts[0] + 1, counts[-1] - 1
    return counts


def _generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    found = [torch.default_generator]
    for device in devices:
        several = getattr(getattr(torch, device.type, None), "default_generators", ())
        if several:
            found.append(several[device.index or 0])
        elif device.type == "mps":
            found.append(torch.mps._get_default_mps_generator())
    return found


def _states(generators: Iterable[torch.Generator]) -> list[tuple[torch.Generator, Any]]:
    with _disable_current_modes():  # states have values, which a forecast's tensors have not
        return [(generator, generator.get_state()) for generator in generators]


def _set_back(states: Iterable[tuple[torch.Generator, Any]]) -> None:
    with _disable_current_modes():
        for generator, state in states:
            generator.set_state(state)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws for all ``rows`` of the whole batch, and gives out those of the part that runs."""

    def __init__(self, rows: int, devices: Iterable[torch.device], border: CodeType | None = None) -> None:
        """Begin with all rows; beside the host's, the generators of ``devices`` are drawn from.

        Args:
            border: of what runs a part and is run again in the backward pass; None where that comes within the part.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._start, self._count, self._at, self._border = rows, 0, rows, 0, border
        self._known: list[_Known] = []
        self._apart = self._again = 0
        self._begun, self._ended = _states(_generators(devices)), list[tuple[torch.Generator, Any]]()
        with _disable_current_modes():
            self._host, self._host_ended = RandomState.take(), set[Any]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what is compiled runs as it is written here

    def parts(self, parts: int, *, may_draw: bool = True) -> Iterator[tuple[int, int]]:
        """Yield at which row each part begins, and of how many it is; the caller runs it meanwhile.

        Parts have a row each, where so many are asked for, if nothing ``may_draw``; else the first has two. It raises
        ``StateError`` where Python or NumPy drew otherwise, or a checkpoint does not draw again within the part.
        """
        start = 0
        for count in _sizes(self._rows, parts, may_draw=may_draw):
            yield start, count
            if self._apart and not self._again:
                raise StateError("a checkpointed region draws random numbers, and its backward comes after the part")
            self._apart = self._again = 0
            if self._at:
                self._ended = _states(generator for generator, _ in self._begun)
            self._host_ended.add(host_marks())
            if len(self._host_ended) > 1:
                raise StateError("Python or NumPy draws another number of times for each part of the batch")
            start += count
        _set_back(self._ended)  # as after the whole batch, though the last part may have drawn nothing

    @contextmanager
    def of(self, start: int, count: int, *, again: bool = False) -> Iterator[None]:
        """Draw for ``count`` rows from ``start`` on; ``again`` in a recomputation, which moves no generator."""
        before = _states(generator for generator, _ in self._begun) if again else []
        _set_back(self._begun)
        if not again:
            self._host.restore_host()
        self._start, self._count, self._at = start, count, 0
        _drawing.append(self)
        try:
            with _registering:
                key = _random_key()
            with _as_written(), self if key is None else torch._C._IncludeDispatchKeyGuard(key):
                yield
        finally:
            _drawing.remove(self)
            _set_back(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; raise ``StateError`` where which of what it draws is of which row cannot be told."""
        kwargs, (names, draws, draws_inside) = kwargs or {}, _signature(func)
        if not draws and not draws_inside:
            return func(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        drops = given.get("dropout_p", 0.0) if "dropout_p" in names else given.get("dropout")
        if drops and draws_inside:
            raise StateError(f"`{func}` draws random numbers inside of its kernel, which have no rows")
        is_off = given.get("train", given.get("training", True)) is False
        if not draws or drops == 0.0 or is_off or self._count == self._rows:
            return func(*args, **kwargs)
        self._note_checkpoint(func)
        own = kwargs.get("generator")
        if isinstance(own, torch.Generator) and all(own is not one for one, _ in self._begun):
            self._begun += _states([own])
        return self._drawn(func, args, kwargs, given)

    def _note_checkpoint(self, func: Any) -> None:
        """Count what a checkpointed region draws and draws again; it must do so while the part runs."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._border:
            if frame.f_code.co_filename == _CHECKPOINTS:
                if self._border is not None:
                    raise StateError(f"`{func}` draws in a region that the model itself recomputes")
                # The second is the first's body in newer versions of torch; the third is that of the reentrant form.
                is_again = frame.f_code.co_name not in ("checkpoint", "_checkpoint_impl", "forward")
                self._again += is_again
                self._apart += not is_again and (torch.is_grad_enabled() or frame.f_code.co_name == "forward")
                return
            frame = frame.f_back  # type: ignore[assignment]

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> Any:
        written = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        shapes = {name: tuple(shape) for name, value in given.items() if (shape := _shape(name, value)) is not None}
        known = self._told(func, shapes, given)
        whole = dict(given)
        of_rows = {name: where for name, where in known.batched.items() if where is not None}
        for name, where in of_rows.items():
            whole[name] = self._whole(func, given[name], *where, known.orders.get(name, ()))
        made = func(*list(whole.values())[: len(args)], **{name: whole[name] for name in kwargs})
        for name in written & of_rows.keys():
            given[name].copy_(self._part(whole[name], *of_rows[name]))
        if any(one.alias_info is not None for one in func._schema.returns):
            return next(given[name] for name in given if name in written)
        first = next(iter(of_rows.values()), None)
        return made if first is None else pytree.tree_map(lambda one: self._result(one, *first), made)

    def _told(self, func: Any, shapes: _Shapes, given: Mapping[str, Any]) -> _Known:
        """Return which dimension of each size or tensor is the batch: by its size, or beside a part of another size."""
        if self._count == 1 and not self._start:
            raise StateError(f"`{func}` draws something: for which row cannot be told where each is a part")
        numbers = {name: value for name, value in given.items() if type(value) is int}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and name in shapes}
        if any(not _is_dense(value) for value in tensors.values()):
            raise StateError(f"`{func}` draws into memory with gaps, or into one place for several rows")
        if self._at == len(self._known):
            if self._start and not self._known:
                raise StateError(f"`{func}` draws something for a part of the batch, and the first part drew nothing")
            orders = {name: _order(value) for name, value in tensors.items()}
            guesses = {name: self._guess(shape) for name, shape in shapes.items()}
            self._known.append(_Known(self._count, shapes, numbers, guesses, orders))
        known = self._known[self._at]
        self._at += 1
        if shapes.keys() != known.shapes.keys() or (known.rows == self._count and shapes != known.shapes):
            raise StateError(f"`{func}` draws something else for each part of the batch")
        if known.rows != self._count:
            grown = {name: self._grown(known.shapes[name], shapes[name], known.rows) for name in shapes}
            shared = {name: shape for name, shape in shapes.items() if known.batched[name] is None}
            if grown != known.batched or any(known.shapes[name] != shape for name, shape in shared.items()):
                raise StateError(
                    f"which dimension of {known.shapes} is the batch cannot be told beside parts of {known.rows} "
                    "rows: another number of parts may do"
                )
        if numbers != known.numbers:
            raise StateError(f"`{func}` draws by {known.numbers}, which is another number for each part of the batch")
        return known

    def _guess(self, shape: tuple[int, ...]) -> _Batched:
        equal = [at for at, size in enumerate(shape) if size == self._count]
        several = self._count > 1 and bool(shape) and shape[0] > 0 and shape[0] % self._count == 0
        found = equal or [0] * several  # rows of heads or tokens, those of a sample side by side
        return (found[0], shape[found[0]] // self._count) if found else None

    def _grown(self, before: tuple[int, ...], now: tuple[int, ...], count: int) -> _Batched:
        """Return the one dimension that differs as the numbers of rows do."""
        found = [at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other]
        if len(found) != 1 or len(before) != len(now) or before[found[0]] % count:
            return None
        dim, factor = found[0], before[found[0]] // count
        return (dim, factor) if now[dim] == factor * self._count else None

    def _whole(self, func: Any, value: Any, dim: int, factor: int, order: Sequence[int]) -> Any:
        """Return a size or a tensor as it is for all rows, laid out as that of the part is: draws go by memory."""
        if not isinstance(value, torch.Tensor):
            return [*value[:dim], factor * self._rows, *value[dim + 1 :]]
        shape = [*value.shape[:dim], factor * self._rows, *value.shape[dim + 1 :]]
        is_mask = func is torch.ops.aten.bernoulli_.float  # which draws alike into every type, and overwrites all
        dtype = torch.bool if is_mask else value.dtype
        made = torch.empty([shape[at] for at in order], dtype=dtype, device=value.device)
        made = made.permute([order.index(at) for at in range(value.ndim)])
        if is_mask:
            return made
        size, first = value.shape[dim], self._start * factor
        for begin in range(first + (-first // size) * size, shape[dim], size):  # other rows are as good as any
            low, high = max(begin, 0), min(begin + size, shape[dim])
            made.narrow(dim, low, high - low).copy_(value.narrow(dim, low - begin, high - low))
        return made

    def _part(self, value: torch.Tensor, dim: int, factor: int) -> torch.Tensor:
        return value.narrow(dim, self._start * factor, self._count * factor)

    def _result(self, value: Any, dim: int, factor: int) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] == factor * self._rows:
            return self._part(value, dim, factor).clone()
        return value


_drawing: Final = list[Draws]()
"""The modes that random operators run under, the outermost first."""
_KEY: Final = "TESTING_ONLY_GenericMode"


@cache
def _random_key() -> torch._C.DispatchKey | None:
    """Return the dispatch key that leads random operators past the modes in ``_drawing``, None where torch has none.

    A dispatch mode that stays on costs some 10 µs for each operator; a key that falls through costs nothing, and torch
    has one that no kernel of its own uses. It is for whoever includes it; what is registered stays.
    """
    try:
        key = torch._C._dispatch_key_parse(_KEY)
    except RuntimeError:
        return None
    others, random = (torch.library.Library(home, "IMPL", _KEY) for home in ("_", "aten"))  # type: ignore[no-untyped-call]
    others.m.fallback_fallthrough(_KEY)  # type: ignore[union-attr]
    _registered.extend((others, random))
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(packet, overload)[2] if name.startswith("aten::") else ()
        if torch.Tag.nondeterministic_seeded in tags:
            operator = getattr(getattr(torch.ops.aten, packet.removeprefix("aten::")), overload or "default")
            random.impl(operator, partial(_led, operator, torch._C.DispatchKeySet(key)))  # type: ignore[no-untyped-call]
    return key


_registering: Final = Lock()
_registered: Final = list[torch.library.Library]()
"""Kept, as a registration ends with its library."""


def _led(operator: Any, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as modes:
        modes.enter_context(torch._C._ExcludeDispatchKeyGuard(keys))
        for mode in tuple(_drawing):
            modes.enter_context(mode)
        return operator(*args, **kwargs)


@contextmanager
def _as_written() -> Iterator[None]:
    """Have compiled functions run as they are written, whose kernels would draw by themselves."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    begin: Any = frames.set_eval_frame  # what is compiled begins with it
    frames.set_eval_frame = lambda _callback: None
    try:
        yield
    finally:
        frames.set_eval_frame = begin


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], bool, bool]:
    """Return the names of an operator's arguments, whether it draws random numbers, and whether a kernel of it does."""
    names, schema = tuple(one.name for one in func._schema.arguments), func._schema
    draws_inside = any(one.name in _KERNELS for one in (*schema.arguments, *schema.returns))
    return names, torch.Tag.nondeterministic_seeded in func.tags, draws_inside


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in memory without gaps, and no two of its numbers in one place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _order(tensor: torch.Tensor) -> Sequence[int]:
    return sorted(range(tensor.ndim), key=lambda at: (-tensor.stride()[at], at))


def _shape(name: str, value: Any) -> Sequence[int] | None:
    if isinstance(value, torch.Tensor):
        return value.shape
    return value if name == "size" and isinstance(value, list | tuple) else None
