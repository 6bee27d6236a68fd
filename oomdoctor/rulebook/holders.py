"""What the census shows: who holds how much, and what the largest holders are like.

A holding is told by its path: what hangs on a graph was saved for a backward pass, and what no name leads to after a
failure waits for the garbage collector or is held by code in C++ alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.memory import Census, Holding, Role
from oomdoctor.rulebook.context import Fact

_SQUARE: Final = 256
"""From this length on, two equal dimensions at the end may be the scores of attention."""

_ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("float64", "complex64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
}
_NAMELESS: Final = "(no name leads here)"
_GRAPH: Final = "→ graph"
_STEPPED: Final = ".param_groups["
_DELETED: Final = re.compile(r"(?:^del |; del |, )([A-Za-z_]\w*)\b(?![.\[(])|del_var\(.(\w+).\)")


def told_by(census: Census, code: CodeFacts) -> dict[str, Fact]:
    """Return the facts of one census."""
    facts: dict[str, Fact] = {
        "device": census.device,
        "found": census.found,
        "allocated": None if isinstance(census.allocated, Unavailable) else census.allocated,
        "accounted_ratio": census.accounted_ratio,
        **{role.value: census.bytes_of(role) for role in Role},
    }
    for holding in sorted(census.holdings, key=lambda one: one.bytes):
        facts[f"{holding.role.value}_path"] = holding.path
        if holding.role is Role.ACTIVATION:
            facts["activation_last_dim"] = holding.shape[-1] if holding.shape else None
        if holding.role is Role.BATCH and holding.shape:
            facts |= {"batch_ndim": len(holding.shape), "batch_last_dim": holding.shape[-1]}
        facts |= _largest(holding, code)
    return facts | _activations(census) | _parameters(census.holdings, code)


def _largest(holding: Holding, code: CodeFacts) -> dict[str, Fact]:
    shape = holding.shape
    return {
        "largest": holding.bytes,
        "largest_count": holding.count,
        "largest_path": holding.path,
        "largest_role": holding.role.value,
        "largest_last_dim": shape[-1] if shape else None,
        "largest_ndim": None if shape is None else len(shape),
        "largest_is_square": None if shape is None else _is_square(shape),
        "largest_is_logits": shape[-1] in code.classes if shape and code.classes else None,
    }


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 3 and shape[-1] == shape[-2] >= _SQUARE


def _activations(census: Census) -> dict[str, Fact]:
    """Return how much of the activations was saved for a backward pass, and what of all memory has no name.

    Without holdings nothing is known of it.
    """
    if not census.holdings:
        return {}
    activations = [one for one in census.holdings if one.role is Role.ACTIVATION]
    nameless = [one for one in census.holdings if one.path.startswith(_NAMELESS)]
    square = [_is_square(one.shape) for one in activations if one.shape is not None]
    return {
        "saved": sum(one.bytes for one in activations if one.path.endswith(_GRAPH)),
        "nameless": sum(one.bytes for one in nameless),
        "nameless_count": sum(one.count for one in nameless),
        "activation_is_square": any(square) if square else None,
    }


def _parameters(holdings: Iterable[Holding], code: CodeFacts) -> dict[str, Fact]:
    """Return what the parameters show: those that no module with a name holds, in how many modules the others are."""
    parameters = [one for one in holdings if one.role is Role.PARAMETER]
    nameless = _of_no_module(parameters)
    lost = set(map(id, nameless))
    named = {_root(one, code) for one in parameters if id(one) not in lost and _STEPPED not in one.path}
    widths: dict[int, int] = {}
    for one in parameters:
        each = _ITEM_BYTES.get(one.dtype or "")
        if each:
            widths[each] = widths.get(each, 0) + one.bytes // each
    return {
        "unnamed_parameter": sum(one.bytes for one in nameless),
        "models": len(named),
        "parameter_bytes_each": max(widths, key=lambda each: widths[each]) if widths else None,
    }


def _of_no_module(parameters: Sequence[Holding]) -> list[Holding]:
    """Return the parameters that only an optimizer, a graph or nothing that has a name holds.

    One that an optimizer steps and that has a name of its own, as a picture or a latent that is optimised has, is no
    part of a lost model. The names that lead to it stand in the line that would free it; a name that leads to several,
    such as that of the last loss, is none of its own. Where there is no such line, nothing is known of the names.
    """
    stepped = [one for one in parameters if _STEPPED in one.path]
    leading = Counter(name for one in stepped for name in _names(one))
    return [
        one
        for one in parameters
        if one.expression is None
        or _GRAPH in one.path
        or (_STEPPED in one.path and one.frees is not None and all(leading[name] > 1 for name in _names(one)))
    ]


def _names(stepped: Holding) -> set[str]:
    """Return the names beside the optimizer's that lead to a parameter."""
    named = {name for pair in _DELETED.findall(stepped.frees or "") for name in pair if name}
    return named - {re.split(r"\W", stepped.path, maxsplit=1)[0]}


def _root(holding: Holding, code: CodeFacts) -> str:
    text = holding.expression or ""
    owners = [
        model.path
        for model in code.models
        if text == model.path or text.startswith((f"{model.path}.", f"{model.path}["))
    ]
    return max(owners, key=len) if owners else re.split(r"[.\[]", text, maxsplit=1)[0]
