"""What lies in an object, as plain values: each leaf that it leads to, by the path to it; and digests of a namespace.

A leaf is small however large its tensor is: of many entries, sums over stretches are kept in place of the entries, so
that two states can be compared in another process and a difference is seen wherever it lies. Limits: what lies behind
objects of compiled libraries is not seen, nor what is more than twelve steps away from a name, those from a module to
another apart.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Complex, Integral, Number, Real
from types import FunctionType, GeneratorType
from typing import Any, Final
from weakref import ref

import torch

from oomdoctor.objects.containers import items_of, pairs_of
from oomdoctor.objects.kinds import Kind, held_by, kind_of, module_of, plain_dict
from oomdoctor.objects.named import is_installed, is_ours, is_users
from oomdoctor.objects.places import ATTRIBUTES, STATE, has_state, places_of
from oomdoctor.objects.rng import RandomState, generator_state

RANDOM: Final = "random numbers"
"""Frame of a leaf that is the state of a generator."""
ANOTHER_NAME: Final = "another name"
"""Frame of a leaf that says which path leads to the same object, and was gone before."""

_DEEPEST: Final = 12
_MOST_ITEMS: Final = 2_000
_LONGEST_LIST: Final = 1_000_000
_FEW: Final = 8
"""Items up to which a list of plain values is told item by item."""
_WHOLE: Final = 1_024
"""Entries of a tensor up to which all of them are kept; of a larger one, sums over so many stretches."""
_LONGEST: Final = 400
_LONGEST_TEXT: Final = 100_000
"""Letters up to which the numbers in a text are told from its words."""
_INDICES: Final = {
    torch.sparse_coo: ("indices",),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}
"""What tells where the entries of a sparse tensor stand."""
_COUNTED: Final = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks")
_CODE: Final = frozenset({FunctionType, staticmethod, classmethod, property})
_OF_CODE: Final = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
_RANDOM: Final = "(random number generators)"
_PLAIN: Final = frozenset({bool, int, str, bytes, bytearray})
_VALUES: Final = _PLAIN | {float, complex}
_KEYS: Final = (str, bytes, Number, tuple, frozenset)
_SET_UP: Final = (Kind.MODULE, Kind.LOADER, Kind.OBJECT)
_OPAQUE: Final = (Kind.OBJECT, Kind.ITERATOR)
_MOST_PIXELS: Final = 1 << 20
_NUMBER: Final = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value at the end of a run.

    Attributes:
        exact: what has to be the same text for the value to be the same bit for bit.
        frame: what has to be the same for the numbers to be comparable: type, dtype and shape.
        numbers: the entries, or sums over stretches of them and of their squares; empty where it has none.
        digits: of numbers in a text, what one is of the last digit that it is written with; empty for all else.
        scale: the largest of the entries, or of the sums of their absolute values.
        is_gradient: it is one, or is made of gradients: a state of an optimizer.
        shape: of a tensor, None for all else.
        is_of_library: it is a plain attribute of an object of a library's.
        pixels: the entries of a tensor of bytes that is not too large, as pictures are.
    """

    exact: str
    frame: str
    numbers: tuple[float, ...] = ()
    digits: tuple[float, ...] = ()
    scale: float = 0.0
    is_gradient: bool = False
    shape: tuple[int, ...] | None = None
    is_of_library: bool = False
    pixels: bytes = b""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor's, which is told wherever it is met."""
        return self.frame.startswith("torch.")


