"""What the optimizers of the namespace are like, read from their dictionaries alone: no step, no hook is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from oomdoctor.evidence._models import sizes
from oomdoctor.model.code import OptimizerFacts
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict

__all__ = ["optimizers"]

_FOREACH_DEVICES: Final = frozenset({"cuda", "xpu", "mtia"})
"""Where ``foreach=None`` takes the foreach implementation.

Source: ``torch.utils._foreach_utils._get_foreach_kernels_supported_devices``.
"""


def optimizers(found: Iterable[tuple[str, Any]]) -> tuple[OptimizerFacts, ...]:
    """Return the facts of each optimizer, in their order."""
    return tuple(_facts(path, optimizer) for path, optimizer in found)


def _facts(path: str, optimizer: Any) -> OptimizerFacts:
    groups = list(_groups(optimizer))
    weights = [count * each for count, each in sizes(one for group in groups for one in _weights(group))]
    cls = type(optimizer)
    return OptimizerFacts(
        path=path,
        type_name=type.__dict__["__name__"].__get__(cls),
        home=type.__dict__["__module__"].__get__(cls),
        parameter_bytes=sum(weights),
        largest_bytes=max(weights, default=0),
        foreach=any(map(_takes_foreach, groups)),
    )


def _groups(optimizer: Any) -> Iterator[Mapping[str, Any]]:
    groups = (plain_dict(optimizer) or {}).get("param_groups")
    if type(groups) is list:
        yield from (group for group in groups if type(group) is dict)


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
