"""The dispatch mode of the dry run: real tensors become fake twins on the fly, and every storage goes into the ledger.

It stands on top of a ``FakeTensorMode``. Nothing of the user's is converted beforehand: modules, optimizers, closures
and graphs of earlier cells keep their real tensors, autograd works on those, and below autograd each is swapped for
a twin without data. An operation in place returns the real tensor that went in.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from itertools import count
from typing import Any, Final

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from oomdoctor.allocator.mode import run_apart, stays_whole
from oomdoctor.forecast.cost import Meter, scratch_bytes
from oomdoctor.forecast.fake_tensors import Fakes, adds_in_place, counts_alone, note_maker
from oomdoctor.forecast.live_storages import Ledger, Note
from oomdoctor.forecast.operators import COMPARISONS, HANDLERS, WORKSPACES, draws, move_generator
from oomdoctor.forecast.values import Scalars, follow_bounds
from oomdoctor.model.memory import Role

_torch: Any = torch
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)

raw_data: Any = torch._C.TensorBase.data
"""The descriptor behind ``Tensor.data``, which the dry run replaces (see ``stand_ins``)."""


_FOLLOWED_ELEMENTS: Final = 1 << 17
_FOLLOWED_TWINS: Final = 1 << 22
"""Literals, integers and masks of up to so many elements are computed with for real beside their twins; of those that
were there before, and have their values anyway, larger ones: labels of a data set."""

# The limit for what the fake mode computes by itself. It is 1 there: enough for a compiler, not for lists of lengths.
fake_tensor.CONSTANT_NUMEL_LIMIT = _FOLLOWED_ELEMENTS


_ADDRESSES: Final = 1 << 40
_PLACE: Final = 64
_PLACES: Final = 1 << 30


def _addresses() -> mmap.mmap | None:
    """Return addresses without memory behind them, None where they are limited."""
    if sys.platform == "win32":
        return None
    try:  # what cannot be written to is charged to nobody
        return mmap.mmap(-1, _ADDRESSES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None


class NoDevice(AssertionError):
    """The cell asks for a device that there is none of. Torch raises this type for CUDA."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on twins and accounts for what they allocate.

    Attributes:
        fake_mode: the mode that the twins belong to; to be entered before this one.
        meter: what the operations cost.
        ledger: counts the memory that is asked about; ``host``: that of the host, which is the same without a device.
        ledgers: by the type of the device.
        counts_scratch: whether what kernels of the CPU need inside counts.
        depth: frames from what calls the mode to the dispatch here.
        handlers: operations to be run on fake tensors by a function of their own: ``(func, args, kwargs)``.
        has_sparse: whether an operation has made a sparse tensor; how many entries those have, fakes do not know.
        is_uncompiled: whether code ran as it is that is compiled in a real run.
    """

    depth = 1

    def __init__(self, ledger: Ledger, *, counts_scratch: bool = False, of_card: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        counts_alone()
        self.fake_mode = Fakes()
        self.ledger, self.counts_scratch = ledger, counts_scratch
        self.meter = Meter(of_card=of_card, of_host=counts_scratch)
        self.scalars = Scalars(lambda: self.ledger.live)
        self.host, self.ledgers = ledger, {"cpu": ledger}
        self.handlers = HANDLERS | dict.fromkeys(COMPARISONS, self.scalars.compare)
        self.has_sparse = self.is_uncompiled = False
        self._places, self._places_buffer = count(), _addresses()
        self._repointed: Any = WeakIdKeyDictionary()
        self._twins: Any = WeakIdKeyDictionary()
        self._written: Any = WeakIdKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a dry run, and the wrapper that this spares costs as much as the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd asks this of every fake tensor; it is no operation
            return args[0].fake_device
        kwargs = kwargs or {}
        if func not in self.handlers and stays_whole(func, args):
            return run_apart(func, self, args, kwargs)
        self.ledger.clock += 1
        caller = sys._getframe(self.depth)
        if adds_in_place(func, args, caller):
            func = _aten.add_.Tensor
        if func is _aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._account(func(*args, **kwargs))  # the fake mode keeps the value of a literal
        originals: dict[int, torch.Tensor] = {}
        fake_args = self._swapped(args, originals)
        fake_kwargs = {name: self._swapped(value, originals) for name, value in kwargs.items()}
        out = self._run(func, fake_args, fake_kwargs)
        note_maker(out, caller)
        self.meter.count(func, fake_args, fake_kwargs, out)
        if func in WORKSPACES:
            self.hold_as(f"workspace of {func.__name__}", out[3].untyped_storage())
        self._account(out)
        self._follow_bounds(func, fake_args, out)
        if torch.is_grad_enabled():
            self._note_graph(args, out)
        for turn in self.turns(func, fake_args, fake_kwargs, out):
            name = f"scratch of {func._overloadpacket.__name__}"
            held = [_torch.UntypedStorage(size, device="meta") for size in turn]
            for storage in held:
                self.hold_as(name, storage)
            del held, storage
        if originals and func._schema.is_mutable:
            self._mark_written(args, kwargs)
        return originals.get(id(out), out) if isinstance(out, torch.Tensor) else out

    def turns(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[tuple[int, ...]]:
        """Return what an operation takes for itself, beside its results: sizes that are alive at once, in turns."""
        nbytes = scratch_bytes(func, args, out) if self.counts_scratch else 0
        return [(nbytes,)] if nbytes else []

    def _swapped(self, value: Any, originals: dict[int, torch.Tensor]) -> Any:
        """Return an argument with twins in the place of real tensors. By hand: this runs for every operation."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return value
            twin = self.twin(value)
            originals[id(twin)] = value
            return twin
        if type(value) in (list, tuple):
            return type(value)([self._swapped(item, originals) for item in value])
        return value

    def twin(self, real: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor that stands for ``real`` and shares its storage's entry in the ledger."""
        moved = self.moved(real)
        if moved is not None:
            return moved
        twin: torch.Tensor | None = self._twins.get(real)
        if twin is None:
            with no_dispatch():
                plain = raw_data.__get__(real)  # without its graph, which is above this and has nothing to say here
            converter = self.fake_mode.fake_tensor_converter
            twin = converter.from_real_tensor(self.fake_mode, plain, make_constant=_is_small_index(plain))
            self._twins[real] = twin
            if real.layout is torch.strided:
                self.host.twin(real.untyped_storage(), twin.untyped_storage())
        return twin

    def repoint(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Assign ``fake`` to ``real.data``: its storage goes, its shape and dtype become those of ``fake``."""
        with _disable_current_modes():
            raw_data.__set__(real, self._place_holder(fake))
        self._twins.pop(real, None)
        self._repointed[real] = fake.detach()
        if isinstance(real, torch.nn.Parameter):
            self.mark(real, Role.PARAMETER)

    def _place_holder(self, fake: torch.Tensor) -> torch.Tensor:
        """Return a real tensor that lies as ``fake`` does, for compiled code asks for strides; without any memory."""
        needed = 1 + sum((length - 1) * stride for length, stride in zip(fake.shape, fake.stride(), strict=True))
        begin = (next(self._places) * _PLACE) % _PLACES  # so that no two have the same address
        if self._places_buffer is None or not fake.numel() or begin + needed * fake.element_size() > _ADDRESSES:
            return torch.empty((), dtype=fake.dtype).expand(fake.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            room = torch.frombuffer(self._places_buffer, dtype=fake.dtype, count=needed, offset=begin)
        return room.as_strided(fake.shape, fake.stride())

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what ``tensor.data`` is."""
        moved = self.moved(tensor)
        found: torch.Tensor = raw_data.__get__(tensor) if moved is None else moved.detach()
        return found

    def hold_real(self, real: torch.Tensor, role: Role) -> None:
        """Count a real tensor that came to be outside of the modes, and is there for this."""
        if real.layout is torch.strided:
            self.host.hold(real.untyped_storage())
            self.mark(real, role)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a real tensor with the values that ``tensor`` would have in a real run; None if they are not known."""
        if isinstance(tensor, FakeTensor):
            return tensor.constant
        if tensor in self._written or tensor in self._repointed:
            return getattr(self.twin(tensor), "constant", None)
        return tensor

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        handler = self.handlers.get(func)
        if handler is None and draws(func, args, kwargs):
            move_generator(kwargs.get("generator"))
        try:
            return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)
        except (NotImplementedError, fake_tensor.UnsupportedOperatorException):
            schema = func._schema
            if schema.is_mutable and all(result.alias_info is not None for result in schema.returns):
                return args[0] if schema.returns else None  # in place without a meta kernel: allocates nothing
            raise

    def _account(self, out: Any) -> Any:
        if isinstance(out, FakeTensor):
            if out.layout is torch.strided and out.fake_device.type != "meta":
                self._ledger_of(out.fake_device).hold(out.untyped_storage())
            self.has_sparse = self.has_sparse or out.layout is not torch.strided
        elif isinstance(out, (tuple, list)):
            for part in out:
                self._account(part)
        return out

    def _ledger_of(self, device: torch.device) -> Ledger:
        found = self.ledgers.get(device.type)
        if found is None:
            raise NoDevice(f"Torch not compiled with {device.type.upper()} enabled")  # as torch would say
        return found

    def moved(self, real: torch.Tensor) -> torch.Tensor | None:
        """Return the fake tensor that the data of ``real`` was replaced by, None if it was not."""
        moved: torch.Tensor | None = self._repointed.get(real)
        return moved

    def hold_as(self, temporary: str, storage: torch.UntypedStorage) -> None:
        """Count a storage that the device's libraries or an operation need for themselves."""
        aside, self.ledger.making = self.ledger.making, temporary
        self.ledger.hold(storage)
        self.ledger.making = aside

    def _follow_bounds(self, func: Any, args: Any, out: Any) -> None:
        given = (self.note_of(value) for value in _flat(args) if isinstance(value, torch.Tensor))
        made = ((value, self.note_of(value)) for value in _flat((out,)) if isinstance(value, torch.Tensor))
        follow_bounds(func, given, made)

    def _note_graph(self, args: Any, out: Any) -> None:
        """Take down which storages a differentiated operation puts into the graph, and which are fed to it."""
        given = [value for value in _flat(args) if isinstance(value, torch.Tensor)]
        if not any(value.requires_grad for value in given):
            return
        made = [self.note_of(value) for value in _flat((out,)) if isinstance(value, torch.Tensor)]
        first = made[0] if made else None
        for note in made:
            # One result that is not a floating point number leads nowhere; of several, the graph keeps them all.
            if note is not None and (len(made) > 1 or _is_floating(out)):
                note.in_graph = True
        for value in given:
            note = self.note_of(value)
            if note is None:
                continue
            of_one_statement = first is not None and (note.turn, note.statement) == (first.turn, first.statement)
            if value.requires_grad or of_one_statement:
                note.in_graph = True
            else:
                note.fed = True

    def note_of(self, tensor: torch.Tensor) -> Note | None:
        """Return what the ledger notes of the memory of a tensor, None where that is not counted."""
        moved = self.moved(tensor)
        tensor = tensor if moved is None else moved
        return self.ledger.note_of(tensor.untyped_storage()) if tensor.layout is torch.strided else None

    def mark(self, tensor: torch.Tensor, role: Role) -> None:
        """Tell what the memory of a tensor is there for."""
        moved = self.moved(tensor)
        tensor = tensor if moved is None else moved
        if tensor.layout is torch.strided:
            self.ledger.mark(tensor.untyped_storage(), role)

    def _mark_written(self, args: Any, kwargs: Any) -> None:
        """Remember real tensors that an operation wrote to: what they hold is no longer what the cell would see."""
        for leaf in tree_iter((args[:1], kwargs.get("out"))):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                self._written[leaf] = True

    def _scalar(self, tensor: torch.Tensor) -> Any:
        values = self.values_of(tensor)
        if values is None:
            return self.scalars.answer(tensor)
        with _disable_current_modes():
            return values.item()


def _is_small_index(tensor: torch.Tensor) -> bool:
    """Whether the values of a real tensor may steer the program and are cheap to follow: lengths, labels, counters."""
    if tensor.dtype.is_floating_point or tensor.numel() > _FOLLOWED_TWINS:
        return False
    return not tensor.untyped_storage().is_shared()  # which other processes would see being written


def _is_floating(out: Any) -> bool:
    return not isinstance(out, torch.Tensor) or out.dtype.is_floating_point or out.dtype.is_complex


def _flat(values: Any) -> list[Any]:
    """Return what an operation was given, or has returned, with the items of its lists."""
    found: list[Any] = []
    for value in values:
        if type(value) in (list, tuple):
            found += value
        else:
            found.append(value)
    return found
