"""The end state of a run as plain values: each leaf that a name of the user's leads to, by the path to it.

A leaf is small however large its tensor is: of many entries, sums over stretches are kept in place of the entries, so
that two ends can be compared in another process and a difference is seen wherever it lies. Limits: what lies behind
objects of compiled libraries is not seen, nor what is more than twelve steps away from a name.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any, Final

import torch

from oomdoctor.objects.containers import items_of, pairs_of
from oomdoctor.objects.homes import is_installed, is_ours, own_modules
from oomdoctor.objects.kinds import Kind, held_by, kind_of, module_of, plain_dict
from oomdoctor.objects.named import is_users
from oomdoctor.objects.places import ATTRIBUTES, STATE, has_state, places_of
from oomdoctor.objects.rng import generator_state

__all__ = ["RANDOM", "Leaf", "TooMuch", "end_of", "gradients_of", "names_of"]

RANDOM: Final = "random numbers"
"""Frame of a leaf that is the state of a generator."""

_DEEPEST: Final = 12
_MOST_LEAVES: Final = 50_000
_MOST_ITEMS: Final = 2_000
_FEW: Final = 8
"""Items up to which a list of plain values is told item by item."""
_WHOLE: Final = 1_024
"""Entries of a tensor up to which all of them are kept; of a larger one, sums over so many stretches."""
_LONGEST: Final = 400
_COUNTED: Final = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks")
_CODE: Final = frozenset({FunctionType, staticmethod, classmethod, property})
_OF_CODE: Final = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
_PLAIN: Final = frozenset({bool, int, str, bytes, bytearray})
_SET_UP: Final = (Kind.MODULE, Kind.LOADER, Kind.OBJECT)
_NUMBER: Final = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf")


class TooMuch(Exception):
    """There is more to compare than is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value at the end of a run.

    Attributes:
        exact: what has to be the same text for the value to be the same bit for bit.
        frame: what has to be the same for the numbers to be comparable: type, dtype and shape.
        numbers: the entries, or sums over stretches of them and of their squares; empty where it has none.
        scale: the largest of the entries, or of the sums of their absolute values.
        is_gradient: it is one, or is made of gradients: a state of an optimizer.
        rows: length of the first dimension of a tensor, None for all else.
        is_of_library: it is a plain attribute of an object of a library's.
    """

    exact: str
    frame: str
    numbers: tuple[float, ...] = ()
    scale: float = 0.0
    is_gradient: bool = False
    rows: int | None = None
    is_of_library: bool = False


def names_of(namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the user's, sorted."""
    return tuple(sorted(name for name in namespace if is_users(name)))


def end_of(
    namespace: Mapping[str, Any], names: Collection[str], said: str, beside: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Leaf]:
    """Return the leaves of what ``names`` lead to, of the generators, and of what was printed.

    Args:
        namespace: the user's; what leads back to it is not followed.
        names: those of the unchanged program: what the changed one binds besides is its own.
        said: the text that the run has printed.
        beside: more values, by what they are called.
    """
    found: dict[str, Leaf] = {}
    seen: dict[int, str] = {id(namespace): "the namespace"}
    for name, value in ({name: namespace[name] for name in names if name in namespace} | {**beside}).items():
        for path, leaf in _leaves(value, name, seen, _DEEPEST, is_gradient=False):
            found[path] = leaf
            if len(found) >= _MOST_LEAVES:
                break
    for module in own_modules():
        for name, value in vars(module).items():
            if is_users(name) and type(value) is not ModuleType and len(found) < _MOST_LEAVES:
                found.update(_leaves(value, f"{module.__name__}.{name}", seen, _DEEPEST, is_gradient=False))
    if len(found) >= _MOST_LEAVES:
        raise TooMuch(f"the names lead to more than {_MOST_LEAVES:,} values")
    found["what is printed"] = _text(said)
    found["the modes of torch"] = _plain([*map(str, _modes())])
    found.update(_generators())
    return found


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Leaf]:
    """Yield the gradients that an optimizer is about to step by."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield _tensor(parameter.grad, is_gradient=True)


def _modes() -> Iterator[object]:
    """Yield the modes and settings of torch that results depend on."""
    yield from (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled())
    yield from (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision())
    yield from (torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())


def _leaves(
    value: Any, path: str, seen: dict[int, str], depth: int, *, is_gradient: bool
) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves below ``value``; what was met before is told by the path that first led there."""
    cls = type(value)
    if is_ours(module_of(cls)) or (cls is FunctionType and is_installed(value.__globals__.get("__name__"))):
        return
    if value is None or cls in _PLAIN:
        yield path, _plain(value)
    elif cls in (float, complex):
        yield path, _number(value)
    elif issubclass(cls, type):
        if id(value) not in seen and not is_installed(module_of(value)):
            seen[id(value)] = path
            for name, item in ATTRIBUTES.read(value).items():
                if type(item) not in _CODE:
                    yield from _leaves(item, f"{path}.{name}", seen, depth - 1, is_gradient=is_gradient)
    elif depth > 0 and ((kind := kind_of(cls)) is not Kind.ATOM or has_state(value)):
        if id(value) in seen and kind is not Kind.TENSOR:
            if kind is not Kind.CALLABLE:  # a change may have defined one of two names of a function anew
                yield path, Leaf(exact=f"is {seen[id(value)]}", frame="another name")
        else:
            seen.setdefault(id(value), path)
            yield from _inner(value, kind, path, seen, depth, is_gradient=is_gradient)


