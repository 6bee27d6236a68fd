"""Models and optimizers of before that are still bound while the failing cell makes their successors.

``model = Net()`` binds the name when the new model is complete; until then the old one is there, and the optimizer and
the scheduler of the old one keep it alive under their own names. Named are those that the cell is about to bind anew,
and optimizers and schedulers of theirs that it does not use. Nothing is named where another object of the namespace
would keep the same thing alive, as letting go of the name would then free nothing. Limits: such holders are looked for
two levels deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oomdoctor.evidence._models import parameters
from oomdoctor.objects.containers import pairs_of
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict
from oomdoctor.objects.named import is_users
from oomdoctor.program.compiled import is_in_definition
from oomdoctor.program.definitions import Program
from oomdoctor.program.names import FirstUse, binding_ends, first_uses, read_names
from oomdoctor.program.naming import names_in

__all__ = ["stale"]

_HEAVY = frozenset({Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER})
_CONTAINERS = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.TUPLE, Kind.SET})


def stale(
    program: Program, source: str, namespace: Mapping[str, Any], line: int | None
) -> tuple[tuple[str, bool], ...]:
    """Return ``(name, whether the failing cell binds it anew)`` of each, models first.

    Args:
        program: the cells.
        source: text of the failing cell.
        namespace: the globals as they stood at the failure.
        line: of the failing cell, the one that was running.
    """
    if line is None or is_in_definition(source, line):
        return ()
    uses, read = first_uses(source), _read(program, source)
    heavy = {name: value for name, value in namespace.items() if is_users(name) and kind_of(type(value)) in _HEAVY}
    ends = binding_ends(source)
    rebound = [name for name in heavy if uses.get(name) is FirstUse.BINDS and ends.get(name, 0) >= line]
    named = list(rebound)
    weights = {id(one) for name in rebound for one in _weights(heavy[name])}
    for kind in (Kind.OPTIMIZER, Kind.SCHEDULER):
        for name, value in heavy.items():
            if kind_of(type(value)) is kind and name not in named and _belongs(value, weights):
                if name in read:
                    return ()  # the cell uses what keeps the old one alive
                named.append(name)
    if not weights or _is_held_elsewhere([heavy[name] for name in named], weights, namespace, set(named)):
        return ()
    named.sort(key=lambda name: kind_of(type(heavy[name])) is not Kind.MODULE)
    return tuple((name, name in rebound) for name in named)


def _read(program: Program, source: str) -> frozenset[str]:
    """Return the names that the failing cell reads, and those that the functions which it calls read."""
    functions = (scope.function.node for scope in program.running if scope.function is not None)
    inner = set[str]().union(*map(names_in, functions))
    bound_first = {name for name, use in first_uses(source).items() if use is FirstUse.BINDS}
    return frozenset((read_names(source) | inner) - bound_first)


def _weights(value: Any) -> list[Any]:
    """Return the parameters of a module, or those that an optimizer steps."""
    if kind_of(type(value)) is Kind.MODULE:
        return list(parameters([value]))
    held = plain_dict(value) or {}
    groups = held.get("param_groups")
    if type(groups) is list:
        return [one for group in groups if type(group) is dict for one in group.get("params") or ()]
    inner = held.get("optimizer")
    return _weights(inner) if kind_of(type(inner)) is Kind.OPTIMIZER else []


def _belongs(value: Any, weights: set[int]) -> bool:
    """Whether an optimizer, or the one of a scheduler, steps parameters of ``weights`` alone."""
    own = {id(one) for one in _weights(value)}
    return bool(own) and own <= weights


def _is_held_elsewhere(objects: list[Any], weights: set[int], namespace: Mapping[str, Any], names: set[str]) -> bool:
    """Whether another name leads to one of ``objects``, or to one of the parameters."""
    wanted = {id(one) for one in objects} | weights
    for name, value in namespace.items():
        if not is_users(name) or name in names:
            continue
        level = [value]
        for _ in range(3):
            if any(id(one) in wanted or (kind_of(type(one)) in _HEAVY and _shares(one, weights)) for one in level):
                return True
            level = [inner for one in level for inner in _inside(one)]
    return False


def _shares(value: Any, weights: set[int]) -> bool:
    return any(id(one) in weights for one in _weights(value))


def _inside(value: Any) -> Iterator[Any]:
    kind = kind_of(type(value))
    if kind in _CONTAINERS:
        yield from (item for _, item in pairs_of(value, kind)[:64])
    elif kind is Kind.OBJECT:
        yield from list((plain_dict(value) or {}).values())[:64]
