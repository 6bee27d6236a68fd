"""Operators that go another way on the emulated device than on the CPU, and what its libraries hold for themselves.

Most operators allocate the same everywhere. These do not: dropout keeps a mask of bytes there instead of noise as wide
as the input; attention does not write its scores down; a softmax of halves into floats makes no copy first. They are
replaced above the dispatch to autograd, so that calls from compiled code take the new way too.

Limits: what cuDNN needs inside is not known here; what recurrent layers keep for their backward is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types

from oomdoctor.forecast.operators import operator_named
from oomdoctor.forecast.values import named
from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox.card import cublas_workspace_bytes

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker
    from oomdoctor.sandbox.card import Card

_torch: Any = torch
_aten = torch.ops.aten
_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd
_HALVES: Final = (torch.float16, torch.bfloat16)

_PRODUCTS: Final = frozenset(
    getattr(_aten, name).default
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm"),
        *("_int_mm", "_addmm_activation"),
    )
)
"""Operators that call cuBLAS."""
_OF_LT: Final = (_aten.addmm.default, _aten._addmm_activation.default)
_HAS_ITS_OWN: Final = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
_RECURRENT: Final = {
    f"{name}.{overload}": mode
    for mode, name in enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru"))
    for overload in ("input", "data")
}
"""Layers that run in cuDNN, and what it calls their mode; ``data`` are packed sequences."""
_FLASH_MOST_FEATURES: Final = 256
"""Source: ``check_head_dim_size_flash`` in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``."""

_library: Any = None


def replace(tracker: Tracker, card: Card) -> Workspaces:
    """Put the operators of the device into place in this process; return what counts the libraries' workspaces."""
    global _library
    _library = _torch.library.Library("aten", "IMPL")
    own: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "softmax.int": _softmax_of(_aten.softmax.int, _aten._softmax.default),
        "log_softmax.int": _softmax_of(_aten.log_softmax.int, _aten._log_softmax.default),
    }
    own["scaled_dot_product_attention"], own["linear"] = _attention(card), _linear
    own |= {name: _recurrent(name, mode) for name, mode in _RECURRENT.items()}
    if hasattr(_aten, "_fused_rms_norm"):
        own["rms_norm"] = _rms_norm
    for name, kernel in own.items():
        _library.impl(name, kernel, "AutogradCPU")
        tracker.handlers[operator_named(name)] = _again(tracker, kernel)
    _foreach_supported_types.append(FakeTensor)
    return Workspaces(tracker, cublas_workspace_bytes(card.capability))


