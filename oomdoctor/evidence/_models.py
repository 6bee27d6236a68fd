"""What the models, losses and optimizers of the namespace are like, read from their dictionaries alone.

Nothing of the user's is run: no property, no ``__repr__``, no ``forward``. Module trees are followed through
``_modules``, and classes are told by the names in their MRO.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from oomdoctor.model.code import LossFacts, ModelFacts
from oomdoctor.model.kinds import Kind, PerType, kind_of, members_of, module_of, mro_of, plain_dict

__all__ = ["losses", "models", "parameters", "sizes", "typed"]

_LOSS_HOME: Final = "torch.nn.modules.loss"
_POOLS: Final = frozenset({"_AdaptiveAvgPoolNd", "_AdaptiveMaxPoolNd"})
_CONTAINERS: Final = frozenset({"ModuleList", "Sequential"})
_LAYERS: Final = "torch.nn.modules."
_SWITCHES: Final = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The names in transformers since 5.23, and before."""
_BATCH_NORMS: Final = frozenset({"_BatchNorm", "SyncBatchNorm"})
_DROPOUTS: Final = frozenset({"_DropoutNd", "MultiheadAttention", "RNNBase"})
_FUSED: Final = frozenset({"MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder"})
"""They have a fast path for inference. Source: ``torch.nn.TransformerEncoderLayer``."""
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_DERIVING_HOOKS: Final = frozenset({"WeightNorm"})
"""They derive an attribute from parameters alone. Source: ``torch.nn.utils.weight_norm``."""
_GRAD_FN: Final[Any] = Tensor.grad_fn
"""Asked past the class of a tensor, which may have one of its own."""
_BATCH_FIRST: Final = frozenset({"RNNBase", "MultiheadAttention"})


def models(modules: Iterable[tuple[str, Any]]) -> tuple[ModelFacts, ...]:
    """Return the facts of each root module that is not a loss."""
    return tuple(_model(path, module) for path, module in modules if not _is_loss(module))


def losses(modules: Iterable[tuple[str, Any]]) -> tuple[LossFacts, ...]:
    """Return the facts of each root module that is a loss of ``torch.nn``."""
    return tuple(_loss(path, module) for path, module in modules if _is_loss(module))


