"""The vocabulary of torch: what its functions and methods do to the autograd graph, and to their tensor.

One table says what the results of a name are; every list that the readers of code need is made from it. A name means
the method of a tensor (``out.argmax(1)``), the function of torch (``torch.argmax(out, 1)``), or both. The test of this
module calls each name of torch on tensors that require a gradient, and looks whether the result has one.

Limits: names alone are judged, so that a method of the user's own object that is called ``item`` counts as torch's.
"""

from __future__ import annotations

import ast
from enum import Enum, auto
from typing import Final


class Result(Enum):
    """What the result of a name is, seen from the tensor that it is called on."""

    NUMBER = auto()  # no tensor: a number, a size, a list, an array
    DETACHED = auto()  # the same values without the graph
    DISCRETE = auto()  # positions, counts and truth values, which have no gradient
    TRUNCATED = auto()  # the same values in a type that has no gradient
    NEW = auto()  # a tensor of the same kind with values of its own
    MOVED = auto()  # the same values on another device or laid out anew
    CAST = auto()  # the same values in another type that can have a gradient
    SHAPED = auto()  # the same values in another shape
    JOINED = auto()  # several tensors as one
    REDUCED = auto()  # few values of many


_TABLE: Final[dict[Result, str]] = {
    Result.NUMBER: """
        item tolist numpy size numel nelement dim ndimension stride storage_offset element_size get_device data_ptr
        const_data_ptr dim_order dense_dim sparse_dim storage storage_type untyped_storage equal allclose is_complex
        is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size
        is_set_to is_shared is_signed is_coalesced backward register_hook register_post_accumulate_grad_hook retain_grad
        is_tensor is_storage result_type can_cast""",
    Result.DETACHED: "detach detach_",
    Result.DISCRETE: """
        argmax argmin argsort argwhere nonzero nonzero_static count_nonzero searchsorted bucketize bincount multinomial
        all any eq ne ge gt le lt equal greater greater_equal less less_equal not_equal isclose isfinite isinf isnan
        isneginf isposinf isreal isin logical_and logical_not logical_or logical_xor signbit histc hash_tensor
        one_hot""",
    Result.TRUNCATED: "bool byte char short int long int_repr",
    Result.NEW: """
        new_empty new_empty_strided new_full new_ones new_zeros new_tensor empty_like full_like ones_like zeros_like
        rand_like randn_like randint_like""",
    Result.MOVED: "to cpu cuda xpu ipu mtia contiguous clone pin_memory",
    Result.CAST: "float double half bfloat16 cfloat cdouble chalf type type_as",
    Result.SHAPED: """
        view view_as reshape reshape_as flatten ravel squeeze unsqueeze unflatten permute transpose t swapaxes swapdims
        movedim moveaxis adjoint expand expand_as broadcast_to narrow select chunk split tensor_split unbind""",
    Result.JOINED: "cat concat concatenate stack hstack vstack dstack row_stack column_stack",
    Result.REDUCED: "sum mean prod min max amin amax norm std var median mode nansum nanmean logsumexp trace",
}

INDEXED: Final = frozenset(
    {"max", "min", "median", "nanmedian", "mode", "kthvalue", "topk", "sort", "cummax", "cummin"}
)
"""Names whose result is a pair if they go along a dimension, values and then positions."""


def names_of(*results: Result) -> frozenset[str]:
    """Return the names that have one of these results."""
    return frozenset(name for result in results for name in _TABLE[result].split())


