"""What the host side of CUDA's operators takes from the caching allocator for itself, and gives back at the end.

The sizes follow from the shapes by the code that asks for them. An operation takes its scratch in turns: what one turn
takes is alive at once, beside the results.

Limits: sorts, ``unique`` and gradients of indices go by an upper bound where values decide. What NVIDIA's own
libraries ask for is not here: workspaces of convolutions, recurrent layers and linear algebra.

Source: the files of ``aten/src/ATen/native/cuda`` that are named at each; allocator traces of torch 2.14 for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from oomdoctor.forecast.cost import dense_copy, matrix_copy
from oomdoctor.forecast.values import named

if TYPE_CHECKING:
    from oomdoctor.sandbox.card import Card

_aten = torch.ops.aten

Turns: TypeAlias = "list[tuple[int, ...]]"
_Rule: TypeAlias = "Callable[[Card, dict[str, Any], Any], Turns]"
"""Gives the turns of an operation from the card, the arguments by name, and what it returns."""

_HALVES: Final = (torch.float16, torch.bfloat16)
_INDEX: Final = torch.int64.itemsize
_FEW_INDICES: Final = 3072
"""Indices up to which the gradient of an embedding is made without sorting. Source: ``Embedding.cu``."""
_WARP: Final = 32
_ROWS_OF_A_THREAD: Final = 10
"""Source: ``NROWS_PER_THREAD`` in ``EmbeddingBackwardKernel.cu``."""
_SORTED_IN_PLACE: Final = 4096
"""Elements of a row up to which it is sorted by one block. Source: ``Sort.cu``."""
_BLOCK: Final = 64
"""Queries and features of a block of the memory-efficient attention's gradient. Source: ``kernel_backward.h``."""


def scratch(card: Card, func: Any, args: Any, kwargs: Any, out: Any) -> Turns:
    """Return the turns in which an operation takes scratch, each with the sizes in bytes."""
    rule = _RULES.get(func._overloadpacket)
    if rule is None and not _takes_dense(func):
        return []
    given = named(func, args, kwargs)
    turns = rule(card, given, out) if rule is not None else [_dense_copies(func, given)]
    return [tuple(size for size in turn if size) for turn in turns if any(turn)]


# Reductions -----------------------------------------------------------------------------------------------------------

# Where there are fewer outputs than the device has room for threads, several blocks of threads work at one, and each
# writes its part into memory of the caching allocator. Where elements that lie side by side are reduced that is a few
# KiB and not counted; where they are kept, it is often many times the result: the sum over 4096 rows of 2048 floats
# takes 64 MiB beside its 8 KiB. Source: ``setReduceConfig`` and ``ReduceConfig`` in ``Reduce.cuh`` of torch 2.14. Names
# are those used there.

