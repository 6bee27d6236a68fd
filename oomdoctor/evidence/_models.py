"""What the models, losses and optimizers of the namespace are like, read from their dictionaries alone.

Nothing of the user's is run: no property, no ``__repr__``, no ``forward``. Module trees are followed through
``_modules``, and classes are told by the names in their MRO.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from oomdoctor.model.evidence import LossFacts, ModelFacts
from oomdoctor.model.kinds import Kind, kind_of, plain_dict

__all__ = ["losses", "models", "parameters", "typed"]

_LOSS_HOME: Final = "torch.nn.modules.loss"
_CONTAINERS: Final = frozenset({"ModuleList", "Sequential"})
_BATCH_NORMS: Final = frozenset({"_BatchNorm", "SyncBatchNorm"})
_DROPOUTS: Final = frozenset({"_DropoutNd", "MultiheadAttention", "RNNBase"})
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
    tree = list(_walk("", root, set()))
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
        batch_norm=tuple(name for name, module in active if _couples(module)),
        dropout=tuple(name for name, module in active if _drops(module)),
        sequence_first=tuple(name for name, module in tree if _is_sequence_first(module)),
    )


def _loss(path: str, module: Any) -> LossFacts:
    own = plain_dict(module) or {}
    reduction, ignored = own.get("reduction"), own.get("ignore_index")
    buffers = own.get("_buffers")
    weights = [buffers.get(name) for name in ("weight", "pos_weight")] if isinstance(buffers, dict) else []
    return LossFacts(
        path=path,
        type_name=type(module).__name__,
        reduction=reduction if isinstance(reduction, str) else None,
        ignore_index=ignored if isinstance(ignored, int) else None,
        # pos_weight scales elements and leaves the divisor alone; a class weight changes what the mean divides by.
        weighted=bool(weights) and weights[0] is not None,
    )


def _walk(path: str, module: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in _mapping(module, "_modules").items():
        if child is not None:
            yield from _walk(f"{path}.{name}" if path else name, child, seen)


def _mapping(module: Any, name: str) -> Mapping[str, Any]:
    found = (plain_dict(module) or {}).get(name)
    return found if isinstance(found, dict) else {}


def _flag(module: Any, name: str, default: bool) -> bool:
    found = (plain_dict(module) or {}).get(name, default)
    return found if isinstance(found, bool) else default


def _number(module: Any, name: str) -> float:
    found = (plain_dict(module) or {}).get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def _mro(module: Any) -> frozenset[str]:
    return frozenset(base.__name__ for base in type.__dict__["__mro__"].__get__(type(module)))


def _is_loss(module: Any) -> bool:
    return kind_of(type(module)) is Kind.MODULE and type(module).__module__ == _LOSS_HOME


def _is_repeated(module: Any) -> bool:
    if not _CONTAINERS & _mro(module):
        return False
    kinds = [type(child) for child in _mapping(module, "_modules").values() if child is not None]
    return len(kinds) >= 2 and len(set(kinds)) == 1


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


def parameters(roots: Iterable[Any]) -> tuple[Any, ...]:
    """Return every parameter below ``roots`` once."""
    modules = [module for root in roots for _, module in _walk("", root, set())]
    return tuple(_parameters(modules).values())


def _parameter_bytes(modules: Iterable[Any]) -> int:
    return sum(Tensor.numel(one) * Tensor.element_size(one) for one in _parameters(modules).values())


def _parameters(modules: Iterable[Any]) -> dict[int, Any]:
    return {
        id(parameter): parameter
        for module in modules
        for parameter in _mapping(module, "_parameters").values()
        if parameter is not None and kind_of(type(parameter)) is Kind.TENSOR
    }
