"""Storages of tensors, read without dispatching an operation or running code of the user's.

A storage is known by the address of its ``StorageImpl``: views, tied weights and detached copies share one. Plain
tensors are read in bulk, since each attribute of each of 50,000 tensors would else cost a turn of the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.objects.held import attributes
from oomdoctor.objects.kinds import Kind, kind_of, module_of

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
    """Return the storages that hold the contents of ``tensors``, in their order; one may come more than once.

    None for fake and meta tensors, which have no memory.
    """
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