_MOST_THREADS: Final = 512
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread has to reduce at least, and at most, where blocks share an output."""


def staging(card: Card, tensor: torch.Tensor, dims: Sequence[int] | None, partial: int) -> tuple[int, ...]:
    """Return the bytes of the buffer and of the semaphores of a reduction; nothing where a block has an output alone.

    ``partial`` are the bytes of what is handed over for each output: a sum, or a value with its index.
    """
    over = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    shape, strides = tensor.shape, tensor.stride()
    reduced = [dim for dim in over if shape[dim] > 1]
    kept = [dim for dim in reversed(range(tensor.dim())) if dim not in over and shape[dim] > 1]
    if not tensor.numel() or not kept or any(strides[dim] < strides[kept[0]] for dim in reduced):
        return ()
    outputs, inputs = (math.prod(shape[dim] for dim in dims) for dims in (kept, reduced))
    vector = _output_vector(tensor, kept, reduced)
    most = (256 if tensor.element_size() == 16 else _MOST_THREADS) // vector
    width = min(_power(outputs // vector, most), _WARP)
    height = min(_power(inputs, most), most // width)
    width = min(_power(outputs // vector, most), most // height)
    grid = -(-(outputs // vector) // width)
    target = card.multiprocessors * (card.threads // (width * height))
    values = -(-inputs // height)
    if inputs < min(height * 16, _MOST_VALUES) or values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return (partial * outputs * blocks * width * vector, 4 * grid) if blocks > 1 else ()


def _output_vector(tensor: torch.Tensor, kept: Sequence[int], reduced: Sequence[int]) -> int:
    """Return how many outputs side by side a thread makes at once: up to 4, where all of them are aligned."""
    if tensor.stride(kept[0]) != 1:
        return 1
    length, others = 1, [tensor.stride(dim) for dim in reduced]
    for at, dim in enumerate(kept):
        if tensor.stride(dim) != length:
            others += [tensor.stride(dim) for dim in kept[at:]]
            break
        length *= tensor.shape[dim]
    vector = 4
    for number in (int(tensor.storage_offset()), length, *others):
        while number % vector:
            vector //= 2
    return vector


def _power(value: int, most: int) -> int:
    """Return the largest power of two that is not above ``value``, or ``most``."""
    return 1 << (max(value, 1).bit_length() - 1) if value < most else most


def _wide(tensor: torch.Tensor) -> int:
    """Return the bytes in which sums of elements are kept: those of halves in float32, of integers in int64."""
    return max(4 if tensor.is_floating_point() else 16 if tensor.is_complex() else 8, tensor.element_size())


def _with_index(_tensor: torch.Tensor) -> int:
    return 16


def _moments(tensor: torch.Tensor) -> int:
    """Return the bytes of ``WelfordData``: mean, squares, and how many, twice."""
    return 32 if tensor.dtype is torch.float64 else 16


def _plainly(tensor: torch.Tensor) -> int:
    return tensor.element_size()


def _reduces(partial: Callable[[torch.Tensor], int], *, casts: bool = False) -> _Rule:
    def rule(card: Card, given: dict[str, Any], out: Any) -> Turns:
        tensor, copied = given["self"], 0
        result = out[0] if isinstance(out, (tuple, list)) else out
        widens = tensor.dtype in _HALVES and result.dtype is torch.float32
        if casts and result.dtype is not tensor.dtype and not widens:  # it is cast as a whole before it is summed up
            tensor = torch.empty_like(tensor, dtype=result.dtype)
            copied = tensor.nbytes
        return [(copied, *_staged(card, tensor, given.get("dim"), partial))]

    return rule


def _staged(card: Card, tensor: Any, dims: Any, partial: Callable[[Any], int]) -> tuple[int, ...]:
    return staging(card, tensor, [dims] if isinstance(dims, int) else dims, partial(tensor))


def _of_count(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return the flags as bytes and as integers, and the sum of these."""
    count = given["self"].numel()
    return [(count, 8, count * _INDEX)]


def _of_logsumexp(card: Card, given: dict[str, Any], out: Any) -> Turns:
    tensor, dims = given["self"], given["dim"]
    size = out.nbytes
    return [
        _staged(card, tensor, dims, _plainly),
        (size, tensor.nbytes, size, *_staged(card, tensor, dims, _wide)),
    ]


def _of_mean_loss(_card: Card, given: dict[str, Any], out: Any) -> Turns:
    """Source: ``mse_loss`` and its like make the differences, and then their mean."""
    return [] if out.dim() else [(given["self"].nbytes,)]


