"""Storages of tensors, and what the autograd graph keeps of them, read without running an operation or the user's code.

A storage is known by the address of its ``StorageImpl``: views, tied weights and detached copies share one. Plain
tensors are read in bulk, since each attribute of each of 50,000 tensors would else cost a turn of the interpreter.

The tensors that a graph saved for backward are found by walking ``next_functions``. They are read through
``_raw_saved_*``, never through ``_saved_*`` or ``saved_tensors``: those unpack, and on a checkpointed graph to unpack
is to run the forward again. What a hook has packed is looked at as it lies there: a checkpoint's place holder holds
no memory, ``save_on_cpu`` holds a host tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from types import GetSetDescriptorType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.objects.children import attributes
from oomdoctor.objects.kinds import Kind, PerType, held_by, kind_of, module_of, plain_dict, qualname_of
from oomdoctor.objects.walk import tensors_in

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that answer for themselves, in C."""
_PLAIN: Final = frozenset(map(id, PLAIN))
"""By their ``id``: looked for in a set, other types would ask their metaclass for ``__hash__``."""

_untyped_storage: Final = torch.Tensor.untyped_storage
_nbytes: Final = torch.UntypedStorage.nbytes
_address: Final = attrgetter("_cdata")
_device: Final = attrgetter("device")
# Of a storage, past its class, which may be the user's.
_in_c: Final = vars(torch._C.StorageBase)
_device_of: Final = _in_c["device"].__get__
_address_of: Final = _in_c["_cdata"].__get__
_pointer_of: Final = _in_c["data_ptr"]
_is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor


Storage: TypeAlias = tuple[int, int, torch.device, torch.Tensor]
"""One storage: its identity while it lives, its bytes, where it is, and a tensor that lies in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Bare:
    """A storage in the place of a tensor: one that the program holds itself, or a part of ``tensor``."""

    storage: torch.UntypedStorage
    tensor: torch.Tensor | None = None

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage."""
        return self.storage

    @property
    def device(self) -> torch.device:
        """Where it is."""
        device: torch.device = _device_of(self.storage)
        return device


@contextmanager
def unobserved() -> Iterator[None]:
    """Run the body past tensor subclasses and everybody's function and dispatch modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def storages_of(tensors: Sequence[torch.Tensor]) -> Iterable[Storage]:
    """Return the storages that hold the contents of ``tensors``, in their order, again and again; none of fakes."""
    columns = plain_storages(tensors)
    if columns is not None:
        return zip(*columns, map(_device, tensors), tensors, strict=True)
    seen: set[int] = set()
    return (storage for tensor in tensors for storage in _storages_in(tensor, seen))


def plain_storages(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Return keys and bytes of the storages of plain tensors, in their order; None if one of them is not plain."""
    if not _PLAIN.issuperset(map(id, map(type, tensors))):
        return None
    try:
        storages = list(map(_untyped_storage, tensors))
    except (NotImplementedError, RuntimeError):  # a sparse one, one of ``vmap``, or another without a storage
        return None
    return list(map(_address, storages)), list(map(_nbytes, storages))


def begin_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor; to ask for it copies nothing that is shared until written."""
    try:
        address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        return address - int(tensor.storage_offset()) * tensor.element_size()
    except (NotImplementedError, RuntimeError):  # one without a storage
        return 0


def is_plain(tensor: Any) -> bool:
    """Return whether the type of a tensor answers for itself."""
    return id(type(tensor)) in _PLAIN


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor stands for memory that it does not have: fake and meta tensors."""
    if is_plain(tensor):
        return tensor.is_meta
    return module_of(type(tensor)) == "torch._subclasses.fake_tensor"


