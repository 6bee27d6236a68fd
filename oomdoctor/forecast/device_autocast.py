"""Autocast of CUDA on fakes that have the keys of the CPU.

Autocast of the CPU has lists of its own, so it cannot stand in: a softmax that CUDA does in float32 would stay in
bfloat16. The rules of CUDA are put on a dispatch key that nothing else here uses, and that is switched with the state
of ``torch.autocast("cuda")``; ``cuda`` and ``xpu`` share them.

Limits: autocast of MPS, and that of the CPU within that of the device, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from oomdoctor.errors import ForecastError

if TYPE_CHECKING:
    from oomdoctor.forecast.card import Card

__all__ = ["LISTS", "replace"]

LISTS: Final = {
    "lower_precision_fp": (
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
        "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm "
        "baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
        "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
    ),
    "fp32": (
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
        "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
        "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
        "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
        "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
        "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa"
    ),
    "fp32_set_opt_dtype": (
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList"
    ),
    "fp32_append_dtype": "norm.Scalar norm.ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
"""Operators, with a space between two, by what autocast of CUDA does with them.

Source: ``AT_FORALL_*`` in ``ATen/autocast_mode.h`` and ``autocast_mode.cpp`` of torch 2.13; ``replace`` compares them
with what the torch at hand has registered.
"""

_NOT_HERE: Final = frozenset({"cudnn_convolution", "cudnn_convolution_transpose"})
"""Registered too, but nothing calls them on fakes."""

_KEY: Final = torch._C._dispatch_key_parse("AutocastPrivateUse1")
_KEYS: Final = torch._C.DispatchKeySet(_KEY)
_STATE: Final = "privateuseone"

_torch: Any = torch
_library: Any = None
_fallback: Any = None
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights by their identity, each with its copy in the lower precision; until autocast is left, as in torch."""


def replace(card: Card) -> None:
    """Let ``torch.autocast`` of the device work in this process."""
    set_enabled, clear = torch.set_autocast_enabled, torch.clear_autocast_cache

    def switch(*args: Any) -> None:
        set_enabled(*args)
        kind, enabled = args if len(args) == 2 else ("cuda", *args)
        if not enabled and kind != card.type:
            return
        if kind not in ("cpu", card.type) or (card.type == "mps" and kind != "cpu"):
            raise ForecastError(f"autocast of {kind} is not forecast")
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled(card.type):
            raise ForecastError("autocast of the CPU inside of that of the device is not forecast")
        if kind == card.type:
            _register(card)
            set_enabled(_STATE, enabled)
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, enabled)

    def clear_all() -> None:
        clear()
        _casts.clear()

    _torch.set_autocast_enabled, _torch.clear_autocast_cache = switch, clear_all


def _register(card: Card) -> None:
    """Put the rules on their key, once.

    Raises:
        ForecastError: this torch has other lists.
    """
    global _library, _fallback
    if _library is not None:
        return
    names = {name for listed in LISTS.values() for name in listed.split()}
    key = "AutocastXPU" if card.type == "xpu" else "AutocastCUDA"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    there = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if has(name, key)
    } - _NOT_HERE
    if card.type == "cuda" and there != names:
        raise ForecastError(f"autocast of this torch is another: {', '.join(sorted(there ^ names)[:3])}")
    _fallback = _torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _fallback.fallback(torch.library.fallthrough_kernel)  # operators without a rule are left as they are
    _library = _torch.library.Library("aten", "IMPL")
    for policy, listed in LISTS.items():
        for name in there & set(listed.split()):
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _library.impl(name, _RULES[policy](operator, card.type), "AutocastPrivateUse1")


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def _is_eligible(value: Any, kind: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == kind
    )


def _cast(value: Any, dtype: torch.dtype, kind: str) -> Any:
    """Return ``value`` in ``dtype``, from the cache where it is a weight. Source: ``cached_cast``."""
    if type(value) in (list, tuple):
        return [_cast(item, dtype, kind) for item in value]
    if not _is_eligible(value, kind) or value.dtype is dtype:
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype is torch.float32
    caches = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
    if not is_weight or not caches or dtype is not torch.get_autocast_dtype(kind):
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(dtype)
    return _casts[id(value)][1]


def _casting(choose: Callable[[Any, str], torch.dtype]) -> Any:
    def rule(operator: Any, kind: str) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                dtype = choose((args, kwargs), kind)
                cast = {name: _cast(value, dtype, kind) for name, value in kwargs.items()}
                return operator(*(_cast(value, dtype, kind) for value in args), **cast)

        return kernel

    return rule


def _widest(given: Any, kind: str) -> torch.dtype:
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if _is_eligible(leaf, kind)]
    wide = any(tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype(kind)


def _with_dtype(operator: Any, kind: str) -> Any:
    """Return the rule that asks for results in float32 where nothing else is asked for."""
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and _is_eligible(args[0], kind):
            args, kwargs = args[:position], kwargs | {"dtype": torch.float32}
        with _below():
            return operator(*args, **kwargs)

    return kernel


def _norm(operator: Any, kind: str) -> Any:
    """Return the rule for norms, whose overloads with a dtype are others."""
    norms = torch.ops.aten.norm
    typed = norms.ScalarOpt_dtype if operator is norms.Scalar else norms.ScalarOpt_dim_dtype

    def kernel(tensor: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        rest = () if operator is norms.Scalar else (dim, keepdim)
        with _below():
            return typed(tensor, p, *rest, dtype=torch.float32 if _is_eligible(tensor, kind) else tensor.dtype)

    return kernel


def _banned(_operator: Any, _kind: str) -> Any:
    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer."
        )

    return kernel


_RULES: Final[dict[str, Callable[[Any, str], Any]]] = {
    "lower_precision_fp": _casting(lambda _given, kind: torch.get_autocast_dtype(kind)),
    "fp32": _casting(lambda _given, _kind: torch.float32),
    "fp32_set_opt_dtype": _with_dtype,
    "fp32_append_dtype": _norm,
    "promote": _casting(_widest),
    "banned": _banned,
}
