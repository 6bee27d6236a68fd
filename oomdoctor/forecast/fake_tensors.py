"""The fake mode of a dry run: tensors without data, whose sizes are worked out once for the same arguments.

What an operator makes of arguments of some sizes is noted, and made again from that note the next time, at a fifth of
the time that torch's own cache takes: its keys hold what a compiler has to know besides. A note is of plain tensors:
with memory of their own, or views of an argument, or the argument itself. Dry runs pass their notes on.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oomdoctor.allocator.mode import TELLING

_aten: Final = torch.ops.aten
_UNFILLED: Final = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
_BY_VALUES: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


_noted: Final = dict[Hashable, Any]()
"""What operators made, by their names and arguments; ``_own``: the keys that this process has added."""
_own: Final = list[Hashable]()


def taken_down() -> dict[Hashable, Any]:
    """Return what this dry run has noted, for others."""
    return {key: _noted[key] for key in _own}


def learn(noted: dict[Hashable, Any]) -> None:
    """Take over what another dry run has noted."""
    _noted.update(noted)


class _Unknown(Exception):
    """Something is not of the kinds that notes are made of."""


class _Result(NamedTuple):
    """One result; ``of`` is the place of the argument whose memory it shares, or that it is itself (``is_it``)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int | None
    is_it: bool