NO_GRAPH: Final = names_of(Result.NUMBER, Result.DETACHED, Result.DISCRETE, Result.TRUNCATED, Result.NEW)
"""Names whose result has no graph, whatever they are given."""
JOINS: Final = names_of(Result.JOINED)
HOST: Final = frozenset({"cpu", "numpy", "tolist", "item"})
"""Names whose result is in host memory."""
SMALL: Final = HOST | names_of(Result.NUMBER, Result.DISCRETE, Result.REDUCED)
"""Names whose result is small beside a batch of outputs, or is not on the device."""
PLAIN_FUNCTIONS: Final = frozenset(
    {"float", "int", "len", "str", "bool", "type", "isinstance", "range", "print", "format", "repr", "round"}
)
"""Functions of Python whose result has no graph. The methods of these names may keep it: ``logits.float()``."""
PLAIN_ATTRIBUTES: Final = frozenset(
    {
        "shape",
        "device",
        "dtype",
        "layout",
        "data",
        "ndim",
        "itemsize",
        "nbytes",
        "name",
        "names",
        "output_nr",
        "grad_fn",
    }
    | {"requires_grad", "is_leaf", "retains_grad", "is_cuda", "is_sparse", "dataset", "__name__"}
)
"""Attributes of a tensor, or of a loader, that have no graph."""
GRADLESS: Final = frozenset({"no_grad", "inference_mode"})
"""Contexts and decorators under which no graph is made."""
GRADFUL: Final = frozenset({"enable_grad", "set_grad_enabled"})
"""Contexts under which one may be made whatever is around them."""
TAKES_GRADIENT: Final = frozenset(
    {"backward", "manual_backward", "grad", "vjp", "jvp", "jacobian", "hessian", "jacrev", "jacfwd", "value_and_grad"}
    | {"grad_and_value", "minimize", "fit_one_cycle"}
)
"""Functions and methods that take a gradient."""
LETS_ERRORS_THROUGH: Final = (
    GRADLESS
    | GRADFUL
    | {"autocast", "tqdm", "trange", "record_function", "profile", "device", "sdpa_kernel", "open", "accumulate"}
    | {"save_on_cpu", "no_sync"}
)
"""Contexts that swallow no error."""
WANTS_GRADIENT: Final = (
    TAKES_GRADIENT
    | GRADFUL
    | {"zero_grad", "requires_grad_", "retain_grad", "register_hook", "register_full_backward_hook"}
)
"""These, and those that are called where somebody is about to take one."""
ASKS_GRADIENT: Final = frozenset({"grad", "requires_grad", "grad_fn", "is_leaf", "retains_grad"})
"""Attributes that are read where somebody wants a gradient."""
FILLS: Final = frozenset(
    {"append", "extend", "insert", "appendleft", "add", "update", "setdefault", "put", "push", "store"}
)
"""Methods that put what they are given into their container."""
GATHERS: Final = frozenset({"append", "extend", "insert", "appendleft", "add"})
"""Those of them that add to what is there."""
DRAWS: Final = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
    | {"multinomial", "dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "rrelu", "poisson"}
    | {"gumbel_softmax", "dropout1d", "dropout2d", "dropout3d", "bernoulli_", "cauchy_", "exponential_", "geometric_"}
    | {"log_normal_", "normal_", "random_", "uniform_", "alpha_dropout_", "dropout_", "feature_dropout_", "rrelu_"}
    | {"feature_alpha_dropout_", "binomial", "svd_lowrank", "pca_lowrank", "fractional_max_pool2d"}
    | {"fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
)
"""Functions and methods of torch that draw random numbers."""


def last_name(call: ast.Call) -> str:
    """Return the last part of the name of what is called: ``argmax`` of ``model(x).argmax(1)``."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def is_in_place(method: str) -> bool:
    """Return whether a method writes into its tensor, as ``add_`` does."""
    return method.endswith("_") and not method.endswith("__") and method not in _NO_WRITES


_NO_WRITES: Final = frozenset({"requires_grad_", "share_memory_"})


def cuts_graph(call: ast.Call) -> bool:
    """Return whether the result of a call has no graph, whatever it is given."""
    match call.func:
        case ast.Name(id=name):
            return name in PLAIN_FUNCTIONS or name in NO_GRAPH
        case ast.Attribute(value=ast.Constant() | ast.JoinedStr()):
            return True  # a text is formatted or joined
        case ast.Attribute(attr=name):
            return name in NO_GRAPH
    return False


def has_index(call: ast.expr) -> bool:
    """Return whether the result of a call is a pair of values and positions, of which the second has no graph."""
    if not isinstance(call, ast.Call) or last_name(call) not in INDEXED or not isinstance(call.func, ast.Attribute):
        return False
    return bool(call.args or call.keywords) or last_name(call) == "sort"