class Leaves:
    """Yields the leaves of several values; what was met before is told by the path that first led there.

    What leads back to the namespace is not followed. ``is_whole``: all that an optimizer holds is looked at, and not
    only what steps leave in it; but nothing in objects of other libraries than torch.
    """

    def __init__(self, namespace: Mapping[str, Any], *, is_whole: bool = False) -> None:
        self._seen: dict[int, tuple[str, Any]] = {id(namespace): ("the namespace", namespace)}
        """Path and object by identity: what is made for the walk has to live, or another takes its identity."""
        self._is_whole = is_whole

    def below(
        self, value: Any, path: str, depth: int = _DEEPEST, *, is_gradient: bool = False
    ) -> Iterator[tuple[str, Leaf]]:
        """Yield the leaves below ``value``, each with its path."""
        cls = type(value)
        if is_ours(module_of(cls)) or (cls is FunctionType and is_installed(value.__globals__.get("__name__"))):
            return
        if value is None or cls in _PLAIN or cls is range or cls is slice:
            yield path, text_leaf(value) if cls is str and len(value) <= _LONGEST_TEXT else plain_leaf(value)
        elif issubclass(cls, Number):  # of Python's, NumPy's and others, which programs count in
            yield path, _number(value)
        elif issubclass(cls, set | frozenset):
            items = _hash("\n".join(sorted(map(_spelled, value))).encode())
            yield path, Leaf(exact=items, frame=f"{cls.__qualname__} of {len(value)}")
        elif issubclass(cls, type):
            if id(value) not in self._seen and not is_installed(module_of(value)):
                self._seen[id(value)] = path, value
                for name, item in ATTRIBUTES.read(value).items():
                    if type(item) not in _CODE:
                        yield from self.below(item, f"{path}.{name}", depth - 1, is_gradient=is_gradient)
        elif depth > 0 and ((kind := kind_of(cls)) is not Kind.ATOM or has_state(value)):
            if id(value) in self._seen and kind is not Kind.TENSOR:
                if kind is not Kind.CALLABLE:  # a change may have defined one of two names of a function anew
                    yield path, Leaf(exact=f"is {self._seen[id(value)][0]}", frame=ANOTHER_NAME)
            else:
                self._seen.setdefault(id(value), (path, value))
                yield from self._inside(value, kind, path, depth, is_gradient=is_gradient)

    def _inside(
        self, value: Any, kind: Kind, path: str, depth: int, *, is_gradient: bool
    ) -> Iterator[tuple[str, Leaf]]:
        if kind is Kind.TENSOR:
            yield path, tensor_leaf(value, is_gradient=is_gradient, has_numbers=not self._is_whole)
            if isinstance(value, torch.nn.Parameter):  # tied to another, or frozen
                yield f"{path}, the parameter", plain_leaf(f"{self._seen[id(value)][0]} {value.requires_grad}")
            if value.is_leaf and value.grad is not None:
                yield f"{path}.grad", tensor_leaf(value.grad, is_gradient=True, has_numbers=not self._is_whole)
            if hooks := getattr(value, "_backward_hooks", None):
                yield f"{path}._backward_hooks", plain_leaf(len(hooks))
            return
        if kind is Kind.ARRAY:
            if value.dtype.kind in "OV":
                yield from self.below(value.tolist(), path, depth, is_gradient=is_gradient)
            else:
                yield path, _array(value)
            return
        if kind is Kind.GENERATOR_STATE:
            yield path, _random(generator_state(value))
            return
        if kind in (Kind.SEQUENCE, Kind.TUPLE) and len(value) > _FEW and all(type(item) in _PLAIN for item in value):
            text = "\n".join(map(repr, value))  # a corpus: one leaf each would hide all that comes after
            yield path, text_leaf(text) if len(text) <= _LONGEST_TEXT else plain_leaf(text)
            return
        if kind is not Kind.CALLABLE:
            yield path, Leaf(exact=_length(value, kind), frame=f"{type(value).__qualname__}")
        yield from self.below(type(value), type(value).__qualname__, depth, is_gradient=is_gradient)
        is_of_library = kind in _SET_UP and is_installed(module_of(type(value)))
        members = [*self._items(value, kind), *_places(value)]
        if not members and kind is Kind.OBJECT and not (self._is_whole and is_of_library):
            members = [*_reduced(value)]
        for name, item in members:
            if is_of_library and (item is None or type(item) in _PLAIN):
                yield path + name, replace(plain_leaf(item), is_of_library=True)
                continue
            below = is_gradient or (kind is Kind.OPTIMIZER and name == ".state")
            steps = 0 if kind is Kind.MODULE or path.endswith("._modules") else 1
            yield from self.below(item, path + name, depth - steps, is_gradient=below)

    def _items(self, value: Any, kind: Kind) -> Iterator[tuple[str, Any]]:
        """Yield what an object holds, each with what is added to its path."""
        home = module_of(type(value))
        if self._is_whole and kind in _OPAQUE and is_installed(home) and not home.startswith("torch."):
            return
        if kind is Kind.MAPPING:
            for at, (key, item) in enumerate(pairs_of(value, kind, _MOST_ITEMS)):
                # A key that is an object (a parameter, in an optimizer's state) or its identity is known by its place.
                identity: Any = id(item() if type(item) is ref else item)
                yield f"[{_spelled(key) if isinstance(key, _KEYS) and key != identity else at}]", item
        elif kind in (Kind.SEQUENCE, Kind.TUPLE):
            items = list(enumerate(items_of(value, kind, _LONGEST_LIST)))
            half = _MOST_ITEMS // 2  # what a training appends stands at the end
            few = items if len(items) <= _MOST_ITEMS else [*items[:half], *items[-half:]]
            yield from ((f"[{at}]", item) for at, item in few)
        elif kind is Kind.CALLABLE:  # other defaults are its code, which a change may have written anew
            for at, (name, item) in enumerate(held_by(value)):
                if "defaults__" not in name:
                    yield name, item
                elif isinstance(item, list | dict | set):  # in which a program may count
                    yield f"{name}[{at}]", item
            yield from ((f".{name}", item) for name, item in (plain_dict(value) or {}).items())
        elif kind is Kind.OPTIMIZER and not self._is_whole:  # how it steps shows in what it has stepped
            members = plain_dict(value) or {}
            yield ".state", members.get("state")
            for at, group in enumerate(members.get("param_groups", ())):
                kept = ((name, item) for name, item in group.items() if type(item) in (float, list, tuple))
                yield from ((f".param_groups[{at}][{name!r}]", item) for name, item in kept)
        elif kind is Kind.ITERATOR:
            frame = value.gi_frame if type(value) is GeneratorType else None
            yield from ((f".{name}", item) for name, item in (frame.f_locals if frame is not None else {}).items())
        elif type(value).__name__ != "RemovableHandle":  # numbered across the process
            for name, item in sorted((plain_dict(value) or {}).items()):
                yield f".{name}", len(item) if name in _COUNTED else item