class Fakes(FakeTensorMode):
    """The fake mode without the wrapper that keeps compilers out of it: nothing is compiled in a dry run.

    It would run ``empty_like`` of a tensor whose values are known for real, and take what happens to lie there for the
    values of the result, also where a meta kernel makes its result so.
    """

    def __init__(self) -> None:
        # Fallback kernels would run for real, on zeros of full size.
        super().__init__(allow_fallback_kernels=False)  # type: ignore[no-untyped-call]
        # A fake on a device would begin to use that, which a copy of a process cannot.
        fake_tensor.init_gpu_context = lambda _device: None  # type: ignore[assignment]
        self.cache_enabled = False
        self.fake_tensor_converter = _Converter()
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, given = kwargs or {}, list[FakeTensor]()
        try:
            key = self._key(func, args, kwargs, given)
        except _Unknown:
            return self._worked_out(func, types, args, kwargs)
        noted = _noted.get(key)
        if noted is not None:
            return self._made(noted, given)
        out = self._worked_out(func, types, args, kwargs)
        with suppress(_Unknown):
            if self._key(func, args, kwargs, []) == key:  # else it has changed the sizes of what it was given
                _noted[key] = _note(out, given, set())
                _own.append(key)
        return out

    def _worked_out(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out: Any = self.dispatch(func, types, args, kwargs)
        if func in _UNFILLED:
            out.constant = None
        return out

    def _key(self, func: Any, args: Any, kwargs: Any, given: list[FakeTensor]) -> Hashable:
        """Return what tells the sizes of the results, and fill ``given`` with the tensors among the arguments.

        Raises:
            _Unknown: something else tells them.
        """
        if not _goes_by_sizes(func) or torch.is_inference_mode_enabled():  # whose views have no memory to be set to
            raise _Unknown
        named = (*kwargs, *_described(kwargs.values(), given)) if kwargs else ()
        settings = torch.get_default_dtype(), torch.is_grad_enabled()
        return (func._name, *_described(args, given), named, *settings)

    def _made(self, noted: Any, given: list[FakeTensor]) -> Any:
        if type(noted) is _Result:
            if noted.is_it:
                return given[noted.of]  # type: ignore[index]
            with torch._C._DisableTorchDispatch():
                if noted.of is None:
                    made = torch.empty_strided(noted.size, noted.stride, dtype=noted.dtype, device="meta")
                else:
                    made = torch.empty(0, dtype=noted.dtype, device="meta")
                    made.set_(given[noted.of].untyped_storage(), noted.offset, noted.size, noted.stride)
            return self.faked(made, noted.device)
        kind, items = noted
        return items if kind is None else kind([self._made(item, given) for item in items])

    def faked(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return what ``FakeTensor`` makes, with the attributes that it has given to another one."""
        known = self._attributes.get(device)
        if known is None:
            first = FakeTensor(self, made, device)
            self._attributes[device] = dict(vars(first))
            return first
        faked: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(faked).update(known)
        return faked


class _Converter(FakeTensorConverter):
    """Stands fakes for plain tensors whose values are followed, at a fifth of the time that torch's own way takes.

    That one describes a tensor by all in which it may be unlike others.
    """

    def from_real_tensor(
        self, fake_mode: Any, t: torch.Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        """Return the fake that stands for ``t``; tensors that share memory get fakes that do."""
        is_special = t.requires_grad or torch.is_inference_mode_enabled() or t.is_inference() or not _is_plain(t)
        if not make_constant or type(t) is not torch.Tensor or is_special:
            return super().from_real_tensor(fake_mode, t, make_constant, *args, **kwargs)
        known = self._get_memo(t)
        if known is not None:
            return known
        with torch._C._DisableTorchDispatch():
            storage = t.untyped_storage()
            made = torch.empty(0, dtype=t.dtype, device="meta")
            place = self.meta_converter.describer.get_storage_id(storage)
            if (there := self.meta_converter.storage_memo.get(place)) is None:
                there = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
                self.meta_converter.storage_memo[place] = there
            made.set_(there, t.storage_offset(), t.shape, t.stride())
        fake: FakeTensor = fake_mode.faked(made, t.device)
        fake.constant = t
        self.set_tensor_memo(t, fake)
        self.add_constant_storage_mapping(fake)
        return fake


@cache
def _goes_by_sizes(func: Any) -> bool:
    """Whether the sizes of what an operator of torch makes are told by those of its arguments."""
    if func.namespace != "aten" or not _BY_VALUES.isdisjoint(func.tags):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _described(values: Any, given: list[FakeTensor]) -> Iterator[Hashable]:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.is_inference() or not _is_plain(value):
                raise _Unknown
            given.append(value)
            yield value.shape
            yield value.stride()
            yield value.storage_offset()
            yield value.dtype
            yield value.fake_device
            yield value.requires_grad
        elif kind in TELLING:
            yield kind.__name__
            yield value
        elif kind in (list, tuple, torch.Size):
            yield len(value)
            yield from _described(value, given)
        else:
            raise _Unknown


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex and not tensor.is_neg()


def _note(out: Any, given: list[FakeTensor], fresh: set[int]) -> Any:
    """Return what the results are made again by; ``fresh`` is the memory that earlier results have for themselves.

    Raises:
        _Unknown: they are not to be had so.
    """
    if isinstance(out, list | tuple):  # decompositions return tuples with names
        return list if type(out) is list else tuple, [_note(item, given, fresh) for item in out]
    if type(out) in TELLING:
        return None, out
    if type(out) is not FakeTensor or out.constant is not None or out.requires_grad or not _is_plain(out):
        raise _Unknown
    storage = out.untyped_storage()._cdata
    same = [at for at, one in enumerate(given) if one is out]
    sharing = (at for at, one in enumerate(given) if one.untyped_storage()._cdata == storage)
    of = next(iter(same or sharing), None)
    size, stride, offset = tuple(out.shape), out.stride(), int(out.storage_offset())
    if of is None:
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if out.numel() else -1
        if offset or storage in fresh or out.untyped_storage().nbytes() != (last + 1) * out.element_size():
            raise _Unknown
        fresh.add(storage)
    return _Result(size, stride, offset, out.dtype, out.fake_device, of, bool(same))


# Sums of gradients ----------------------------------------------------------------------------------------------------

# Where a tensor was used more than once, the engine adds up its gradients: into the first of them if nobody else holds
# it, into a new tensor otherwise, and always into a new one where the first is of a subclass, as every fake is. So what
# the engine would do with plain tensors is told here, by the same counts of references; what a fake has more of them is
# measured on an accumulation that is known. Source: ``can_accumulate_inplace`` in
# ``torch/csrc/autograd/input_buffer.cpp``.


_ADD: Final = torch.ops.aten.add.Tensor
_ENGINE: Final = torch.autograd.graph._engine_run_backward.__code__
_MAKER: Final = "_oomdoctor_maker"
"""Attribute of a fake gradient: number of the node of the graph that made it."""


def adds_in_place(func: Any, args: Any, caller: FrameType | None) -> bool:
    """Return whether an operation is the engine's, and adds a gradient to one that nobody else holds.

    ``caller`` is the frame that called the mode, with ``args`` as a dispatch mode gets them.
    """
    if func is not _ADD or caller is None or caller.f_code is not _ENGINE or torch.is_grad_enabled():
        return False
    alone = counts_alone()
    return alone is not None and _are_gradients(args) and _holders(args) == alone


def note_maker(out: Any, caller: FrameType | None) -> None:
    """Note which node has made a gradient: what a node adds to something of its own is no accumulation."""
    if isinstance(out, FakeTensor) and caller is not None and caller.f_code is _ENGINE:
        setattr(out, _MAKER, _node())


def _node() -> int | None:
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _are_gradients(args: Any) -> bool:
    if len(args) != 2 or not all(isinstance(value, FakeTensor) for value in args):
        return False
    into, more = args
    if into.layout is not torch.strided or more.layout is not torch.strided:
        return False
    fits = (into.shape, into.dtype, into.fake_device) == (more.shape, more.dtype, more.fake_device)
    return fits and _is_dense(into) and getattr(into, _MAKER, None) != _node()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each place in memory, from the first to the last, is that of one element."""
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _holders(args: Any) -> tuple[int, int, int]:
    """Return how many hold the first argument, its object and its memory."""
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return args[0]._use_count(), sys.getrefcount(args[0]), storage


@cache
def counts_alone() -> tuple[int, int, int] | None:
    """Return the counts of a gradient that the engine alone holds, None where they cannot be had in this version.

    To be called first outside of an operation, where autograd is at work.
    """
    found: list[tuple[int, int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and sys._getframe(1).f_code is _ENGINE:
                found.append(_counted(func, args))
            return func(*args, **(kwargs or {}))

    def _counted(_func: Any, args: Any) -> tuple[int, int, int]:  # as deep as ``adds_in_place``
        return _holders(args)

    try:
        with _disable_current_modes(), torch.enable_grad():
            # The engine starts its threads once, for devices that there are. Fakes pretend one where torch is built for
            # CUDA (``ensureCUDADeviceGuardSet``), and after a fork a thread for it would be taken for lost.
            torch.autograd.backward(torch.ones((), requires_grad=True).clone())
        with _disable_current_modes(), torch.enable_grad(), FakeTensorMode(), Watch():  # type: ignore[no-untyped-call]
            x = torch.empty(2, requires_grad=True)
            used = x * 1
            torch.autograd.backward((used.sin() * used.cos()).sum())
    except AttributeError:  # counts that another version does not tell
        return None
    return found[0] if len(set(found)) == 1 else None
