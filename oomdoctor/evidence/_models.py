"""What the models, losses and optimizers of the namespace are like, read from their dictionaries alone.

Nothing of the user's is run: no property, no ``__repr__``, no ``forward``. Module trees are followed through
``_modules``, and classes are told by the names in their MRO.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isqrt, prod
from types import FunctionType
from typing import Any, Final, NamedTuple

from oomdoctor.model.code import LossFacts, ModelFacts, OptimizerFacts
from oomdoctor.objects.kinds import (
    Kind,
    PerType,
    kind_of,
    members_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    submodules,
)

_LOSS_HOME: Final = "torch.nn.modules.loss"
_LOSS: Final = re.compile(r"(?i)loss|cross_?entropy|criterion")
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
_FOREACH_DEVICES: Final = frozenset({"cuda", "xpu", "mtia"})
"""Where ``foreach=None`` takes the foreach implementation.

Source: ``torch.utils._foreach_utils._get_foreach_kernels_supported_devices``.
"""
_DEEPEST: Final = 64
_LISTS: Final = frozenset({"ModuleList", "ModuleDict"})
_LONG: Final = 9
"""From so many layers on, stretches of a ``Sequential`` are recomputed one by one."""
_BATCH_FIRST: Final = frozenset({"RNNBase", "MultiheadAttention"})


def models(modules: Iterable[tuple[str, Any]], optimizers: Iterable[tuple[str, Any]] = ()) -> tuple[ModelFacts, ...]:
    """Return the facts of each root module that is not a loss; ``optimizers`` tell which of them are trained."""
    stepped = {id(one) for _, optimizer in optimizers for group in _groups(optimizer) for one in _weights(group)}
    return tuple(_model(path, module, stepped) for path, module in modules if not _is_loss(module))


def classes(modules: Iterable[tuple[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of classes that models may predict, sorted.

    They are the outputs of a model's last linear layer, and where those are as wide as an embedding, by whose rows they
    may be multiplied, the rows of that.
    """
    found: set[int] = set()
    for path, root in modules:
        last: int | None = None
        embeddings: list[tuple[int, int]] = []
        for _, part in submodules(root, path):
            outputs, rows, width = (held(part, name) for name in ("out_features", "num_embeddings", "embedding_dim"))
            last = outputs if type(outputs) is int else last
            if type(rows) is int and type(width) is int:
                embeddings.append((rows, width))
        # Rows of an embedding that nothing of its width comes back to are words or positions that are read.
        found |= {rows for rows, width in embeddings if last in (None, width)}
        found |= {last} if last is not None else set()
    return tuple(sorted(found))


def losses(modules: Iterable[tuple[str, Any]]) -> tuple[LossFacts, ...]:
    """Return the facts of each root module that is a loss of ``torch.nn``."""
    return tuple(_loss(path, module) for path, module in modules if _is_loss(module))


class _Module(NamedTuple):
    """A module of a tree, by the path that torch writes: its dictionary, and the names of its class and those above."""

    path: str
    cls: type
    own: dict[str, Any]
    names: frozenset[str]

    def mapping(self, name: str) -> dict[str, Any]:
        """Return what a register of the module holds."""
        return _mapping(self.own.get(name))

    def flag(self, name: str, default: bool) -> bool:
        found = self.own.get(name, default)
        return found if _is(found, bool) else default

    def number(self, name: str) -> float:
        """Return a setting that is a number, zero where there is none."""
        found: Any = self.own.get(name)
        return float(found) if _is(found, int, float) else 0.0


_names_above: Final = PerType(lambda cls: frozenset(base.__name__ for base in mro_of(cls)))
"""What a class and those above it are called; told once, as the modules of a model are of few classes."""


def _looked_at(path: str, module: Any) -> _Module:
    return _Module(path, type(module), plain_dict(module) or {}, _names_above(type(module)))


