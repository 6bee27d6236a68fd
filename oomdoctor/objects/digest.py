"""Bit for bit: a digest of a namespace, to tell whether two runs left the same state."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

from oomdoctor.objects.kinds import Kind, kind_of, module_of, plain_dict
from oomdoctor.objects.named import is_users
from oomdoctor.objects.rng import RandomState, generator_state

__all__ = ["state_digest", "state_digests"]

_DEPTH: Final = 12
_RANDOM: Final = "(random number generators)"


def state_digest(namespace: dict[str, Any], *, names: frozenset[str] | None = None) -> str:
    """Return one digest of all that ``state_digests`` tells apart."""
    parts = state_digests(namespace, names=names)
    return _hash("\n".join(f"{name} {digest}" for name, digest in sorted(parts.items())).encode())


def state_digests(namespace: dict[str, Any], *, names: frozenset[str] | None = None) -> dict[str, str]:
    """Return a digest for every name of the user's that holds state, and one for the random number generators.

    Covered: tensors (contents, dtype, shape, gradient), modules, optimizers, schedulers, containers, numbers, text,
    and objects of the notebook's own classes. Functions, classes, modules of Python and other libraries' objects are
    left out.

    Args:
        names: the names to look at, all by default.
    """
    chosen = {name: value for name, value in namespace.items() if is_users(name) and (names is None or name in names)}
    found = {name: digest for name, value in chosen.items() if (digest := _digest(value)) is not None}
    random = RandomState.take()
    found[_RANDOM] = _hash(repr((random.python, _plain(random.numpy), _plain(random.torch_cpu), random.cuda)).encode())
    return found


def _digest(value: Any) -> str | None:
    lines: list[str] = []
    _describe(value, "", lines, {}, _DEPTH)
    return _hash("\n".join(lines).encode()) if lines else None


def _describe(value: Any, path: str, lines: list[str], seen: dict[int, str], depth: int) -> None:
    """Append a line for every value that ``value`` leads to; one reached twice is told by its first path."""
    kind = kind_of(type(value))
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        lines.append(f"{path} {value!r}")
        return
    if kind in (Kind.ATOM, Kind.CALLABLE) or depth == 0:
        return
    if id(value) in seen:
        lines.append(f"{path} is {seen[id(value)]}")
        return
    seen[id(value)] = path
    if kind is Kind.TENSOR:
        _describe_tensor(value, path, lines)
        if value.is_leaf and value.requires_grad and value.grad is not None:
            _describe_tensor(value.grad, f"{path}.grad", lines)
    elif kind is Kind.GENERATOR_STATE:
        lines.append(f"{path} {_hash(repr(_plain(generator_state(value))).encode())}")
    else:
        lines.append(f"{path} {type(value).__name__}")
        for name, item in _items(value, kind):
            _describe(item, f"{path}.{name}", lines, seen, depth - 1)


def _items(value: Any, kind: Kind) -> list[tuple[str, Any]]:
    if kind is Kind.MAPPING:
        # A key that is an object (a parameter, in an optimizer's state) is known by its place.
        return [
            (repr(key) if type(key) in (str, int, bool, float) else str(at), item)
            for at, (key, item) in enumerate(value.items())
        ]
    if kind is Kind.ARRAY:
        return [("values", value.tobytes() if value.dtype.kind != "O" else None)]
    if kind in (Kind.SEQUENCE, Kind.TUPLE):
        return [(str(at), item) for at, item in enumerate(value)]
    if kind is Kind.SET:
        return [("", item) for item in sorted(value, key=repr) if kind_of(type(item)) is Kind.ATOM]
    if type(value).__name__ == "RemovableHandle":  # numbered across the process
        return []
    is_open = module_of(type(value)).startswith(("__main__", "torch."))
    if kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.SCHEDULER, Kind.LOADER) or is_open:
        return sorted((plain_dict(value) or {}).items())
    return []


def _describe_tensor(tensor: Any, path: str, lines: list[str]) -> None:
    torch = sys.modules["torch"]
    with torch.no_grad():
        host = tensor.detach().cpu().contiguous()
        raw = host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b""
    lines.append(f"{path} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {_hash(raw)}")


def _plain(value: Any) -> Any:
    """Return ``value`` with arrays and tensors as lists, so that its text tells all of it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]