def _of_draws(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Source: ``multinomial`` in ``Distributions.cpp`` and ``MultinomialKernel.cu``."""
    tensor = given["self"]
    return [(tensor.nbytes,) * (1 if given["num_samples"] == 1 or not given["replacement"] else 3)]


# Copies --------------------------------------------------------------------------------------------------------------


def _of_products(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return the copies of operands that cuBLAS cannot take as they lie. Source: ``prepare_matrix_for_cublas``."""
    matrices = [given[name] for name in ("mat1", "mat2", "batch1", "batch2") if name in given]
    if not matrices:
        matrices = [given["self"], given["mat2"]]
    return [tuple(matrix_copy(matrix) for matrix in matrices if matrix.dim() >= 2)]


def _takes_dense(func: Any) -> bool:
    """Whether the kernel of an operator makes its arguments dense first: convolutions, and gradients of layers."""
    if torch.Tag.pointwise in func.tags or func._schema.is_mutable:
        return False
    name = func._overloadpacket.__name__
    if name in ("convolution", "native_layer_norm", "native_group_norm"):
        return True
    return name.endswith("_backward") and name not in _COMPOSED


_COMPOSED: Final = frozenset(
    f"{name}_backward"
    for name in ("slice", "select", "diagonal", "value_selecting_reduction", "unfold", "index_select")
)
"""Gradients that are put together of other operations, which take everything as it lies."""


def _dense_copies(func: Any, given: dict[str, Any]) -> tuple[int, ...]:
    channels_last = func._overloadpacket.__name__.startswith(("convolution", "native_batch_norm"))
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return tuple(dense_copy(tensor, in_any_order=channels_last) for tensor in tensors)


def _of_softmax_gradient(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return the product of the gradient and the result. Source: ``softmax_backward_cuda_out`` in ``SoftMax.cu``."""
    grad = given["grad_output"]
    return [(dense_copy(grad), grad.numel() * grad.element_size())]


def _of_safe_softmax(_card: Card, given: dict[str, Any], out: Any) -> Turns:
    """Return which scores are masked, and which rows are as a whole. Source: ``_safe_softmax`` in ``attention.cpp``."""
    return [(out.numel(), out.numel() // out.shape[given["dim"]])]


def _of_distances(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return both sets of points with two columns more, and those on the way. Source: ``_euclidean_dist``."""
    points = [given["x1"], given["x2"]]
    wider = [point.shape[:-1].numel() * (point.shape[-1] + 2) * point.element_size() for point in points]
    return [(*wider, points[0].nbytes)]


# Attention -----------------------------------------------------------------------------------------------------------


def _of_flash_gradient(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return the sums of the rows, and the gradient of the queries in float32. Source: ``mha_bwd`` in ``flash_api``."""
    query, grad, result = given["query"], given["grad_out"], given["out"]
    batch, heads, rows, features = query.shape
    rows, features = -(-rows // 128) * 128, -(-features // 32) * 32
    copies = [dense_copy(tensor.transpose(1, 2)) for tensor in (grad, result)]
    key = given["key"]
    grouped = 2 * key.nbytes * (heads // key.shape[1]) if heads != key.shape[1] else 0
    return [(*copies, grouped, batch * heads * rows * 4, batch * heads * rows * features * 4)]


def _of_efficient_gradient(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return a dense gradient, the product that its rows are summed up from, and what blocks add up in.

    Source: ``_efficient_attention_backward`` in ``attention_backward.cu``, ``workspace_size`` in ``kernel_backward.h``.
    """
    query, grad = given["query"], given["grad_out_"]
    batch, heads, rows, features = query.shape
    copy, sums = dense_copy(grad.transpose(1, 2)), batch * heads * rows * 4
    blocks = -(-rows // _BLOCK) * -(-features // _BLOCK)
    added = batch * heads * blocks * (_BLOCK * _BLOCK * 4 + 16)
    if query.dtype in _HALVES:
        return [(copy, sums, added)]
    return [(copy, query.numel() * 4, sums, sums), (copy, sums, added)]


# Sorts ---------------------------------------------------------------------------------------------------------------


def _radix(count: int, itemsize: int) -> int:
    """Return what sorting so many keys, each with an index, takes: both once more, and histograms of the blocks.

    Source: traces of ``cub::DeviceRadixSort`` in CUDA 13: the second part is 0.334 to 0.342 bytes a key.
    """
    return count * (itemsize + _INDEX) + (count + 2) // 3 if count > _FEW_INDICES else 0


def _of_sort(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    tensor = given["self"]
    row = tensor.shape[given["dim"]] if tensor.dim() else 1
    if row <= _SORTED_IN_PLACE:
        return []
    count = tensor.numel()
    if count == row:
        return [(count * _INDEX, _radix(count, tensor.element_size()))]
    return [(count * _INDEX, count * _INDEX, tensor.nbytes, _radix(count, tensor.element_size()))]


def _of_median(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    tensor = given["self"]
    count = tensor.numel()
    return [(tensor.nbytes, count * _INDEX, count * _INDEX, _radix(count, tensor.element_size()))]


def _of_permutation(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    count = int(given["n"])
    return [(count * _INDEX,) * 3 + (_radix(count, _INDEX),)]


def _of_embedding_gradient(_card: Card, given: dict[str, Any], out: Any) -> Turns:
    """Return the sorted indices and the sums of a few rows each, of which there are at most so many.

    Source: ``embedding_dense_backward_cuda`` in ``Embedding.cu``, ``EmbeddingBackwardKernel.cu``.
    """
    indices, grad = given["indices"], given["grad_output"]
    count, copy = indices.numel(), dense_copy(grad)
    if count <= _FEW_INDICES and given["padding_idx"] < 0:
        return [(copy,)]
    width = -(-out.shape[1] // _WARP) * _WARP * max(grad.element_size(), 4)
    segments = min(count, out.shape[0])
    parts = count // _ROWS_OF_A_THREAD + segments
    listed = count * _INDEX
    return [
        (copy, listed, listed, listed, _radix(count, _INDEX)),
        (copy, listed, listed, 2 * segments * _INDEX, 2 * parts * _INDEX, parts * width),
    ]


def _of_index_put(_card: Card, given: dict[str, Any], _out: Any) -> Turns:
    """Return the sorted places, where equal ones are to be added up. Source: ``index_put_with_sort_kernel``."""
    indices = [index for index in given["indices"] if index is not None]
    if not given.get("accumulate") or not indices:
        return []
    count, values = max(index.numel() for index in indices), given["values"]
    listed = count * _INDEX
    return [(listed, dense_copy(values), listed, listed, listed, _radix(count, _INDEX))]


def _table(rows: list[tuple[str, _Rule]]) -> dict[Any, _Rule]:
    return {getattr(_aten, name): rule for names, rule in rows for name in names.split() if hasattr(_aten, name)}


_RULES: Final = _table(
    [
        ("sum mean nansum prod", _reduces(_wide, casts=True)),
        ("linalg_vector_norm norm", _reduces(_wide)),
        ("amax amin", _reduces(_plainly)),
        ("argmax argmin", _reduces(_with_index)),
        ("max min", _reduces(_with_index)),
        ("aminmax", _reduces(lambda tensor: 2 * tensor.element_size())),
        ("var std var_mean std_mean", _reduces(_moments)),
        ("any all", _reduces(lambda _tensor: 1)),
        ("count_nonzero", _of_count),
        ("logsumexp", _of_logsumexp),
        ("mse_loss smooth_l1_loss huber_loss binary_cross_entropy", _of_mean_loss),
        ("multinomial", _of_draws),
        ("mm addmm bmm baddbmm", _of_products),
        ("_softmax_backward_data", _of_softmax_gradient),
        ("_safe_softmax", _of_safe_softmax),
        ("_euclidean_dist", _of_distances),
        ("_scaled_dot_product_flash_attention_backward", _of_flash_gradient),
        ("_scaled_dot_product_efficient_attention_backward", _of_efficient_gradient),
        ("sort argsort", _of_sort),
        ("median nanmedian", _of_median),
        ("randperm", _of_permutation),
        ("embedding_dense_backward", _of_embedding_gradient),
        ("index_put index_put_ _index_put_impl_", _of_index_put),
    ]
)