def _again(tracker: Tracker, kernel: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a handler that does what ``kernel`` does: under inference mode nothing passes by autograd."""

    def handler(_func: Any, args: Any, kwargs: Any) -> Any:
        with tracker.fake_mode, tracker:
            return kernel(*args, **kwargs)

    return handler


def _there(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not _there(tensor):
        kept: torch.Tensor = _aten.dropout.default._op_dk(_COMPOSITE, tensor, p, train)
        return kept
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    return torch.native_dropout(tensor, p, train)[0] if p < 1 else tensor * torch.zeros((), device=tensor.device)


def _softmax_of(composite: Any, kernel: Any) -> Any:
    def softmax(tensor: torch.Tensor, dim: int, dtype: Any = None) -> Any:
        if _there(tensor) and tensor.dtype is torch.float16 and dtype is torch.float32:
            return kernel(tensor, dim, True)
        return composite._op_dk(_COMPOSITE, tensor, dim, dtype)

    return softmax


def _linear(tensor: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    """Return a layer that adds its bias in place, as to a fake it is not. Source: ``linear`` in ``Linear.cpp``."""
    if bias is None or tensor.dim() == 2 or tensor.is_contiguous() or not _there(tensor):
        return _aten.linear.default._op_dk(_COMPOSITE, tensor, weight, bias)
    return torch.matmul(tensor, weight.t()).add_(bias)


def _rms_norm(tensor: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """Return the norm by the fused kernel. Source: ``rms_norm_symint`` in ``layer_norm.cpp``."""
    mixes = weight is not None and weight.dtype is not tensor.dtype
    if _there(tensor) and not mixes:
        return _aten._fused_rms_norm.default(tensor, shape, weight, eps)[0]
    return _aten.rms_norm.default._op_dk(_COMPOSITE, tensor, shape, weight, eps)


def _recurrent(name: str, mode: int) -> Any:
    """Return a layer as cuDNN runs it. Source: ``_cudnn_impl`` in ``aten/src/ATen/native/cudnn/RNN.cpp``."""
    operator = operator_named(name)

    def layer(*args: Any, **kwargs: Any) -> Any:
        asked = named(operator, args, kwargs)
        if not _there(asked["params"][0]):
            return operator._op_dk(_COMPOSITE, *args, **kwargs)
        given: Any = asked.get("input", asked.get("data"))
        states = [asked["hx"]] if isinstance(asked["hx"], torch.Tensor) else list(asked["hx"])
        layers = asked["num_layers"]
        directions = 1 + asked["bidirectional"]
        each = len(asked["params"]) // (layers * directions)
        size = states[-1].shape[2] if len(states) == 2 else states[0].shape[2]
        projected = states[0].shape[2] if states[0].shape[2] != size else 0
        lengths = asked.get("batch_sizes")
        lower = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else given.dtype
        if lower is not given.dtype:  # the weights are cast into one new buffer
            given, states = given.to(lower), [state.to(lower) for state in states]
            asked["params"] = [weight.to(lower) for weight in asked["params"]]
        flat = torch.empty(0, dtype=given.dtype, device=given.device)  # where the weights lie, which is counted already
        results = _aten._cudnn_rnn.default(
            *(given, asked["params"], each, flat, states[0], states[1] if len(states) == 2 else None),
            *(mode, size, projected, layers, asked.get("batch_first", False), asked["dropout"], asked["train"]),
            *(asked["bidirectional"], [] if lengths is None else [1] * len(lengths), None),
        )
        return results[:3] if len(states) == 2 else results[:2]

    return layer


def _attention(card: Card) -> Any:
    """Return the choice that CUDA makes: flash, else memory-efficient, else the scores written down.

    Source: ``select_sdp_backend`` in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``. Attention by cuDNN comes
    last there by default, and is not chosen here.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        if _there(query):
            flash = _fits_flash(card, query, value, attn_mask) and (dropout_p == 0 or card.capability >= (8, 0))
            if flash:
                return _flash(query, key, value, dropout_p, is_causal, scale)
            if _fits_efficient(card, query, value, attn_mask, enable_gqa):
                return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
            mask = _as_bias(attn_mask, query)
            return _aten._scaled_dot_product_attention_math.default(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        return _aten.scaled_dot_product_attention.default._op_dk(
            _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attention


def _fits_flash(card: Card, query: torch.Tensor, value: torch.Tensor, mask: Any) -> bool:
    features = query.size(-1)
    return (
        _torch.backends.cuda.flash_sdp_enabled()
        and card.capability >= (8, 0)
        and query.dim() == 4
        and mask is None
        and query.dtype in _HALVES
        and features == value.size(-1)
        and features <= _FLASH_MOST_FEATURES
    )


def _fits_efficient(card: Card, query: torch.Tensor, value: torch.Tensor, mask: Any, grouped: bool) -> bool:
    least = 8 if query.dtype in _HALVES else 4
    return (
        _torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (*_HALVES, torch.float32)
        and (query.dtype is not torch.bfloat16 or card.capability >= (8, 0))
        and query.size(-1) % least == 0
        and value.size(-1) % least == 0
        and not grouped
        and not (mask is not None and mask.requires_grad)
    )


def _flash(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any) -> Any:
    features = query.size(-1)
    missing = -features % 8
    if missing:  # the kernel takes multiples of eight; what is missing is filled up in copies
        scale = features**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :features] if missing else out


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout_p: float, causal: bool, scale: Any
) -> Any:
    bias = _as_bias(mask, query)
    if bias is not None:
        alignment = 16 // bias.element_size()
        missing = -bias.size(-1) % alignment
        if missing:  # rows of the bias have to be aligned, so it is copied into wider ones
            bias = torch.nn.functional.pad(bias, (0, missing))[..., : bias.size(-1)]
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, graded, dropout_p, causal, scale=scale
    )[0]


def _as_bias(mask: Any, query: torch.Tensor) -> Any:
    """Return a mask of bools as what is added to the scores. Source: ``convert_boolean_attn_mask``."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


Held: TypeAlias = dict[tuple[str, bool], torch.UntypedStorage]
"""Workspaces, by their library and whether it is backward's thread that has them."""


class Workspaces:
    """The workspaces of cuBLAS: one for each thread that multiplies, and backward runs in a thread of its own.

    Before torch 2.12 cuBLASLt, which adds biases, has one of 1 MiB for itself. Source: ``CUDABlas.cpp``.
    """

    def __init__(self, tracker: Tracker, nbytes: int) -> None:
        self._tracker, self._bytes = tracker, nbytes
        self._held: Held = {}

    def follow(self, func: Any) -> None:
        """Count what an operation of CUDA takes once its result is there: the first product of a thread allocates."""
        if func not in _PRODUCTS:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        self._take("cuBLAS", in_backward, self._bytes)
        if func in _OF_LT and _HAS_ITS_OWN:
            self._take("cuBLASLt", in_backward, MIB)

    def _take(self, library: str, in_backward: bool, nbytes: int) -> None:
        if (library, in_backward) not in self._held:
            self._held[library, in_backward] = storage = _torch.UntypedStorage(nbytes, device="meta")
            self._tracker.hold_as(f"workspace of {library}", storage)

    def found(self, nbytes: int) -> None:
        """Take what libraries hold already to be workspaces of the thread that runs, then of that of backward."""
        for in_backward in (False, True)[: nbytes // self._bytes]:
            for library in ("cuBLAS", "cuBLASLt"):
                self._held[library, in_backward] = _torch.UntypedStorage(0, device="meta")

    def swap(self, held: Held) -> Held:
        """Have ``held`` be the workspaces that there are; return those that there were."""
        held, self._held = self._held, held
        return held