def _storages_in(tensor: Any, seen: set[int]) -> Iterator[Storage]:
    """Yield the storages of one tensor: its own, or those of what it is made of.

    Of a subclass, layout, device and sizes are not asked: it may answer such questions itself.
    """
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    if type(tensor) is Bare:
        yield from _known(tensor.storage, tensor)
    elif _is_wrapped(tensor):
        yield from _storages_in(torch._C._functorch.get_unwrapped(tensor), seen)
    elif is_plain(tensor) and tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        # Its memory is oneDNN's, without a storage; padding of its blocked layout is not counted.
        yield tensor._cdata, tensor.numel() * tensor.element_size(), tensor.device, tensor
    elif is_plain(tensor):
        for part in _parts(tensor):
            # A part that was made to be looked at here must not be kept: it would be found as one of the program's.
            for storage in _own(part):
                lying: Any = tensor if part is tensor else Bare(_untyped_storage(part), tensor)
                yield *storage[:3], lying
    else:
        yield from _own(tensor)
        for value in (held for _, held in attributes(tensor)):
            if kind_of(type(value)) is Kind.TENSOR:
                yield from _storages_in(value, seen)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a plain tensor is made of: itself, or those of a sparse one."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return (tensor,)


def _own(tensor: torch.Tensor) -> Iterator[Storage]:
    try:
        storage = _untyped_storage(tensor)
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return
    yield from _known(storage, tensor)


def _known(storage: torch.UntypedStorage, tensor: Any) -> Iterator[Storage]:
    # A fake tensor says the device that it stands for; its storage tells. A wrapper's may have a size and no memory.
    device = _device_of(storage)
    if device.type != "meta" and _has_memory(storage):
        yield _address_of(storage), _nbytes(storage), device, tensor


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        _pointer_of(storage)
    except RuntimeError:
        return False
    return True


DEEPEST: Final = 10_000
"""A node that Python has looked at is freed by recursion (torch 2.13; others by a loop): about 45,000 nodes in a row
overflow a stack of 8 MiB, by experiment."""
_RAW: Final = "_raw_saved_"
LEAF: Final = "AccumulateGrad"
"""Type of the node that accumulates the gradient of a leaf."""
_grad_fn: Final = vars(torch._C.TensorBase)["grad_fn"].__get__


class Saved(NamedTuple):
    """What the graph behind one tensor holds that no graph before it did.

    Attributes:
        leaves: tensors that gradients accumulate into; ``again``: those of them that a graph before it held as well.
        is_alive: whether it, or a graph that it shares nodes with, still holds saved tensors; a backward frees them.
    """

    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    again: list[torch.Tensor]
    is_alive: bool


