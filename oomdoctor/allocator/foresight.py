"""Tells what an operation is about to allocate, so that what cannot fit is refused before the host pays for it.

Without it a tensor of 40 GiB on a simulated device of 512 MiB would first be computed, on a machine that may have
8 GiB, and the process killed before the simulation could say no.

Limits: operations of ATen on plain CPU tensors whose result sizes follow from their argument sizes. Of all others the
results are counted when they exist.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable

_WIDEST_ITEM: Final = 16
_LARGE: Final = 1 << 20
_UNFORESEEABLE: Final = (RuntimeError, TypeError, ValueError, IndexError)
_PRODUCTS: Final = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
_MOST_REMEMBERED: Final = 1024
_allocates: dict[Any, bool] = {}
_foreseen: dict[Any, tuple[int, ...]] = {}


def most_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return bytes that the results of ``func`` hardly exceed: cheap, and mostly far too high.

    No result of an operation has more elements than its tensor arguments multiplied (an outer product), or than the
    sizes that it is given multiplied. Zero for operations that only write in place or make views.
    """
    allocates = _allocates.get(func)
    if allocates is None:
        allocates = _allocates[func] = _returns_new_memory(func)
    if not allocates:
        return 0
    elements = 1
    for value in args:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            elements *= value.numel() or 1
        elif kind is list or kind is tuple:
            elements *= _elements_of(value)
        elif kind is int and value > 1:
            elements *= value
    if elements > _LARGE:
        elements = _tighter(func, [value for value in args if isinstance(value, torch.Tensor)], elements)
    return elements * _WIDEST_ITEM


def foreseen_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the bytes of the results of ``func`` one by one, as its meta kernel tells them; () where it cannot.

    Call it outside of dispatch modes. No data is read, no random number drawn. What was foreseen for a shape is
    remembered: some meta kernels take longer than the operation.
    """
    seen = (func, _signature(args), _signature(kwargs.items()))
    try:
        if seen not in _foreseen:
            if len(_foreseen) >= _MOST_REMEMBERED:
                _foreseen.clear()
            _foreseen[seen] = _ask_meta_kernel(func, args, kwargs)
        return _foreseen[seen]
    except TypeError:  # an argument that cannot be a key
        return _ask_meta_kernel(func, args, kwargs)


def _tighter(func: Any, tensors: list[torch.Tensor], elements: int) -> int:
    """Return the elements of the result where its shape is simple to tell, which is so for most operations run."""
    if func._schema.name in _PRODUCTS:
        left, right = tensors[-2:]
        return left.numel() // max(left.shape[-1], 1) * right.shape[-1]
    if torch.Tag.pointwise in func.tags and tensors:
        sizes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
        return math.prod(map(max, sizes))
    return elements


def _ask_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if any(argument.name == "device" for argument in func._schema.arguments):
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            return ()
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        results = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
    except _UNFORESEEABLE:
        return ()
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(result.numel() * result.element_size() for result in results if type(result) is torch.Tensor)


def _returns_new_memory(func: Any) -> bool:
    """Whether some result is a fresh tensor, by the schema, and every argument can be stood in for."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None or func.namespace != "aten" or schema.name.startswith("aten::_foreach"):
        return False
    return any(returned.alias_info is None and "Tensor" in str(returned.type) for returned in schema.returns)


def _signature(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(
        (value.shape, value.dtype)
        if isinstance(value, torch.Tensor)
        else _signature(value)
        if isinstance(value, (list, tuple))
        else (type(value), value)
        for value in values
    )


def _elements_of(values: list[Any] | tuple[Any, ...]) -> int:
    if values and type(values[0]) is int:
        return math.prod(size for size in values if size > 0)
    return max(sum(value.numel() for value in values if isinstance(value, torch.Tensor)), 1)


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