def _places(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object keeps elsewhere than in its dictionary: in slots, in a closure, in memory of its own."""
    for place in (*places_of(type(value)), *((STATE,) if has_state(value) else ())):
        for name, item in place.read(value).items():
            if name not in _OF_CODE:
                yield place.path("", name), item


def state_digests(namespace: dict[str, Any], *, names: Collection[str] | None = None) -> dict[str, str]:
    """Return a digest for every name of the user's that holds state, and one for the random number generators."""
    found = {_RANDOM: _digest(generators())}
    for name, value in namespace.items():
        is_state = kind_of(type(value)) is not Kind.CALLABLE and (
            value is None or type(value) in _VALUES or kind_of(type(value)) is not Kind.ATOM
        )
        if is_users(name) and (names is None or name in names) and is_state:
            found[name] = _digest(Leaves(namespace, is_whole=True).below(value, ""))
    return found


def _digest(found: Iterator[tuple[str, Leaf]]) -> str:
    return _hash("\n".join(f"{path} {leaf.frame} {leaf.exact}" for path, leaf in found).encode())


def _length(value: Any, kind: Kind) -> str:
    """Return what tells of a container or an iterator without going into it."""
    if kind in (Kind.MAPPING, Kind.SEQUENCE, Kind.TUPLE):
        return str(len(value))
    if kind is Kind.ITERATOR and type(value).__module__ == "builtins":
        return f"{operator.length_hint(value, -1)} {getattr(value, 'gi_frame', value) is None}"
    if type(value) is itertools.count:
        return repr(value)
    return ""


def plain_leaf(value: object) -> Leaf:
    """Return the leaf of a number, a text or a list of them."""
    text = repr(value)
    return Leaf(exact=text if len(text) <= _LONGEST else _hash(text.encode()), frame=type(value).__name__)


def _number(value: Any) -> Leaf:
    if isinstance(value, Integral):
        return plain_leaf(int(value))
    number = complex(value) if isinstance(value, Complex) and not isinstance(value, Real) else float(value)
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return Leaf(exact=repr(number), frame="number", numbers=parts, scale=max(map(abs, parts)))


def _spelled(item: Any) -> str:
    """Return an item of a set as text: values as they are written, of other objects the type and plain attributes."""
    if isinstance(item, tuple | frozenset):
        return f"({', '.join(map(_spelled, item))})"
    if isinstance(item, Number) and not isinstance(item, Integral):
        return f"{complex(item):.5g}"  # type: ignore[call-overload]
    if item is None or isinstance(item, Integral | str | bytes):
        return repr(item)
    plain = sorted((name, value) for name, value in (plain_dict(item) or {}).items() if isinstance(value, _KEYS))
    return f"{type(item).__qualname__}({', '.join(f'{name}={_spelled(value)}' for name, value in plain)})"


def _reduced(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object that keeps nothing in sight would be pickled as; nothing of torch's own."""
    try:
        reduced = () if module_of(type(value)).startswith("torch") else value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  border: any class may refuse in any way
        return
    if isinstance(reduced, tuple):
        _, *kept = (*reduced, *(None,) * 5)[:5]
        yield from ((f" as pickled[{at}]", list(one) if at > 1 and one else one) for at, one in enumerate(kept) if one)


def text_leaf(text: str) -> Leaf:
    """Return a text as its words, which have to be the same, and its numbers."""
    written = _NUMBER.findall(text)[:_LONGEST_LIST]
    numbers = tuple(map(float, written))
    words = _hash(_NUMBER.sub("#", text).encode())
    return Leaf(
        exact=text if len(text) <= _LONGEST else _hash(text.encode()),
        frame=f"a text of {text.count(chr(10))} lines, {words}",
        numbers=numbers,
        digits=tuple(_last_digit(one) for one in written),
        scale=max(map(abs, numbers), default=0.0),
    )


def _last_digit(number: str) -> float:
    """Return what one is of the last digit of a fraction that is written out; whole numbers are not rounded."""
    fraction, _, exponent = number.lower().partition(".")[2].partition("e")
    return 10.0 ** (int(exponent or 0) - len(fraction)) if fraction else 0.0


def _array(value: Any) -> Leaf:
    if value.dtype.kind in "fiubc":
        return tensor_leaf(torch.from_numpy(value.copy()))
    return Leaf(exact=_hash(value.tobytes()), frame=f"{value.dtype} {value.shape}")


def tensor_leaf(tensor: torch.Tensor, *, is_gradient: bool = False, has_numbers: bool = True) -> Leaf:
    """Return the leaf of a tensor; without numbers, it takes no memory beside what it is told by."""
    with torch.no_grad():
        plain = tensor.detach().cpu()
        indices = b""
        if plain.layout in _INDICES:  # as a dense tensor it may be larger than memory
            plain = plain.coalesce() if plain.layout is torch.sparse_coo else plain
            told = (getattr(plain, name)() for name in _INDICES[plain.layout])
            indices, plain = b"".join(one.contiguous().numpy().tobytes() for one in told), plain.values()
        elif plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        flat = plain.contiguous().reshape(-1)
        exact = _hash(indices + flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else ""
        shape = tuple(tensor.shape)
        frame = f"{tensor.dtype} {shape}{f', {_hash(indices)}' * bool(indices)}"
        if not has_numbers or not flat.is_floating_point():
            has_pixels = has_numbers and flat.dtype is torch.uint8 and not indices and flat.numel() <= _MOST_PIXELS
            return Leaf(exact=exact, frame=frame, shape=shape, pixels=flat.numpy().tobytes() if has_pixels else b"")
        values = flat.double()
        numbers, scale = (values, values.abs()) if values.numel() <= _WHOLE else _stretches(values)
    return Leaf(
        exact=exact,
        frame=frame,
        numbers=tuple(numbers.tolist()),
        scale=float(scale.nan_to_num(0.0, 0.0, 0.0).max()) if scale.numel() else 0.0,
        is_gradient=is_gradient,
        shape=shape,
    )


def _stretches(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over stretches of the entries and the roots of those of their squares; and of absolute values.

    Entries count for more the later they stand, so that those in another order have another sum.
    """
    half = _WHOLE // 2
    padded = torch.nn.functional.pad(values, (0, -values.numel() % half)).view(half, -1)
    counts = torch.linspace(0.5, 1.5, padded.shape[1], dtype=padded.dtype)
    return torch.cat([(padded * counts).sum(1), padded.square().sum(1).sqrt()]), padded.abs().sum(1)


def generators() -> Iterator[tuple[str, Leaf]]:
    """Yield the states of the global generators."""
    state = RandomState.take()
    devices = {f"device {at}": one for at, one in enumerate(state.cuda)}
    for name, one in {"torch": state.torch_cpu, "random": state.python, "numpy": state.numpy, **devices}.items():
        if one is not None:
            yield f"the generator of {name}", _random(one)


def _random(state: Any) -> Leaf:
    plain = state.tolist() if isinstance(state, torch.Tensor) else state
    if isinstance(plain, tuple | dict) and hasattr(next(iter(plain), None), "startswith"):
        parts = plain.values() if isinstance(plain, dict) else plain
        plain = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return Leaf(exact=_hash(repr(plain).encode()), frame=RANDOM)


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]