def typed(objects: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return each path with the name of its object's class."""
    return tuple((path, type(value).__name__) for path, value in objects)


def _model(path: str, root: Any) -> ModelFacts:
    tree = list(_walk("", root))
    # Modules put into evaluation mode one by one (frozen normalisation) neither couple samples nor draw numbers.
    active = [
        (name, module) for name, module in tree if _flag(module, "training", True) or not _flag(root, "training", True)
    ]
    return ModelFacts(
        path=path,
        type_name=type(root).__name__,
        training=_flag(root, "training", True),
        parameter_bytes=_parameter_bytes(module for _, module in tree),
        blocks=tuple(name for name, module in tree if _is_repeated(module)),
        switches=tuple(_switches(tree)),
        batch_norm=tuple(name for name, module in active if _couples(module)),
        dropout=tuple(name for name, module in active if _drops(module)),
        sequence_first=tuple(name for name, module in tree if _is_sequence_first(module)),
        any_size=tuple(name for name, module in tree if _POOLS & _mro(module)),
        linear_bytes=_parameter_bytes(module for _, module in tree if type(module).__name__ == "Linear"),
        fused_without_grad=tuple(name for name, module in tree if _FUSED & _mro(module)),
        hooked=tuple(name for name, module in tree if _is_hooked(module)),
        leaves=tuple(_leaves(tree)),
    )


def _loss(path: str, module: Any) -> LossFacts:
    own = plain_dict(module) or {}
    reduction, ignored = own.get("reduction"), own.get("ignore_index")
    buffers: Any = own.get("_buffers")
    weights = [dict.get(buffers, name) for name in ("weight", "pos_weight")] if _is(buffers, dict) else []
    return LossFacts(
        path=path,
        type_name=type(module).__name__,
        reduction=reduction if _is(reduction, str) else None,
        ignore_index=ignored if _is(ignored, int) else None,
        # pos_weight scales elements and leaves the divisor alone; a class weight changes what the mean divides by.
        weighted=bool(weights) and weights[0] is not None,
        label_smoothing=_number(module, "label_smoothing"),
    )


def _walk(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``module`` and every module below it once, parents first, with its path as torch writes it."""
    seen: set[int] = set()
    todo = [(path, module)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [(name, child) for name, child in dict.items(_mapping(module, "_modules")) if child is not None]
        todo += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]


def _mapping(module: Any, name: str) -> dict[str, Any]:
    found: Any = (plain_dict(module) or {}).get(name)
    return found if _is(found, dict) else {}


def _flag(module: Any, name: str, default: bool) -> bool:
    found = (plain_dict(module) or {}).get(name, default)
    return found if _is(found, bool) else default


def _number(module: Any, name: str) -> float:
    found: Any = (plain_dict(module) or {}).get(name)
    return float(found) if _is(found, int, float) else 0.0


def _is(value: Any, *kinds: type) -> bool:
    """Return whether ``value`` is of one of ``kinds``; ``isinstance`` would ask an object that is not for its class."""
    return issubclass(type(value), kinds)


def _mro(module: Any) -> frozenset[str]:
    return _names_above(type(module))


_names_above: Final = PerType(lambda cls: frozenset(base.__name__ for base in mro_of(cls)))
"""What a class and those above it are called; told once, as the modules of a model are of few classes."""


def _is_loss(module: Any) -> bool:
    return kind_of(type(module)) is Kind.MODULE and type(module).__module__ == _LOSS_HOME


def _is_repeated(module: Any) -> bool:
    if not _CONTAINERS & _mro(module):
        return False
    children = [child for child in dict.values(_mapping(module, "_modules")) if child is not None]
    return len(children) >= 2 and len({type(child) for child in children}) == 1 and not _is_layer(children[0])


def _is_layer(module: Any) -> bool:
    """Whether it is a single layer of ``torch.nn``; a recurrent one goes through many steps."""
    return (
        module_of(type(module)).startswith(_LAYERS)
        and not _mapping(module, "_modules")
        and "RNNBase" not in _mro(module)
    )


def _switches(tree: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield the switches of the outermost modules that have one, as those of transformers do."""
    owners: list[str] = []
    for path, module in tree:
        if any(not owner or path.startswith(f"{owner}.") for owner in owners):
            continue
        if _member(type(module), "supports_gradient_checkpointing") is not True:
            continue
        for name in _SWITCHES:
            if type(switch := _member(type(module), name)) is FunctionType:
                owners.append(path)
                yield f"{path}.{name}".lstrip("."), "every_n_layers" in switch.__code__.co_varnames
                break


def _member(cls: type, name: str) -> Any:
    return next((members_of(base)[name] for base in mro_of(cls) if name in members_of(base)), None)


def _couples(module: Any) -> bool:
    names = _mro(module)
    if "_InstanceNorm" in names:
        return _flag(module, "track_running_stats", False)
    return bool(_BATCH_NORMS & names)


def _drops(module: Any) -> bool:
    if not _DROPOUTS & _mro(module):
        return False
    return max(_number(module, "p"), _number(module, "dropout")) > 0


def _is_sequence_first(module: Any) -> bool:
    return bool(_BATCH_FIRST & _mro(module)) and not _flag(module, "batch_first", False)


def _is_hooked(module: Any) -> bool:
    held = [hook for name in _HOOKS for hook in dict.values(_mapping(module, name))]
    return any(type(hook).__name__ not in _DERIVING_HOOKS for hook in held)


def _leaves(tree: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield where a forward has left tensors with their graph: attributes, and lists and dicts in them."""
    for path, module in tree:
        if any(type(hook).__name__ in _DERIVING_HOOKS for hook in dict.values(_mapping(module, _HOOKS[0]))):
            continue
        for name, value in dict.items(plain_dict(module) or {}):
            is_container = type(value) in (list, dict) and value and not str(name).startswith("_")
            items = list(value.values() if type(value) is dict else value) if is_container else ()
            if _has_graph(value) or any(map(_has_graph, items)):
                yield f"{path}.{name}".lstrip(".")


def _has_graph(value: Any) -> bool:
    if kind_of(type(value)) is not Kind.TENSOR:
        return False
    with torch._C.DisableTorchFunction():
        return _GRAD_FN.__get__(value) is not None


def parameters(roots: Iterable[Any]) -> tuple[Any, ...]:
    """Return every parameter below ``roots`` once."""
    modules = [module for root in roots for _, module in _walk("", root)]
    return tuple(_parameters(modules).values())


def sizes(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """Return of each tensor how many elements it has and the bytes of one.

    A parameter of a lazy module has none as yet: asked through ``__torch_function__``, it would raise.
    """
    with torch._C.DisableTorchFunction():
        return [(Tensor.numel(one), Tensor.element_size(one)) for one in tensors]


def _parameter_bytes(modules: Iterable[Any]) -> int:
    return sum(count * each for count, each in sizes(_parameters(modules).values()))


def _parameters(modules: Iterable[Any]) -> dict[int, Any]:
    return {
        id(parameter): parameter
        for module in modules
        for parameter in dict.values(_mapping(module, "_parameters"))
        if parameter is not None and kind_of(type(parameter)) is Kind.TENSOR
    }
