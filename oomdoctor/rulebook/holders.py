"""What the holders of a device show: the largest of each role, the models among them, and copies of their weights.

A holding is told by its path: what hangs on a graph was saved for a backward pass, and what no name leads to after a
failure waits for the garbage collector or is held by code in C++ alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.memory import Census, Holding, HostHolding, Role
from oomdoctor.model.unavailable import Unavailable
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
_OF_LAYER: Final = re.compile(r"local `[^`]*` of (forward|backward|_call_impl|_wrapped_call_impl)(,| at )")
_DATA_SET: Final = re.compile(r"[.](dataset|datasets|tensors)\b")
"""What torch's ``DataLoader`` and its data sets call what they read."""
_STEPPED: Final = ".param_groups["
_DELETED: Final = re.compile(r"(?:^del |; del |, )([A-Za-z_]\w*)\b(?![.\[(])|del_var\(.(\w+).\)")

_MOST_NAMED: Final = 4
_AVERAGE: Final = re.compile(r"(?i)(?<![a-z])(ema|swa|shadow|polyak)(?![a-z])|averag|(?<![a-z])avg|_(ema|swa)(?![a-z])")
"""In the name of a copy: that it is an average over the steps."""
_ITEM: Final = re.compile(r"([A-Za-z_]\w*(?:[.\[][^`→]*)??)(?:\[[^\[\]]*\]|\.values\(\))")
"""The path of the items of a container, and that of the container."""


def of_census(census: Census, code: CodeFacts) -> dict[str, Fact]:
    """Return who holds how much, and what the largest holders are like."""
    facts: dict[str, Fact] = {
        "device": census.device,
        "found": census.found,
        "allocated": None if isinstance(census.allocated, Unavailable) else census.allocated,
        "accounted_ratio": census.accounted_ratio,
        **{role.value: census.bytes_of(role) for role in Role},
    }
    grows = dict(code.grows)
    for holding in sorted(census.holdings, key=lambda one: one.bytes):
        facts[f"{holding.role.value}_path"] = holding.path
        facts[f"{holding.role.value}_grown_by"] = grows.get(_first_name(holding.path))
        facts[f"{holding.role.value}_names"] = ", ".join(f"`{name}`" for name in _names(holding)) or None
        if holding.role is Role.ACTIVATION:
            facts["activation_last_dim"] = holding.shape[-1] if holding.shape else None
        if holding.role is Role.BATCH and holding.shape:
            facts |= {"batch_ndim": len(holding.shape), "batch_last_dim": holding.shape[-1]}
        facts |= _largest(holding, code)
    return facts | _activations(census, code) | _parameters(census.holdings, code) | _copies(census.holdings, code)


def of_host(names: Sequence[HostHolding], code: CodeFacts) -> dict[str, Fact]:
    """Return what names of the program lead to beside tensors, and which of them leads to most."""
    facts: dict[str, Fact] = {"beside": sum(one.bytes for one in names)}
    if names:
        most = max(names, key=lambda one: one.bytes)
        facts |= {"beside_path": most.path, "beside_largest": most.bytes, "beside_arrays": most.arrays}
        facts["beside_grown_by"] = dict(code.grows).get(most.path)
    return facts


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


def _activations(census: Census, code: CodeFacts) -> dict[str, Fact]:
    """Return how much of the activations was saved for a backward pass, in which model, and what has no name at all.

    Without holdings nothing is known of it.
    """
    if not census.holdings:
        return {}
    activations = [one for one in census.holdings if one.role is Role.ACTIVATION]
    models: Counter[str] = Counter()
    for path, size in (part for one in activations for part in one.saved_in):
        models[_root(path, code)] += size
    most = next(iter(models.most_common(1)), None)
    graphs = [one for one in activations if one.path.endswith(_GRAPH)]
    nameless = [one for one in census.holdings if one.path.startswith(_NAMELESS)]
    square = [_is_square(one.shape) for one in activations if one.shape is not None]
    return {
        "saved": sum(one.bytes for one in graphs),
        "left": sum(one.bytes for one in graphs if not _OF_LAYER.match(one.path)),
        "data_set": sum(one.bytes for one in census.holdings if _DATA_SET.search(one.path)),
        "nameless": sum(one.bytes for one in nameless),
        "nameless_count": sum(one.count for one in nameless),
        "activation_is_square": any(square) if square else None,
        **({} if most is None else {"activation_model": most[0], "activation_of_model": most[1]}),
    }