def _inner(
    value: Any, kind: Kind, path: str, seen: dict[int, str], depth: int, *, is_gradient: bool
) -> Iterator[tuple[str, Leaf]]:
    if kind is Kind.TENSOR:
        yield path, _tensor(value, is_gradient=is_gradient)
        if isinstance(value, torch.nn.Parameter):  # tied to another, or frozen
            yield f"{path}, the parameter", _plain(f"{seen[id(value)]} {value.requires_grad}")
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", _tensor(value.grad, is_gradient=True)
        if hooks := getattr(value, "_backward_hooks", None):
            yield f"{path}._backward_hooks", _plain(len(hooks))
        return
    if kind is Kind.ARRAY:
        yield path, _array(value)
        return
    if kind is Kind.GENERATOR_STATE:
        yield path, _random(generator_state(value))
        return
    if kind in (Kind.SEQUENCE, Kind.TUPLE) and len(value) > _FEW and all(type(item) in _PLAIN for item in value):
        yield path, _plain([*value])  # a corpus of numbers or texts: one leaf each would hide all that comes after
        return
    if kind is not Kind.CALLABLE:
        yield path, Leaf(exact=_length(value, kind), frame=f"{type(value).__qualname__}")
    yield from _leaves(type(value), type(value).__qualname__, seen, depth, is_gradient=is_gradient)
    is_of_library = kind in _SET_UP and is_installed(module_of(type(value)))
    for name, item in (*_items(value, kind), *_places(value)):
        if is_of_library and (item is None or type(item) in _PLAIN):
            yield path + name, replace(_plain(item), is_of_library=True)
            continue
        below = is_gradient or (kind is Kind.OPTIMIZER and name == ".state")
        yield from _leaves(item, path + name, seen, depth - 1, is_gradient=below)


def _items(value: Any, kind: Kind) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with what is added to its path."""
    if kind is Kind.MAPPING:
        for at, (key, item) in enumerate(pairs_of(value, kind, _MOST_ITEMS)):
            # A key that is an object (a parameter, in an optimizer's state) is known by its place.
            yield f"[{key!r}]" if type(key) in (str, int, bool, float) else f"[{at}]", item
    elif kind in (Kind.SEQUENCE, Kind.TUPLE):
        yield from ((f"[{at}]", item) for at, item in enumerate(items_of(value, kind, _MOST_ITEMS)))
    elif kind is Kind.CALLABLE:  # what a function is given by default is its code, which a change may have written anew
        yield from ((f".{name}", item) for name, item in held_by(value) if "defaults__" not in name)
        yield from ((f".{name}", item) for name, item in (plain_dict(value) or {}).items())
    elif kind is Kind.OPTIMIZER:  # how it steps shows in what it has stepped; its learning rates are state
        members = plain_dict(value) or {}
        yield ".state", members.get("state")
        for at, group in enumerate(members.get("param_groups", ())):
            yield from ((f".param_groups[{at}][{k!r}]", v) for k, v in group.items() if type(v) in (float, list, tuple))
    elif kind is Kind.ITERATOR:
        frame = value.gi_frame if type(value) is GeneratorType else None
        yield from ((f".{name}", item) for name, item in (frame.f_locals if frame is not None else {}).items())
    elif kind is not Kind.SET and type(value).__name__ != "RemovableHandle":  # which is numbered across the process
        for name, item in sorted((plain_dict(value) or {}).items()):
            yield f".{name}", len(item) if name in _COUNTED else item


def _places(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object keeps elsewhere than in its dictionary: in slots, in a closure, in memory of its own."""
    for place in (*places_of(type(value)), *((STATE,) if has_state(value) else ())):
        for name, item in place.read(value).items():
            if name not in _OF_CODE:
                yield place.path("", name), item