def _model(path: str, root: Any, stepped: Container[int]) -> ModelFacts:
    tree = list(_walk(root))
    weights = _parameters(tree)
    trains = tree[0].flag("training", True)
    # Modules put into evaluation mode one by one (frozen normalisation) neither couple samples nor draw numbers.
    active = [module for module in tree if not trains or module.flag("training", True)]
    blocks = tuple(module.path for module in tree if _is_repeated(module))
    repeats, repeated = _repeated(tree, blocks)
    convolutions = [one for one in tree if _is_dense_convolution(one)]
    return ModelFacts(
        path=path,
        type_name=type(root).__name__,
        training=trains,
        parameter_bytes=_bytes_of(weights.values()),
        stepped=any(map(stepped.__contains__, weights)),
        blocks=blocks,
        segments=tuple(_segments("", root, blocks, set())),
        switches=tuple(_switches(tree)),
        batch_norm=tuple(module.path for module in active if _couples(module)),
        dropout=tuple(
            module.path
            for module in active
            if _DROPOUTS & module.names and max(module.number("p"), module.number("dropout")) > 0
        ),
        sequence_first=tuple(
            module.path for module in tree if _BATCH_FIRST & module.names and not module.flag("batch_first", False)
        ),
        any_size=tuple(module.path for module in tree if _POOLS & module.names),
        linear_bytes=_bytes_of(_parameters(one for one in tree if one.cls.__name__ == "Linear").values()),
        convolution_bytes=_bytes_of(one.mapping("_parameters").get("weight") for one in convolutions),
        separable_bytes=sum(map(_separable_bytes, convolutions)),
        repeats=repeats,
        repeated_bytes=repeated,
        fused_without_grad=tuple(module.path for module in tree if _FUSED & module.names),
        hooked=tuple(module.path for module in tree if _is_hooked(module)),
        leaves=tuple(_leaves(tree)),
        takes_loss=any(map(_names_loss, {module.cls for module in tree})),
    )


def _loss(path: str, value: Any) -> LossFacts:
    module = _looked_at(path, value)
    reduction, ignored = module.own.get("reduction"), module.own.get("ignore_index")
    return LossFacts(
        path=path,
        type_name=module.cls.__name__,
        reduction=reduction if _is(reduction, str) else None,
        ignore_index=ignored if _is(ignored, int) else None,
    )


def _walk(root: Any) -> Iterator[_Module]:
    """Yield ``root`` and every module below it once, parents first, by the paths that torch writes."""
    for path, module in submodules(root, join=lambda path, name: f"{path}.{name}" if path else name):
        yield _looked_at(path, module)


def held(value: Any, *names: str) -> Any:
    """Return what attributes lead to, one after the other, without running any code; None where one is missing."""
    for name in names:
        value = (plain_dict(value) or {}).get(name)
    return value


def _mapping(found: Any) -> dict[str, Any]:
    return found if _is(found, dict) else {}


def _is(value: Any, *kinds: type) -> bool:
    """Return whether ``value`` is of one of ``kinds``; ``isinstance`` would ask an object that is not for its class."""
    return issubclass(type(value), kinds)


def _is_loss(module: Any) -> bool:
    return kind_of(type(module)) is Kind.MODULE and type(module).__module__ == _LOSS_HOME


def _is_repeated(module: _Module) -> bool:
    if not _CONTAINERS & module.names:
        return False
    children = [child for child in dict.values(module.mapping("_modules")) if child is not None]
    return len(children) >= 2 and len(set(map(type, children))) == 1 and not _is_layer(children[0])


def _is_layer(module: Any) -> bool:
    """Whether it is a single layer of ``torch.nn``; a recurrent one goes through many steps."""
    return (
        module_of(type(module)).startswith(_LAYERS)
        and not _mapping(held(module, "_modules"))
        and "RNNBase" not in _names_above(type(module))
    )


def _segments(path: str, module: Any, blocks: Sequence[str], seen: set[int]) -> Iterator[str]:
    """Yield parts to run again in the backward pass, where no dry run has told what each of them keeps.

    They are repeated blocks and what else consists of several layers; of a long ``Sequential`` of layers, stretches.
    """
    if id(module) in seen or path.count(".") > _DEEPEST:
        return  # a module may stand below itself
    seen.add(id(module))
    children = _children(module)
    if _runs_in_turn(module) and all(map(_is_layer, children.values())):
        yield from _stretches(path, list(children.values()))
        return
    for name, child in children.items():
        inner = f"{path}.{name}".lstrip(".")
        names, parts = _names_above(type(child)), _children(child).values()
        is_list = bool(_LISTS & names) or (_runs_in_turn(child) and not all(map(_is_layer, parts)))
        is_long = _runs_in_turn(child) and len(parts) >= _LONG
        if is_list or is_long or any(block.startswith(f"{inner}.") for block in blocks):
            yield from _segments(inner, child, blocks, seen)
        elif not _is_layer(child):
            yield inner