def _parameters(holdings: Iterable[Holding], code: CodeFacts) -> dict[str, Fact]:
    """Return what the parameters show: those that no module with a name holds, and of which modules the others are."""
    parameters = [one for one in holdings if one.role is Role.PARAMETER]
    nameless = _of_no_module(parameters)
    lost = set(map(id, nameless))
    named: Counter[str] = Counter()
    for one in parameters:
        if id(one) not in lost and _STEPPED not in one.path:
            named[_root(one.expression or "", code)] += one.bytes
    widths: Counter[int] = Counter()
    for one in parameters:
        each = _ITEM_BYTES.get(one.dtype or "")
        if each:
            widths[each] += one.bytes // each
    holders = Counter(_first_name(one.path) for one in nameless if not one.path.startswith(_NAMELESS))
    return {
        "unnamed_parameter": sum(one.bytes for one in nameless),
        "unnamed_parameter_path": max(holders, key=lambda name: holders[name], default=None),
        "models": len(named),
        "model_names": ", ".join(f"`{name}`" for name, _ in named.most_common(_MOST_NAMED)) or None,
        "parameter_bytes_each": max(widths, key=lambda each: widths[each]) if widths else None,
    }


class _Weights(NamedTuple):
    """How much the parameters of a model take, and in how many tensors."""

    bytes: int = 0
    tensors: int = 0

    def and_of(self, holding: Holding) -> _Weights:
        """Return these and what is held."""
        return _Weights(self.bytes + holding.bytes, self.tensors + holding.count)


def _copies(holdings: Sequence[Holding], code: CodeFacts) -> dict[str, Fact]:
    """Return the weights that nothing trains beside a model that is trained: other models, and copies in containers.

    A copy is told by its size: as many tensors as the model, and as many bytes. Whether it is an average is told by
    its name alone.
    """
    weights, whole = _weights(holdings, code, Role.PARAMETER), _weights(holdings, code, Role.PARAMETER, Role.BUFFER)
    models = {model.path: model for model in (*code.local_models, *code.models)}
    trained = {path for path, model in models.items() if model.stepped}
    trained |= _weights(holdings, code, Role.GRADIENT).keys() & models.keys()
    sizes = {found[path] for found in (weights, whole) for path in trained & found.keys()}
    others = {path: weights[path] for path in models if path in weights.keys() - trained}
    kept, averages = Counter[str](), Counter[str]()
    for path, size in _in_containers(holdings, sizes):
        (averages if _AVERAGE.search(path) else kept)[path] += size
    facts: dict[str, Fact] = {}
    second = max(others, key=lambda path: others[path].bytes, default=None) if trained else None
    average = max(averages, key=lambda path: averages[path], default=None)
    if average is not None and (second is None or averages[average] > others[second].bytes):
        facts = {"second": averages[average], "second_average": average}
    elif second is not None:
        kind = ("second_average" if _AVERAGE.search(second) else "second_copy") if others[second] in sizes else ""
        facts = {"second": others[second].bytes, kind or "second_model": second}
    if kept:
        first = Counter(_first_name(path) for path in kept).most_common(1)[0][0]
        facts |= {"kept_copies": sum(kept.values()), "kept_copies_count": len(kept)}
        facts |= {"kept_copies_path": next(iter(kept)) if len(kept) == 1 else first}
        facts["kept_copies_grown_by"] = dict(code.grows).get(first)
    return facts


def _weights(holdings: Iterable[Holding], code: CodeFacts, *roles: Role) -> dict[str, _Weights]:
    """Return how much of some roles each model leads to, or each first name where no model does."""
    found: dict[str, _Weights] = {}
    for one in holdings:
        if one.role in roles:
            root = _root(one.expression or "", code)
            found[root] = found.get(root, _Weights()).and_of(one)
    return found


def _in_containers(holdings: Iterable[Holding], sizes: Container[_Weights]) -> Iterator[tuple[str, int]]:
    """Yield the containers that hold tensors as many and as large as one of ``sizes``, with their bytes."""
    found: dict[str, _Weights] = {}
    for one in holdings:
        if one.role is Role.USER_TENSOR and (item := _ITEM.fullmatch(one.path)):
            found[item[1]] = found.get(item[1], _Weights()).and_of(one)
    yield from ((path, size.bytes) for path, size in found.items() if size in sizes and size.tensors > 1)


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


def _names(held: Holding) -> list[str]:
    """Return the names beside that of its path that lead to what is held, as the line that would free it tells them."""
    named = dict.fromkeys(name for pair in _DELETED.findall(held.frees or "") for name in pair if name)
    return [name for name in named if name != _first_name(held.path)]


def _first_name(path: str) -> str:
    return re.split(r"\W", path, maxsplit=1)[0]


def _root(text: str, code: CodeFacts) -> str:
    """Return the model that an expression begins with, else its first name."""
    owners = [
        model.path
        for model in (*code.models, *code.local_models)
        if text == model.path or text.startswith((f"{model.path}.", f"{model.path}["))
    ]
    return max(owners, key=len) if owners else re.split(r"[.\[]", text, maxsplit=1)[0]