def _length(value: Any, kind: Kind) -> str:
    """Return what tells of a container or an iterator without going into it."""
    if kind is Kind.SET:
        return ", ".join(sorted(repr(item) for item in value if kind_of(type(item)) is Kind.ATOM))[:_LONGEST]
    if kind in (Kind.MAPPING, Kind.SEQUENCE, Kind.TUPLE):
        return str(len(value))
    if kind is Kind.ITERATOR and type(value).__module__ == "builtins":
        return f"{operator.length_hint(value, -1)} {getattr(value, 'gi_frame', value) is None}"
    if type(value) is itertools.count:
        return repr(value)
    return ""


def _plain(value: object) -> Leaf:
    text = repr(value)
    return Leaf(exact=text if len(text) <= _LONGEST else _hash(text.encode()), frame=type(value).__name__)


def _number(value: complex) -> Leaf:
    parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
    return Leaf(exact=repr(value), frame="number", numbers=parts, scale=max(map(abs, parts)))


def _text(text: str) -> Leaf:
    """Return a text as its words, which have to be the same, and its numbers."""
    numbers = tuple(float(one) for one in _NUMBER.findall(text))[:_WHOLE]
    words = _hash(_NUMBER.sub("#", text).encode())
    return Leaf(
        exact=_hash(text.encode()),
        frame=f"{text.count(chr(10))} lines {words}",
        numbers=numbers,
        scale=max(map(abs, numbers), default=0.0),
    )


def _array(value: Any) -> Leaf:
    if value.dtype.kind in "fiub":
        return _tensor(torch.from_numpy(value.copy()), is_gradient=False)
    raw = value.tobytes() if value.dtype.kind != "O" else repr(value).encode()
    return Leaf(exact=_hash(raw), frame=f"{value.dtype} {value.shape}")


def _tensor(tensor: torch.Tensor, *, is_gradient: bool) -> Leaf:
    with torch.no_grad():
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        flat = plain.contiguous().reshape(-1)
        exact = _hash(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else ""
        frame = f"{tensor.dtype} {tuple(tensor.shape)}"
        rows = tensor.shape[0] if tensor.ndim else None
        if not flat.is_floating_point():
            return Leaf(exact=exact, frame=frame, rows=rows)
        values = flat.double()
        numbers, scale = (values, values.abs()) if values.numel() <= _WHOLE else _stretches(values)
    return Leaf(
        exact=exact,
        frame=frame,
        numbers=tuple(numbers.tolist()),
        scale=float(scale.nan_to_num(0.0, 0.0, 0.0).max()) if scale.numel() else 0.0,
        is_gradient=is_gradient,
        rows=rows,
    )


def _stretches(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over stretches of the entries and the roots of those of their squares; and of absolute values."""
    half = _WHOLE // 2
    padded = torch.nn.functional.pad(values, (0, -values.numel() % half)).view(half, -1)
    return torch.cat([padded.sum(1), padded.square().sum(1).sqrt()]), padded.abs().sum(1)


def _generators() -> Iterator[tuple[str, Leaf]]:
    import random

    numpy = sys.modules.get("numpy.random")
    yield "the generator of torch", _random(torch.get_rng_state())
    yield "the generator of random", _random(random.getstate())
    if numpy is not None:
        yield "the generator of numpy", _random(numpy.get_state())


def _random(state: Any) -> Leaf:
    plain = state.tolist() if isinstance(state, torch.Tensor) else state
    if isinstance(plain, tuple | dict) and hasattr(next(iter(plain), None), "startswith"):
        parts = plain.values() if isinstance(plain, dict) else plain
        plain = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return Leaf(exact=_hash(repr(plain).encode()), frame=RANDOM)


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]