def _stretches(path: str, layers: list[Any]) -> Iterator[str]:
    """Yield stretches of a ``Sequential``, as long as there are many: none begins with one that writes in its input."""
    size = max(isqrt(len(layers)), 2)
    cuts = [0]
    for at, layer in enumerate(layers):
        cuts += [at] if at - cuts[-1] >= size and held(layer, "inplace") is not True else []
    for start, stop in pairwise([*cuts, len(layers)]):
        if stop - start > 1:
            yield f"{path}[{start}:{stop}]"


def _children(module: Any) -> dict[str, Any]:
    found = dict.items(_mapping(held(module, "_modules")))
    return {name: child for name, child in found if type(name) is str and child is not None}


def _runs_in_turn(module: Any) -> bool:
    owner = next((base for base in mro_of(type(module)) if "forward" in members_of(base)), None)
    return owner is not None and owner.__name__ == "Sequential" and owner.__module__ == f"{_LAYERS}container"


def _switches(tree: Iterable[_Module]) -> Iterator[tuple[str, bool]]:
    """Yield the switches of the outermost modules that have one, as those of transformers do."""
    owners: list[str] = []
    for module in tree:
        if any(not owner or module.path.startswith(f"{owner}.") for owner in owners):
            continue
        if of_class(module.cls, "supports_gradient_checkpointing") is not True:
            continue
        for name in _SWITCHES:
            if type(switch := of_class(module.cls, name)) is FunctionType:
                owners.append(module.path)
                yield f"{module.path}.{name}".lstrip("."), "every_n_layers" in switch.__code__.co_varnames
                break


def of_class(cls: type, name: str) -> Any:
    """Return what a class or one above it defines by a name, None where none does."""
    return next((members_of(base)[name] for base in mro_of(cls) if name in members_of(base)), None)


def _couples(module: _Module) -> bool:
    if "_InstanceNorm" in module.names:
        return module.flag("track_running_stats", False)
    return bool(_BATCH_NORMS & module.names)


def _is_hooked(module: _Module) -> bool:
    hooks = [hook for name in _HOOKS for hook in dict.values(module.mapping(name))]
    return any(type(hook).__name__ not in _DERIVING_HOOKS for hook in hooks)


def _leaves(tree: Iterable[_Module]) -> Iterator[str]:
    """Yield where a forward has left tensors with their graph: attributes, and lists and dicts in them."""
    for module in tree:
        if any(type(hook).__name__ in _DERIVING_HOOKS for hook in dict.values(module.mapping(_HOOKS[0]))):
            continue
        for name, value in list(module.own.items()):
            is_container = type(value) in (list, dict) and value and not str(name).startswith("_")
            items = list(value.values() if type(value) is dict else value) if is_container else ()
            if _has_graph(value) or any(map(_has_graph, items)):
                yield f"{module.path}.{name}".lstrip(".")


def _has_graph(value: Any) -> bool:
    if kind_of(type(value)) is not Kind.TENSOR:
        return False
    from torch import _C

    with _C.DisableTorchFunction():
        return vars(_C.TensorBase)["grad_fn"].__get__(value) is not None


def parameters(roots: Iterable[Any]) -> tuple[Any, ...]:
    """Return every parameter below ``roots`` once."""
    return tuple(_parameters(module for root in roots for module in _walk(root)).values())