@dataclass(slots=True)
class Graphs:
    """Walks graphs, each node once. Short-lived: it holds nodes, and those hold memory.

    Attributes:
        is_cut: whether a graph was deeper than it was followed.
        is_untold: whether nodes keep something of which this torch does not tell what it is, or whether it is freed.
        packed: how many saved tensors hooks had packed into something that holds no tensor, by the type of that.
        links: which graphs run into one that was walked before, each by its number, counted from 0.
        saved: every tensor saved for backward; ``savers``: the node that saved it, for each.
        made: every tensor that a graph was followed from; ``makers``: the node that made it, for each.
        below: ``next_functions`` of every node that was followed.
        roots: the last node of each graph; ``inner``: those that a module has made which was still running.
    """

    packed: Counter[str] = field(default_factory=Counter)
    links: dict[int, set[int]] = field(default_factory=dict)
    is_cut: bool = False
    is_untold: bool = False
    saved: list[torch.Tensor] = field(default_factory=list)
    savers: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    makers: list[Any] = field(default_factory=list)
    below: dict[Any, tuple[tuple[Any, int], ...]] = field(default_factory=dict)
    roots: set[Any] = field(default_factory=set)
    inner: set[Any] = field(default_factory=set)
    _met: dict[Any, int] = field(default_factory=dict)
    _alive: list[bool] = field(default_factory=list)

    def behind(self, tensor: Any, *, is_inner: bool = False) -> Saved | None:
        """Return what the graph that made ``tensor`` holds, None for a tensor without one; see ``from_node``."""
        root = _grad_fn(tensor)
        if root is None:
            return None
        self.made.append(tensor)
        self.makers.append(root)
        return self.from_node(root, is_inner=is_inner)

    def from_node(self, root: Any, *, is_inner: bool = False) -> Saved:
        """Return what the graph holds that ``root`` is the last node of.

        ``is_inner``: whether a module that was still running has made it.
        """
        number = len(self._alive)
        self._alive.append(False)
        (self.inner if is_inner else self.roots).add(root)
        met, savers, todo = self._met, self.savers, [(root, 0)]
        tensors: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []
        again: dict[Any, None] = {}
        shares, count = False, 0
        while todo:
            node, depth = todo.pop()
            if node in met:
                before = met[node]
                shares = shares or self._alive[before]
                if before != number and type(node).__name__ == LEAF:
                    again[node] = None
                elif before != number:
                    self.links.setdefault(before, set()).add(number)
                continue
            met[node] = number
            cls = type(node)
            readers, is_leaf, is_python = _sort_of.known.get(id(cls)) or _sort_of(cls)
            if is_leaf:
                leaves.append(node.variable)
                self.below[node] = ()
                continue
            for read in readers:
                self._take(read, node, tensors)
            if is_python:  # a Function written in Python keeps what it likes
                for value in (plain_dict(node) or {}).values():
                    tensors += tensors_in(value)
            if len(tensors) > count:
                savers += [node] * (len(tensors) - count)
                count = len(tensors)
            if depth < DEEPEST:
                below = self.below[node] = _below(node)
                todo += [(following, depth + 1) for following, _ in below if following is not None]
            else:
                self.is_cut = True
        self.saved += tensors
        self._alive[number] = bool(tensors) or shares
        return Saved(tensors, leaves, [node.variable for node in again], self._alive[number])

    def _take(self, read: Any, node: Any, tensors: list[torch.Tensor]) -> None:
        try:
            saved = read(node)
        except RuntimeError:  # a backward freed it
            return
        for one in saved if type(saved) is tuple else (saved,):
            try:
                held = one.data
            except AttributeError:  # a ``SavedTensor`` of an older version
                self.is_untold = True
                continue
            except RuntimeError:
                continue
            if type(held) is torch.Tensor or kind_of(type(held)) is Kind.TENSOR:
                tensors.append(held)
            elif held is not None:
                inside = list(tensors_in(held))
                tensors += inside or _kept_for_recomputing(one)
                if not inside:
                    self.packed[f"{module_of(type(held))}.{qualname_of(type(held))}"] += 1


def _below(node: Any) -> tuple[tuple[Any, int], ...]:
    try:
        below: tuple[tuple[Any, int], ...] = node.next_functions
    except RuntimeError:  # a ``ctx`` that outlives its graph: older versions of torch do not tell what it led to
        return ()
    return below


def _kept_for_recomputing(saved: Any) -> Iterator[Any]:
    """Yield what a checkpoint keeps to run its forward again: inputs, and states of random number generators.

    They hang on the hook that would unpack. Source: ``_checkpoint_hook``, ``_CheckpointFrame.saved_args`` and
    ``fwd_cpu_state`` in torch/utils/checkpoint.py, torch 2.13.
    """
    hook = getattr(saved, "unpack_hook", None)
    for _, held in held_by(hook) if hook is not None else ():
        values: list[Any] = list((plain_dict(held) or {}).values())
        for item in (item for value in values if type(value) in (list, tuple) for item in value):
            kept = getattr(item, "data", None) if type(item) is torch._C._autograd.SavedTensor else None
            if kind_of(type(kept)) is Kind.TENSOR:
                yield kept
        for _, item in (kept for value in values if kind_of(type(value)) is Kind.CALLABLE for kept in held_by(value)):
            yield from tensors_in(item)


def _sort(cls: type) -> tuple[tuple[Any, ...], bool, bool]:
    """Return how nodes of a class are read: by getters made in C, whether as leaves, whether of a Python Function."""
    readers = tuple(
        value.__get__
        for base in cls.__mro__
        for name, value in vars(base).items()
        if name.startswith(_RAW) and type(value) is GetSetDescriptorType
    )
    return readers, cls.__name__ == LEAF, issubclass(cls, torch._C._FunctionBase)


_sort_of: Final = PerType(_sort)