def sizes(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """Return of each tensor how many elements it has and the bytes of one; a lazy parameter has none as yet."""
    tensors = [one for one in tensors if kind_of(type(one)) is Kind.TENSOR]
    if not tensors:  # torch may not be loaded
        return []
    from torch import _C, Tensor

    with _C.DisableTorchFunction():
        return [(Tensor.numel(one), Tensor.element_size(one)) for one in tensors]


def _names_loss(cls: type) -> bool:
    """Whether the forward of a class names a loss, beneath what decorates it."""
    forward = of_class(cls, "forward")
    for _ in range(_DEEPEST):
        if type(forward) is not FunctionType or "__wrapped__" not in vars(forward):
            break
        forward = vars(forward)["__wrapped__"]
    return type(forward) is FunctionType and any(map(_LOSS.search, forward.__code__.co_names))


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(count * each for count, each in sizes(tensors))


def _repeated(tree: Sequence[_Module], blocks: Sequence[str]) -> tuple[int, int]:
    """Return blocks and bytes of the container of repeated blocks in which one set of weights would save most."""
    found = [(0, 0)]
    for path in blocks:
        within = [one for one in tree if one.path != path and one.path.startswith(f"{path}." if path else "")]
        below = {one.path.removeprefix(path).lstrip(".").partition(".")[0] for one in within}
        found.append((len(below), _bytes_of(_parameters(within).values())))
    return max(found, key=lambda one: one[1] - one[1] // max(one[0], 1))


def _is_dense_convolution(module: _Module) -> bool:
    """Whether it is a convolution of more than a point, all of whose inputs go into each output."""
    kernel = module.own.get("kernel_size")
    is_wide = type(kernel) is tuple and all(type(one) is int for one in kernel) and prod(kernel) > 1
    return "_ConvNd" in module.names and module.own.get("groups") == 1 and is_wide and module.number("in_channels") > 1


def _separable_bytes(module: _Module) -> int:
    """Return what a depthwise convolution and one of a point after it would take in its place."""
    inputs, outputs = int(module.number("in_channels")), int(module.number("out_channels"))
    count, each = next(iter(sizes([module.mapping("_parameters").get("weight")])), (0, 0))
    return (inputs * prod(module.own["kernel_size"]) + inputs * outputs) * each if count else 0


def _parameters(modules: Iterable[_Module]) -> dict[int, Any]:
    return {
        id(parameter): parameter
        for module in modules
        for parameter in dict.values(module.mapping("_parameters"))
        if parameter is not None and kind_of(type(parameter)) is Kind.TENSOR
    }


def optimizers(found: Iterable[tuple[str, Any]]) -> tuple[OptimizerFacts, ...]:
    """Return the facts of each optimizer, in their order."""
    return tuple(_stepper(path, optimizer) for path, optimizer in found)


def kind_of_optimizer(optimizer: Any) -> str:
    """Return the name of the class of an optimizer, and of the one in a wrapper such as that of accelerate."""
    inner = held(optimizer, "optimizer")
    return name_of(type(inner if kind_of(type(inner)) is Kind.OPTIMIZER else optimizer))


def _stepper(path: str, optimizer: Any) -> OptimizerFacts:
    groups = _groups(optimizer)
    weights = [count * each for count, each in sizes(one for group in groups for one in _weights(group))]
    cls = type(optimizer)
    return OptimizerFacts(
        path=path,
        type_name=name_of(cls),
        home=module_of(cls),
        parameter_bytes=sum(weights),
        largest_bytes=max(weights, default=0),
        foreach=any(map(_takes_foreach, groups)),
    )


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    given = held(optimizer, "param_groups")
    return [group for group in given if type(group) is dict] if type(given) is list else []


def _weights(group: Mapping[str, Any]) -> list[Any]:
    weights = group.get("params")
    return [one for one in weights if kind_of(type(one)) is Kind.TENSOR] if type(weights) is list else []


def _takes_foreach(group: Mapping[str, Any]) -> bool:
    """Whether the step would go through lists of all parameters at once.

    Source: ``torch.optim.optimizer._default_to_fused_or_foreach``, which decides where neither option is given.
    """
    if "foreach" not in group or group.get("fused") or group.get("differentiable"):
        return False
    if group["foreach"] is not None:
        return group["foreach"] is True
    import torch

    weights, device_of = _weights(group), vars(torch._C.TensorBase)["device"].__get__
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in weights)
    return bool(weights) and plain and all(device_of(one).type in _FOREACH_DEVICES for one in weights)
